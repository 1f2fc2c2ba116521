"""pFedSD (Jin et al., TPDS 2023, https://doi.org/10.1109/TPDS.2022.3225185)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core import ClientInfo, Phase, Server, State
from lightning_fed.methods.families.personal_model import PersonalModule
from lightning_fed.models import Backbone, Backbones
from lightning_fed.nn.losses import divergence
from lightning_fed.options import NonNegativeFloat, PositiveFloat, PositiveInt


class PFedSD(PersonalModule):
    r"""FedAvg whose clients also learn from themselves: the model that a client ended its last turn with teaches the one that it
    trains now, so that what it knew of its own data survives the server's broadcast.

    A round of a client that has taken part before, with its personal model :math:`v_k`:

    1. Load the server's :math:`w`.
    2. Train :math:`w` on :math:`L_k(w) + \lambda T^2\, \mathrm{KL}(p_{v_k} \Vert\, p_w)`, the mean over the batch, where
       :math:`p_w = \mathrm{softmax}(f_w(x) / T)`; :math:`v_k` is in eval mode and gets no gradient.
    3. :math:`v_k \leftarrow w`, which stays; send :math:`w`.

    A client that takes part for the first time has no teacher and trains as in FedAvg. What travels, and how it is merged, is
    FedAvg's. A client predicts with :math:`v_k`, one that never took part with the server's model; the server's model is measured
    as ``global``. The logged loss includes the distillation. Monitored: accuracy after aggregation; it equals that before.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        lam: :math:`\lambda`; 0 is exactly FedAvg, with personal models that nobody learns from. The authors' code: 1.
        temperature: T, which softens both. The authors' code: 1.
        weighting: how the server weights clients: ``uniform``, as the authors' code does, or by training ``examples``.
        **kwargs: see :class:`.FederatedModule`. The authors: 5 ``epochs``.

    Raises:
        FederationError: for a task or a loss that has no softmax.
    """

    needs_cross_entropy = "it distils softmax probabilities: use CrossEntropyLoss (label smoothing, class weights), or Ditto."

    trained: Tensor
    """Whether the personal model has been, a scalar."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        lam: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 1.0,
        weighting: Literal["examples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.lam = lam
        self.temperature = temperature
        self.weighting = weighting
        self._has_teacher = False  # what trained says, where it can be read without waiting for a GPU

    def build(self) -> None:
        """The networks, and whether the personal one has been trained."""
        super().build()
        self.register_buffer("trained", torch.tensor(False))

    def shared_names(self) -> set[str]:
        """The network travels; the personal model stays."""
        return super().shared_names() - {"trained"}

    def load_private_state(self, state: State) -> None:
        super().load_private_state(state)
        self._has_teacher = bool(self.trained)

    @torch.no_grad()
    def after_training(self, reviewed: State) -> None:
        """What was trained is the personal model now."""
        self.personal.load_state_dict(self.backbone.state_dict())
        self.trained.fill_(True)
        self._has_teacher = True

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """FedAvg's, whose state is a model."""
        return Server(self.update_state(), self.weighting, holds_model=True)

    @property
    def predictor(self) -> Backbone:
        """The personal model, or the server's where there is none."""
        return super().predictor if self._has_teacher else self.backbone

    def phases(self) -> list[Phase]:
        """FedAvg's, with a teacher where there is one."""
        loss = self.distilled_loss if self._has_teacher and self.lam else self.global_loss
        return [self.local_phase("local", list(self.backbone.parameters()), loss, eval_modules=[self.personal])]

    def distilled_loss(self, batch: Any) -> Tensor:
        """The loss of the network that is trained plus what the teacher has to say, from one pass through each."""
        with self.global_predicts() as logits:
            loss = self.client_loss(batch)
        x, _ = self.unpack(batch)
        with torch.no_grad():
            teacher = self.personal(x)
        T = self.temperature
        return loss + self.lam * T**2 * divergence(teacher / T, logits[0] / T)
