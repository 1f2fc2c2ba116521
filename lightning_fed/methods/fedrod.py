"""FedRoD (Chen & Chao, ICLR 2022, https://arxiv.org/abs/2107.00778)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lightning_fed.core import Broadcast, ClientInfo, FederatedModule, FederationError, Phase, Server
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeFloat, PositiveInt


class FedRoD(FederatedModule):
    r"""A shared feature extractor with a generic head, trained with balanced risk, and a decoupled personal head on top of it.

    With features :math:`z = f(x)`, generic head :math:`g` and personal head :math:`h_i`, a client minimises on each batch

    .. math:: \mathrm{CE}(g(z) + \gamma \log n_i,\; y) + \mathrm{CE}(\mathrm{sg}(g(z)) + h_i(\mathrm{sg}(z)),\; y),

    where :math:`n_i` counts the client's training examples per class (balanced softmax) and sg stops the gradient: the second
    term reaches :math:`h_i` alone. (Re-implementations that stop it at :math:`g` only, or not at all, let the personal loss train
    the extractor.) :math:`f` and :math:`g` travel, weighted by training examples. A client predicts with the sum
    :math:`g(z) + h_i(z)`. Monitored: accuracy after aggregation. ``train/local_loss`` is the mean of the two terms.

    ``generic/test_accuracy`` is that of :math:`g(z)` alone on the test data of all clients, the paper's G-FL. With the
    hypernetwork :math:`H` there is also ``everybody/test_accuracy``, of :math:`g + H(n)` with all clients' numbers n per class.

    Args:
        backbone: the network of every client: f and g.
        num_classes: number of classes; None: as many as the data have.
        personal_head: ``"linear"``: a private h_i, zero at first, so that a client starts as the generic model. ``"hyper"``: h_i
            comes from the client's class frequencies by a shared two-layer network ``C → 16 → |h|``, which travels with f and g.
        gamma: strength γ of the balanced softmax; 0 is plain cross-entropy, 1 the paper's.
        **kwargs: see :class:`.FederatedModule`. ``gradient_clip`` clips all gradients of a step together, so that the personal
            head's gradient limits the others.
    """

    needs_cross_entropy = (
        "its balanced softmax is a cross-entropy of classes: use CrossEntropyLoss (label smoothing, class weights), or FedRep."
    )

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        personal_head: Literal["linear", "hyper"] = "linear",
        gamma: NonNegativeFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.personal_head = personal_head
        self.gamma = gamma

    def build(self) -> None:
        """Build the backbone and, drawn after it, the personal head or the hypernetwork."""
        super().build()
        head = self.backbone.head
        self.personal: nn.Module
        if self.personal_head == "linear":
            self.personal = nn.Linear(head.in_features, self.num_classes)
            nn.init.zeros_(self.personal.weight)
            nn.init.zeros_(self.personal.bias)
        else:
            outputs = self.num_classes * (head.in_features + 1)
            self.personal = nn.Sequential(nn.Linear(self.num_classes, 16), nn.ReLU(), nn.Linear(16, outputs))

    def shared_names(self) -> set[str]:
        """Names in extractor and generic head, and in the hypernetwork, but not in a linear personal head."""
        shared = super().shared_names()
        return shared if self.personal_head == "hyper" else {name for name in shared if not name.startswith("personal.")}

    def label_counts(self) -> Tensor:
        """The client's training examples per class, ``(C,)``."""
        if self.client is None:
            raise FederationError(
                "FedRoD needs the client's label counts: train it in a Federation, or with datamodule=data.client(k)."
            )
        if len(self.client.label_counts) != self.num_classes:
            raise FederationError(
                f"FedRoD needs the client's examples of each of the {self.num_classes} classes, but the data count them by "
                f"{len(self.client.label_counts)} other labels: give data whose labels are what is predicted, or use FedRep."
            )
        dtype = torch.promote_types(self.backbone.head.weight.dtype, torch.float32)
        return torch.tensor(self.client.label_counts, dtype=dtype, device=self.device)

    def personal_logits(self, features: Tensor) -> Tensor:
        """h_i of features ``(B, D)``: ``(B, C)``."""
        if self.personal_head == "linear":
            return self.personal(features)
        counts = self.label_counts()
        flat = self.personal((counts / counts.sum().clamp(min=1)).to(features.dtype))
        weight, bias = flat[: -self.num_classes].view(self.num_classes, -1), flat[-self.num_classes :]
        return linear(features, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """g(z) + h_i(z), ``(B, C)``."""
        features = self.backbone.encode(x)
        return self.backbone.classify(features) + self.personal_logits(features)

    def client_loss(self, batch: Any) -> Tensor:
        """The sum of the generic and the personal loss."""
        x, y = self.unpack(batch)
        features = self.backbone.encode(x)
        generic = self.backbone.classify(features)
        prior = torch.xlogy(self.gamma, self.label_counts()).clamp(min=math.log(1e-12))  # of absent classes; -inf would give NaN
        personal = generic.detach() + self.personal_logits(features.detach())
        return self.criterion(generic + prior, y) + self.criterion(personal, y)

    def phases(self) -> list[Phase]:
        return [replace(phase, terms=2) for phase in super().phases()]

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages, and the models made of the average."""
        return RoDServer(self.update_state(), self.weighting)


class RoDServer(Server):
    """Federated averaging whose state gives the generic model and, with a hypernetwork, one with the head of all clients."""

    def global_models(self) -> dict[str, Broadcast]:
        """``generic`` and, if a hypernetwork travels, ``everybody``: if its last layer is zero, its heads add nothing."""
        last = {name: torch.zeros_like(tensor) for name, tensor in self.state.items() if name.startswith("personal.2.")}
        return {"generic": Broadcast(self.state | last), **({"everybody": Broadcast(self.state)} if last else {})}
