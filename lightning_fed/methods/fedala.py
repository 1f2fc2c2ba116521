"""FedALA (Zhang et al., AAAI 2023, https://arxiv.org/abs/2212.01197), Algorithm 1."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_fed.core import Broadcast, FederationError, Phase, State
from lightning_fed.methods.families.whole_server import WholeServerModule
from lightning_fed.models import Backbones
from lightning_fed.nn.buffer_dict import BufferDict
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt


class FedALA(WholeServerModule):
    r"""FedAvg whose clients begin a turn with a mixture of their last model and the server's, entry by entry, which they learn.

    A client keeps its last model :math:`\theta_k` and a weight :math:`W_k \in [0, 1]` for each entry of the last layers. In its
    first turn it begins with the server's model :math:`w`. In a later one the last layers begin with :math:`\hat\theta = \theta_k +
    (w - \theta_k) \odot W_k` and all others with w:

    1. :math:`W_k \leftarrow W_k - \eta \nabla_{W} L_k(\hat\theta)`, kept in [0, 1], while all else is frozen and in eval mode; for
       more epochs in the second turn, in which the weights begin with 1.
    2. The whole network is trained from :math:`\hat\theta`, as in FedAvg, and sent.

    The server and what travels are FedAvg's; :math:`\theta_k` and :math:`W_k` stay. A client is measured with what its next turn
    would begin with: step 1 is done for it on its training data, and thrown away (``fine_tune/flops``). Who never took part is
    measured with w. Monitored: accuracy after aggregation of these mixtures; ``global/…`` is w.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        mixed_layers: how many layers are mixed, counted from the head, a residual block being one. The authors' code: 1, which it
            counts as two tensors.
        weight_lr: :math:`\eta`. The paper: 1.
        weight_epochs: epochs of step 1. The authors' code: 1.
        first_weight_epochs: the same in the second turn. The authors' code goes on until the last 10 losses have a standard
            deviation below 0.1: 11 at least.
        **kwargs: see :class:`.FederatedModule`. The authors: SGD, lr 0.005, one epoch, batches of 10.
    """

    flops_on_meta = False  # how a turn begins depends on how many there were

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
                "fine_tuning has part=private, but what FedALA's clients keep is learned before each measurement as it is: set it "
                "to all or head."
            )

    def build(self) -> None:
        """The network, and of its last layers the last model, the one that was received, and the weights."""
        super().build()
        names = self.backbone.last_layers(self.mixed_layers)
        own = {id(p) for name, p in self.backbone.named_parameters(remove_duplicate=False) if name in names and p.requires_grad}
        mixed = {name: p for name, p in self.named_parameters() if id(p) in own}
        self.last, self.global_layers = BufferDict(mixed), BufferDict(mixed)
        self.weights = nn.ParameterDict({name.replace(".", "/"): torch.ones_like(p) for name, p in mixed.items()})
        self.register_buffer("turns", torch.tensor(0))

    def shared_names(self) -> set[str]:
        """The network; the rest stays."""
        return {name for name in super().shared_names() if not name.startswith(("last.", "weights.")) and name != "turns"}

    def recomputed_buffers(self) -> set[str]:
        """What was received neither travels nor stays: it comes anew."""
        return {f"global_layers.{name.replace('.', '/')}" for name in self.global_layers}

    @property
    def has_statistics(self) -> bool:
        """Nothing of it is gathered."""
        return False

    def initialized_from(self) -> dict[str, str]:
        """The last model begins as the first one that is received."""
        return {f"last.{name.replace('.', '/')}": name for name in self.last}

    def initial_originals(self) -> State:
        """None: see :meth:`initialized_from`."""
        return {}

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """The server's model, whose last layers are mixed with those of the client's last one."""
        super().load_broadcast(broadcast)
        self.global_layers.update(self.mixed())
        self.mix()

    def mixed(self) -> dict[str, nn.Parameter]:
        """The parameters that are mixed, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if name in self.last}

    def mixture(self) -> State:
        r""":math:`\hat\theta` of the last layers, by name. Of weight 0 and 1 it is bit for bit one of the two."""
        weights = {name.replace("/", "."): weight for name, weight in self.weights.items()}
        return {name: torch.lerp(last, self.global_layers[name], weights[name]) for name, last in self.last.items()}

    @torch.no_grad()
    def mix(self) -> None:
        """Set the network's last layers to the mixture."""
        mixture = self.mixture()
        for name, parameter in self.mixed().items():
            parameter.copy_(mixture[name])

    def phases(self) -> list[Phase]:
        """The weights, and then FedAvg's."""
        own = [p for name, p in self.named_parameters() if not name.startswith("weights.")]
        return [*self.weight_phases(), self.local_phase("local", own, self.client_loss)]

    def fine_tuning_phases(self) -> list[Phase]:
        """The weights, and then what ``fine_tuning`` says."""
        return [*self.weight_phases(), *super().fine_tuning_phases()]

    def weight_phases(self) -> list[Phase]:
        """Step 1; none in the first turn, in which both models are the same."""
        turns = int(self.turns)
        if not turns or not (epochs := self.first_weight_epochs if turns == 1 else self.weight_epochs):
            return []
        weights, optimizer = list(self.weights.values()), self._weight_optimizer
        return [Phase("weights", weights, self.mixture_loss, optimizer, epochs, eval_modules=[self.backbone])]

    def _weight_optimizer(self, parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=self.weight_lr)

    def mixture_loss(self, batch: Any) -> Tensor:
        """The loss of a batch as the mixture predicts it, which depends on the weights."""
        x, y = self.unpack(batch)
        values = {name.removeprefix("backbone."): tensor for name, tensor in self.mixture().items()}
        return self.criterion(functional_call(self.backbone, values, (x,)), y)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer) -> None:
        """Keep weights in [0, 1], and the network at their mixture."""
        if self.phase.name == "weights":
            for weight in self.weights.values():
                weight.clamp_(0, 1)
            self.mix()

    def after_training(self, reviewed: State) -> None:
        """What was trained is the last model now."""
        self.last.update(self.mixed())
        self.turns += 1
