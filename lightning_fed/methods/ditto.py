"""Ditto (Li et al., ICML 2021, https://arxiv.org/abs/2012.04221), Algorithm 1."""

from typing import Any, Literal

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fed.core import KeepsGlobalParameters, Phase, State
from lightning_fed.methods.families.personal_model import PersonalModule
from lightning_fed.models import Backbones
from lightning_fed.nn.proximal import half_squared_distance
from lightning_fed.options import NonNegativeFloat, NonNegativeInt, PositiveInt


class Ditto(PersonalModule, KeepsGlobalParameters):
    r"""FedAvg's global model, and for each client a personal model that is regularized towards it.

    A round of a client:

    1. Load the server's :math:`w^t`, train :math:`w` as in FedAvg, and send it.
    2. Train the personal :math:`v_k`, which stays, on :math:`L_k(v) + \frac{\lambda}{2} \lVert v - w^t \rVert^2`: near the model
       that the server sent, not near the :math:`w` that was just trained.

    A client predicts with :math:`v_k`. Monitored: accuracy after aggregation; it equals that before. The personal models do not
    affect :math:`w`, which is FedAvg's, bit for bit. The logged loss does not include the second term,
    ``train/personal_penalty``. The paper chooses :math:`\lambda` for each client on validation data; here it is one number.

    Args:
        backbone: the network of every client, both :math:`w` and :math:`v_k`.
        num_classes: number of classes; None: as many as the data have.
        lam: weight :math:`\lambda`; 0 trains the personal models alone. The paper: one of {0.05, 0.1, 1, 2}.
        start: initial :math:`v_k`: the ``initial`` global model, or the ``first_broadcast`` that the client gets.
        personal_optimizer: optimizer of :math:`v_k`. Default: ``optimizer``.
        personal_epochs: local epochs of :math:`v_k` per round. Default: ``epochs``.
        **kwargs: see :class:`.FederatedModule`; ``optimizer`` and ``epochs`` are those of :math:`w`.
    """

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        lam: NonNegativeFloat = 0.1,
        start: Literal["initial", "first_broadcast"] = "initial",
        personal_optimizer: OptimizerCallable | None = None,
        personal_epochs: NonNegativeInt | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.lam = lam
        self.start = start
        self.personal_optimizer = personal_optimizer or self.optimizer
        self.personal_length = {} if personal_epochs is None else {"epochs": personal_epochs, "steps": None}

    def initial_originals(self) -> State:
        """The personal network is a copy of the initial network, unless it starts as the first broadcast."""
        return super().initial_originals() if self.start == "initial" else {}

    def phases(self) -> list[Phase]:
        """Train the global network first, so that the personal one does not affect it, then the personal one."""
        shared, personal = list(self.backbone.parameters()), list(self.personal.parameters())
        own: dict[str, Any] = {"optimizer": self.personal_optimizer, "penalty": self.proximal_term if self.lam else None}
        return [
            self.local_phase("local", shared, self.global_loss),
            self.local_phase("personal", personal, self.client_loss, **own, **self.personal_length),
        ]

    def proximal_term(self) -> Tensor:
        """The term that is added to the personal network's loss."""
        own = dict(self.personal.named_parameters())
        pairs = [(own[name.removeprefix("backbone.")], anchor) for name, anchor in self.global_parameters.items()]
        return self.lam * half_squared_distance(*zip(*pairs, strict=True))
