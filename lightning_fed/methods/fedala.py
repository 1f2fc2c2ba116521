"""FedALA (Zhang et al., AAAI 2023, https://arxiv.org/abs/2212.01197), Algorithm 1."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core import Broadcast, FederationError, Phase, State
from lightning_fed.methods.families.whole_server import WholeServerModule
from lightning_fed.models import Backbones
from lightning_fed.nn.buffer_dict import BufferDict
from lightning_fed.nn.losses import call_with
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt


class FedALA(WholeServerModule):
    r"""FedAvg whose clients start from a learned element-wise mixture of their last model and the global one.

    A client keeps its last model :math:`\theta_k` and a weight :math:`W_k \in [0, 1]` for each entry of the last layers. In its
    first turn it starts from the server's model :math:`w`. In later turns the last layers start from :math:`\hat\theta = \theta_k +
    (w - \theta_k) \odot W_k` and all others from w:

    1. :math:`W_k \leftarrow W_k - \eta \nabla_{W} L_k(\hat\theta)`, kept in [0, 1], with all else frozen and in eval mode; for
       more epochs in the second turn, in which the weights start at 1.
    2. The whole network is trained from :math:`\hat\theta`, as in FedAvg, and sent.

    The server and the payload are FedAvg's; :math:`\theta_k` and :math:`W_k` stay. A client is evaluated with the model that its
    next turn would start from: step 1 is done on its training data, and its result discarded (``fine_tune/flops``). A client that
    never took part is evaluated with w. Monitored: accuracy after aggregation of these mixtures; ``global/…`` is w.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        mixed_layers: number of mixed layers, counted from the head; a residual block counts as one. The authors' code: 1, which
            it counts as two tensors.
        weight_lr: :math:`\eta`. The paper: 1.
        weight_epochs: epochs of step 1. The authors' code: 1.
        first_weight_epochs: the same in the second turn. The authors' code continues until the last 10 losses have a standard
            deviation below 0.1: at least 11.
        **kwargs: see :class:`.FederatedModule`. The authors: SGD, lr 0.005, one epoch, batches of 10.
    """

    beside_the_model = ("last.", "weights.", "turns")
    flops_without_values = False  # the phases of a turn depend on the number of earlier turns

    turns: Tensor
    """How many the client has ended."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        mixed_layers: PositiveInt = 1,
        weight_lr: PositiveFloat = 1.0,
        weight_epochs: NonNegativeInt = 1,
        first_weight_epochs: NonNegativeInt = 11,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.mixed_layers = mixed_layers
        self.weight_lr = weight_lr
        self.weight_epochs = weight_epochs
        self.first_weight_epochs = first_weight_epochs
        if self.fine_tuning.length() and self.fine_tuning.part == "private":
            raise FederationError(
                "fine_tuning has part=private, but FedALA's private weights are learned before each evaluation anyway: set part "
                "to all or head."
            )

    def build(self) -> None:
        """Build the network and, for its last layers, buffers for the last model, the received model and the weights."""
        super().build()
        names = self.backbone.last_layers(self.mixed_layers)
        own = {id(p) for name, p in self.backbone.named_parameters(remove_duplicate=False) if name in names and p.requires_grad}
        mixed = {name: p for name, p in self.named_parameters() if id(p) in own}
        self.last, self.global_layers = BufferDict(mixed), BufferDict(mixed)
        self.weights = nn.ParameterDict({name.replace(".", "/"): torch.ones_like(p) for name, p in mixed.items()})
        self.register_buffer("turns", torch.tensor(0))

    def continued_names(self) -> set[str]:
        """Without the mixed layers, which start from what the client kept."""
        return super().continued_names() - {*self.last}

    def recomputed_buffers(self) -> set[str]:
        """The received layers, which neither travel nor stay: each broadcast brings them anew."""
        return {f"global_layers.{name.replace('.', '/')}" for name in self.global_layers}

    @property
    def has_statistics(self) -> bool:
        """False: there are no statistics to gather."""
        return False

    def initialized_from(self) -> dict[str, str]:
        """The last model starts as the first received one."""
        return {f"last.{name.replace('.', '/')}": name for name in self.last}

    def initial_originals(self) -> State:
        """None: see :meth:`initialized_from`."""
        return {}

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """Load the server's model, and mix its last layers with those of the client's last model."""
        super().load_broadcast(broadcast)
        self.global_layers.update(self.global_layers.counterparts(self))
        self.mix()

    def mixture(self) -> State:
        r""":math:`\hat\theta` of the last layers, by name. With weight 0 or 1 it is one of the two models, bit for bit."""
        weights = {name.replace("/", "."): weight for name, weight in self.weights.items()}
        return {name: torch.lerp(last, self.global_layers[name], weights[name]) for name, last in self.last.items()}

    @torch.no_grad()
    def mix(self) -> None:
        """Set the network's last layers to the mixture."""
        mixture = self.mixture()
        for name, parameter in self.last.counterparts(self).items():
            parameter.copy_(mixture[name])

    def phases(self) -> list[Phase]:
        """Learn the weights, then train as in FedAvg."""
        own = [p for name, p in self.named_parameters() if not name.startswith("weights.")]
        return [*self.evaluation_phases(), self.local_phase("local", own, self.client_loss)]

    def evaluation_phases(self) -> list[Phase]:
        """Step 1; none in the first turn, in which both models are equal."""
        turns = int(self.turns)
        if not turns or not (epochs := self.first_weight_epochs if turns == 1 else self.weight_epochs):
            return []
        weights, optimizer = list(self.weights.values()), partial(torch.optim.SGD, lr=self.weight_lr)
        return [Phase("weights", weights, self.mixture_loss, optimizer, epochs, eval_modules=[self.backbone])]

    def mixture_loss(self, batch: Any) -> Tensor:
        """The mixture's loss on a batch, as a function of the weights."""
        x, y = self.unpack(batch)
        values = {name.removeprefix("backbone."): tensor for name, tensor in self.mixture().items()}
        return self.criterion(call_with(self.backbone, values, x), y)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Keep weights in [0, 1], and the network at their mixture."""
        if self.phase.name == "weights":
            for weight in self.weights.values():
                weight.clamp_(0, 1)
            self.mix()

    def after_training(self, sums: State) -> None:
        """Keep the trained layers as the last model."""
        self.last.update(self.last.counterparts(self))
        self.turns += 1
