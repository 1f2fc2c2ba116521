"""APFL (Deng, Kamani & Mahdavi 2020, https://arxiv.org/abs/2003.13461), Algorithm 1."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core import Phase, State
from lightning_fed.methods.families.personal_model import PERSONAL, PersonalModule
from lightning_fed.models import Backbones
from lightning_fed.nn.joint_optimizer import Share, jointly
from lightning_fed.nn.losses import call_with
from lightning_fed.options import ClosedUnitInterval, NonNegativeFloat, PositiveInt
from lightning_fed.seeding import branched


class APFL(PersonalModule):
    r"""Each client predicts with an adaptive mixture of FedAvg's global model and a local model, which is trained in the mixture.

    A client predicts with :math:`\bar v_k = \alpha_k v_k + (1 - \alpha_k) w`, a mixture of weights. With each batch of a turn

    - :math:`w \leftarrow w - \eta \nabla L_k(w)`, as in FedAvg; it is sent;
    - :math:`v_k \leftarrow v_k - \eta\, \alpha_k \nabla L_k(\bar v_k)`, the gradient in :math:`v_k` at the mixture before the
      step; it stays;
    - with ``alpha_lr``, only in the first step of a turn: :math:`\alpha_k \leftarrow \alpha_k - \eta_\alpha \langle v_k - w,
      \nabla L_k(\bar v_k) \rangle`, kept in [0, 1]; it stays.

    :math:`w` is not affected by the rest: it is FedAvg's, bit for bit. With :math:`\alpha` 0 a client predicts with the global
    model, with 1 with a model that has learned alone. Batch-norm statistics are mixed like weights; those of :math:`v_k` are the
    mixture's. With ``adapters``, A and B are mixed separately, not their product. The logged loss is the mean of both.
    Monitored: accuracy after aggregation, of the mixture with the new :math:`w`.

    Args:
        backbone: the network of every client, both :math:`w` and :math:`v_k`.
        num_classes: number of classes; None: as many as the data have.
        alpha: initial :math:`\alpha_k`. The authors' code: 0.5.
        alpha_lr: :math:`\eta_\alpha`; 0: :math:`\alpha` is fixed.
        personal_optimizer: optimizer of :math:`v_k`. Default: ``optimizer``.
        **kwargs: see :class:`.FederatedModule`.
    """

    scales_gradients = False  # the step in which alpha learns could be skipped when scaled gradients overflow
    accumulates = False  # the mixture's random stream is branched off once per step

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        alpha: ClosedUnitInterval = 0.5,
        alpha_lr: NonNegativeFloat = 0.0,
        personal_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.initial_alpha = alpha
        self.alpha_lr = alpha_lr
        self.personal_optimizer = personal_optimizer or self.optimizer
        self._alpha_learns = False  # except in the first step of a turn

    def build(self) -> None:
        super().build()
        self.alpha = nn.Parameter(torch.tensor(self.initial_alpha))

    def shared_names(self) -> set[str]:
        """Names in the global network; the other one and :math:`alpha` stay."""
        return super().shared_names() - {"alpha"}

    def mixture(self, alpha: Tensor) -> State:
        """The mixture that the client predicts with, by name in the network: its trainable weights and its statistics. At 0 and 1
        it is one of the two networks, bit for bit.
        """
        mixed, shared = dict[str, Tensor](), self.backbone.state_dict()
        for name, own in self.personal.state_dict(keep_vars=True).items():
            if f"{PERSONAL}{name}" not in self.frozen_names:
                mixed[name] = torch.lerp(shared[name], own, alpha.to(own.dtype)) if own.is_floating_point() else shared[name]
        return mixed

    def forward(self, x: Any) -> Tensor:
        """Logits of the mixture; within :meth:`global_predicts` those of the global network."""
        if self._outputs is not None:
            return super().forward(x)
        values = self.mixture(self.alpha if self._alpha_learns else self.alpha.detach())
        if self.training:  # its statistics are taken, not mixed
            buffers = {name for name, _ in self.personal.named_buffers(remove_duplicate=False)}
            values = {name: tensor for name, tensor in values.items() if name not in buffers}
        logits: Tensor = call_with(self.personal, values, x)
        return logits

    def phases(self) -> list[Phase]:
        """Train both networks at once, each with its own optimizer."""
        shares: list[Share] = [
            (self.optimizer, self.learning_parameters(self.backbone)),
            (self.personal_optimizer, self.learning_parameters(self.personal)),
        ]
        if self.alpha_lr:
            shares.append((partial(torch.optim.SGD, lr=self.alpha_lr), [self.alpha]))
        return [
            self.local_phase("local", [p for _, own in shares for p in own], self.joint_loss, optimizer=jointly(*shares), terms=2)
        ]

    def joint_loss(self, batch: Any) -> Tensor:
        """The losses of the global network and of the mixture on a batch. Dropout of the mixture has its own random stream."""
        loss = self.global_loss(batch)
        self._alpha_learns = self.global_step == 0
        try:
            with branched(self.global_step, self.device):
                return loss + self.client_loss(batch)
        finally:
            self._alpha_learns = False

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Keep :math:`alpha` in [0, 1]; it has learned, and private gradients, which have noise, must not move it any more."""
        self.alpha.clamp_(0, 1).requires_grad_(False)

    def export_state(self, private: bool = True) -> State:
        """The mixture with the frozen tensors; without private state, the global network."""
        state = super().export_state(private)
        mixed = self.mixture(self.alpha.detach()) if private else {}
        return state | {f"backbone.{name}": tensor.detach() for name, tensor in mixed.items()}
