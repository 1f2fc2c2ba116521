"""Clients with two networks that learn from each other: a private one of any architecture, and a shared one, which travels."""

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch.cli import OptimizerCallable

from lightning_fed.core import FederatedModule, Phase
from lightning_fed.models import Backbone, BackboneFactory, Backbones
from lightning_fed.nn.joint_optimizer import Share, jointly
from lightning_fed.options import PositiveInt
from lightning_fed.seeding import branched

T = TypeVar("T")
SHARED = "shared."
"""What the names of the shared network's tensors begin with."""


class MutualLearningModule(FederatedModule):
    """Base of FML and FedKD: both networks learn from each batch at once, each with its own optimizer.

    The shared network does not affect the private one's random numbers and clipping: it draws dropout from its own random stream,
    and ``gradient_clip`` clips each network's gradients by their own norm. The server averages the shared network with equal
    weights. A client predicts with its private network.

    Args:
        backbone: the clients' private networks; client ``k`` gets entry ``k mod len(list)``.
        num_classes: number of classes; None: as many as the data have.
        shared: the network that travels; None: the first of ``backbone``.
        shared_optimizer: optimizer of the shared network. Default: the same as ``optimizer``.
        **kwargs: see :class:`.FederatedModule`.
    """

    heterogeneous = True
    weighting = "uniform"
    accumulates = False  # the shared network's random stream is branched off once per step
    needs_classes = (
        "its networks teach each other what probability each class has: "
        "use Standalone, LGFedAvg or another method whose clients may have different networks."
    )

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        shared: BackboneFactory | None = None,
        shared_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.shared_factory = (shared,)  # in a tuple, so that a given network is not a submodule; None: the first client's
        self.networks.add([] if shared is None else [shared])
        self.shared_optimizer = shared_optimizer or self.optimizer

    def build(self) -> None:
        """Build the client's own network and, drawn after it, the shared one."""
        super().build()
        [given] = self.shared_factory
        self.shared: Backbone = self.new_backbone(self.networks.factories[0] if given is None else given)

    def shared_names(self) -> set[str]:
        return {name for name in super().shared_names() if name.startswith(SHARED)}

    def both(self, run: Callable[[Backbone], T]) -> tuple[T, T]:
        """Results of ``run`` for the private network and for the shared one."""
        mine = run(self.backbone)
        with branched(self.global_step, self.device):
            return mine, run(self.shared)

    def shares(self) -> list[Share]:
        """The parts that learn at once, each with its optimizer."""
        own, shared = self.learning_parameters(self.backbone), self.learning_parameters(self.shared)
        return [(self.optimizer, own), (self.shared_optimizer, shared)]

    def phases(self) -> list[Phase]:
        shares = self.shares()
        parameters = [p for _, share in shares for p in share]
        return [self.local_phase("mutual", parameters, self.client_loss, optimizer=jointly(*shares), terms=2)]
