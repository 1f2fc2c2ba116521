"""pFedLoRA (Yi et al. 2023, https://arxiv.org/abs/2310.13283; its first version was called FedLoRA)."""

from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fed.core import ClientInfo, FederatedModule, FederationError, Phase, Server, default_optimizer, one_per_architecture
from lightning_fed.models import Backbone, Backbones
from lightning_fed.models.factory import name_of
from lightning_fed.options import ClosedUnitInterval, NonNegativeInt, PositiveInt


class PFedLoRA(FederatedModule):
    r"""Clients with different networks share one small homogeneous adapter, a second classifier on each encoder's representation.

    A client's network is an encoder :math:`f_k` and a head :math:`h_k`. The adapter :math:`A(\theta)` is a second, smaller
    head on the encoder's representation. Its output is never added to the network's: it is a parallel classifier, and
    inference uses the network alone. Only :math:`\theta` travels. The networks stay private, and each is initialized independently.

    A round of a client (iterative learning, Section 4.1):

    1. Load the server's :math:`\theta`, freeze it, and train the network :math:`\omega_k` for ``epochs`` epochs on
       :math:`(1-\mu)\,\mathrm{CE}(A(f_k(x)), y) + \mu\,\mathrm{CE}(h_k(f_k(x)), y)`. The first term reaches the encoder only.
    2. Freeze the network, with dropout and batch norm in eval mode, and train :math:`\theta` for ``adapter_epochs`` epochs on
       :math:`\mathrm{CE}(A(f_k(x)), y)`.
    3. Send :math:`\theta`; the server averages, weighted by training examples.

    Readings of the paper. It weights by :math:`n_k/n` with :math:`n` over all clients while summing over the participants, which
    would shrink the adapter; here the weights sum to 1 over the participants. Its equations cut after the convolutions (``cut:
    conv``), its experiments after the first (homogeneous) or the second linear layer (heterogeneous, the default). Bias and
    activation of the adapter are not stated; see ``adapter``. Monitored: accuracy after aggregation (equal to that before).

    Args:
        backbone: the clients' networks; client ``k`` gets entry ``k mod len(list)``.
        num_classes: number of classes C; None: as many as the data have.
        hidden_dim: width h of the adapter. Section 6.1: {20, 40, 60, 80} heterogeneous, {100, …, 500} homogeneous.
        mu: weight :math:`\mu` of the head's own loss. Paper: in [0.5, 1), larger is better (Section 6.3.3 of its first version).
            1: the networks train exactly as in Standalone.
        cut: where the encoder ends: ``"features"``, the input of the head, 500 wide in all five CNNs; ``"fc1"`` for
            homogeneous CNNs; ``"conv"``, after the convolutions, as in the paper's equations, for CNNs with equally many filters.
        adapter: ``"reduction"``: Linear(d, h) → ReLU → Linear(h, C), a narrow copy of the head. ``"factorized"``: Linear(d, h)
            without bias → Linear(h, C), no activation, a rank-h factorization of one d × C matrix; Gaussian first factor of
            standard deviation 1/√h, second factor and bias zero, as in LoRA, so that all its logits are 0 at first.
        adapter_bias: whether the adapter's layers have biases (the first factor never has one).
        optimizer: optimizer of the network. Default: SGD, lr 0.01.
        adapter_optimizer: optimizer of the adapter. Default: the same as ``optimizer``.
        epochs: epochs E of the network per round. Section 6.1: 1 or 10.
        adapter_epochs: epochs of the adapter per round. Default: as long as the network, in ``epochs`` or ``steps``.
        **kwargs: see :class:`.FederatedModule`.
    """

    heterogeneous = True

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        hidden_dim: PositiveInt = 60,
        mu: ClosedUnitInterval = 0.9,
        cut: str = "features",
        adapter: Literal["reduction", "factorized"] = "reduction",
        adapter_bias: bool = True,
        optimizer: OptimizerCallable = default_optimizer,
        adapter_optimizer: OptimizerCallable | None = None,
        epochs: NonNegativeInt = 1,
        adapter_epochs: NonNegativeInt | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, epochs, **kwargs)
        if not 0 <= mu <= 1:
            raise FederationError(f"mu is {mu}: give a weight in [0, 1].")
        self.mu = mu
        self.cut = cut
        self.hidden_dim = hidden_dim
        self.adapter_kind = adapter
        self.adapter_bias = adapter_bias
        self.adapter_optimizer = adapter_optimizer or optimizer
        self.adapter_length = {} if adapter_epochs is None else {"epochs": adapter_epochs, "steps": None}

    def build(self) -> None:
        """Build the client's network and, drawn after it, the adapter."""
        super().build()
        width = self.width(self.backbone)
        self.adapter = build_adapter(width, self.hidden_dim, self.num_classes, self.adapter_kind, self.adapter_bias)

    def width(self, network: Backbone) -> int:
        """Width of a network's representation at the cut."""
        if self.cut not in network.cuts:
            known = f"set cut to one of {sorted(network.cuts)}" if network.cuts else "name its head"
            raise FederationError(
                f"{name_of(network)} cannot be cut at {self.cut!r}: {known}, or wrap the network with cuts, which say where and "
                "how wide (Backbone.wrap(network, head='fc', cuts={'layer': 512}))."
            )
        return network.cuts[self.cut]

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """Average the adapter; check before the first round that it fits every network."""
        expected = self.width(self.backbone)
        for client, other in one_per_architecture(self, clients):
            if (width := self.width(other.backbone)) != expected:
                raise FederationError(
                    f"Client {client.id}'s network, {name_of(other.backbone)}, is {width} wide at {self.cut!r}, but that of "
                    f"client {clients[0].id}, {name_of(self.backbone)}, is {expected}, and all share one adapter: set cut to "
                    "a place where all are equally wide, or choose other networks."
                )
        return super().configure_server(clients)

    def shared_names(self) -> set[str]:
        return {name for name in self.state_dict() if name.startswith("adapter.")}

    def phases(self) -> list[Phase]:
        """Train the network, then the adapter: whole epochs, not interleaved batches."""
        network, adapter = list(self.backbone.parameters()), list(self.adapter.parameters())
        return [
            self.local_phase("local", network, self.client_loss),
            self.local_phase(
                "adapter",
                adapter,
                self.adapter_loss,
                optimizer=self.adapter_optimizer,
                eval_modules=[self.backbone],
                **self.adapter_length,
            ),
        ]

    def client_loss(self, batch: Any) -> Tensor:
        r""":math:`(1-\mu)\,\ell_1 + \mu\,\ell_2` of a batch; without the adapter's branch if its weight is zero."""
        x, y = self.unpack(batch)
        representation, logits = self.backbone.encode_and_classify(x, self.cut)
        own = self.criterion(logits, y)
        if self.mu == 1:
            return own
        return (1 - self.mu) * self.criterion(self.adapter(representation), y) + self.mu * own

    def adapter_loss(self, batch: Any) -> Tensor:
        """The loss of the adapter on the frozen encoder's representation."""
        x, y = self.unpack(batch)
        return self.criterion(self.adapter(self.backbone.encode(x, self.cut)), y)


def build_adapter(
    in_dim: int, hidden_dim: int, num_classes: int, kind: Literal["reduction", "factorized"], bias: bool
) -> nn.Sequential:
    """The shared branch: representation ``(B, in_dim)`` to logits ``(B, num_classes)``; see :class:`PFedLoRA`."""
    if kind == "reduction":
        return nn.Sequential(nn.Linear(in_dim, hidden_dim, bias), nn.ReLU(), nn.Linear(hidden_dim, num_classes, bias))
    first, second = nn.Linear(in_dim, hidden_dim, bias=False), nn.Linear(hidden_dim, num_classes, bias)
    nn.init.normal_(first.weight, std=hidden_dim**-0.5)
    for parameter in second.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(first, second)
