"""pFedSD (Jin et al., TPDS 2023, https://doi.org/10.1109/TPDS.2022.3225185)."""

from typing import Any

import torch
from torch import Tensor

from lightning_fed.core import Phase, State
from lightning_fed.methods.families.personal_model import PersonalModule
from lightning_fed.models import Backbone, Backbones
from lightning_fed.nn.losses import divergence
from lightning_fed.options import NonNegativeFloat, PositiveFloat, PositiveInt


class PFedSD(PersonalModule):
    r"""FedAvg with self-knowledge distillation, in which a client's model from its last turn teaches the one that it trains now.

    A round of a client that has taken part before, with its personal model :math:`v_k`:

    1. Load the server's :math:`w`.
    2. Train :math:`w` on :math:`L_k(w) + \lambda T^2\, \mathrm{KL}(p_{v_k} \Vert\, p_w)`, the mean over the batch, where
       :math:`p_w = \mathrm{softmax}(f_w(x) / T)`; :math:`v_k` is in eval mode and gets no gradient.
    3. :math:`v_k \leftarrow w`, which stays; send :math:`w`.

    So the client's knowledge of its own data survives the server's broadcast. A client that takes part for the first time has no
    teacher and trains as in FedAvg. Payload and average are FedAvg's. A client predicts with :math:`v_k`, or with the server's
    model if it never took part; the server's model is evaluated as ``global``. The logged loss includes the distillation.
    Monitored: accuracy after aggregation; it equals that before.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        lam: :math:`\lambda`; 0 is exactly FedAvg, with personal models that do not teach. The authors' code: 1.
        temperature: T, which softens both predictions. The authors' code: 1.
        **kwargs: see :class:`.FederatedModule`. The authors: 5 ``epochs``, and ``weighting`` ``uniform``, which is the default.

    Raises:
        FederationError: for a task or a loss without a softmax.
    """

    weighting = "uniform"
    shares_whole_model = True  # the server's is one; personal models stay
    needs_cross_entropy = "it distils softmax probabilities: use CrossEntropyLoss (label smoothing, class weights), or Ditto."

    trained: Tensor
    """Whether the personal model has been, a scalar."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        lam: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.lam = lam
        self.temperature = temperature
        self._has_teacher = False  # the value of trained, readable without waiting for a GPU

    def build(self) -> None:
        """Build the networks, and the flag whether the personal one has been trained."""
        super().build()
        self.register_buffer("trained", torch.tensor(False))

    def shared_names(self) -> set[str]:
        """Names in the network; the personal model stays."""
        return super().shared_names() - {"trained"}

    def load_private_state(self, state: State) -> None:
        super().load_private_state(state)
        self._has_teacher = bool(self.trained)

    @torch.no_grad()
    def after_training(self, sums: State) -> None:
        """Keep the trained model as the personal one."""
        self.personal.load_state_dict(self.backbone.state_dict())
        self.trained.fill_(True)
        self._has_teacher = True

    @property
    def predictor(self) -> Backbone:
        """The personal model, or the server's if there is none."""
        return super().predictor if self._has_teacher else self.backbone

    def phases(self) -> list[Phase]:
        """FedAvg's phase, with a teacher if there is one."""
        loss = self.distilled_loss if self._has_teacher and self.lam else self.global_loss
        return [self.local_phase("local", list(self.backbone.parameters()), loss, eval_modules=[self.personal])]

    def fine_tuning_phases(self) -> list[Phase]:
        """Those of ``fine_tuning``; a client without a personal model has nothing private to tune."""
        return super().fine_tuning_phases() if self._has_teacher or self.fine_tuning.part != "private" else []

    def distilled_loss(self, batch: Any) -> Tensor:
        """The loss of the trained network plus the distillation term, from one pass through each network."""
        with self.global_predicts() as logits:
            loss = self.client_loss(batch)
        x, _ = self.unpack(batch)
        with torch.no_grad():
            teacher = self.personal(x)
        T = self.temperature
        return loss + self.lam * T**2 * divergence(teacher / T, logits[0] / T)
