"""Split-Mix (Hong et al., ICLR 2022, https://openreview.net/forum?id=QNgE2ryU3Yu)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, FederationError, Phase, Server, State, noted
from lightning_fed.methods.families.classifiers import needs_classifier
from lightning_fed.methods.families.model_sizes import Assignment, SizedModule, SizedServer
from lightning_fed.models import BackboneFactory
from lightning_fed.options import PositiveInt

TAKEN = "queue/taken"
"""Name of the place in the queue, in a checkpoint."""


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with learning rate 0.01, momentum 0.9 and weight decay 5e-4, as in the authors' code."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)


class SplitMix(SizedModule):
    r"""Clients train as many independent narrow base networks as they can, and a prediction mixes any number of them.

    The server holds ``bases`` networks. In a round, a client with a budget of k gets k of them: one from a queue of all networks,
    which is reshuffled whenever it is empty, the rest drawn without replacement. On each batch every network has its own
    cross-entropy and gradients; then one step updates all. The server averages each network over the clients that trained it;
    the others do not change. A prediction is the mean of the logits, for a client over the first k networks.

    Monitored: accuracy of the full ensemble on the test data of all clients; every smaller one has ``mix_<k>/test_accuracy``. The
    full ensemble is about as large as one wide network and never equal to it. Batch norm is static and the loss masked: see
    :class:`.SizedModule`. (The authors mask the classes absent from the batch, here those absent from the client.) They weight by
    numbers of examples; FedHM's experiments use equal weights, as here.

    Args:
        backbone: one of the networks, which is narrow: ``ResNet18`` with ``width: 0.35``, say.
        num_classes: number of classes; None: as many as the data have.
        bases: number of networks.
        budgets: number of networks that a client trains; client ``k`` has entry ``k mod len(list)``. FedHM's experiments: 9, 3, 2,
            1.
        assignment: ``"fixed"``, or ``"redrawn"``: each round, every client gets one of the budgets at random.
        masked: whether to mask absent classes.
        optimizer: default: SGD, lr 0.01, momentum 0.9, weight decay 5e-4, as in the paper. FedHM's experiments: lr 0.1.
        **kwargs: see :class:`.SizedModule`. The paper: 5 ``epochs`` per round. ``gradient_clip`` clips all networks' gradients
            together.
    """

    refuses_adapters = "its bases are made of the network's own weights"
    changes_in_each_round = "a client trains other networks"

    def __init__(
        self,
        backbone: BackboneFactory,
        num_classes: PositiveInt | None = None,
        bases: PositiveInt = 9,
        budgets: Sequence[PositiveInt] = (9, 3, 2, 1),
        assignment: Assignment = "fixed",
        masked: bool = True,
        optimizer: OptimizerCallable = slow_sgd,
        **kwargs: Any,
    ) -> None:
        self.num_bases = bases
        super().__init__(backbone, budgets, num_classes, assignment, masked, optimizer, **kwargs)
        if any(not 1 <= budget <= bases for budget in budgets):
            raise FederationError(f"budgets is {list(budgets)}: give numbers of networks from 1 to bases, {bases}.")
        if isinstance(backbone, nn.Module):
            raise FederationError(
                f"SplitMix trains {bases} networks that start from different weights, but got one, a {type(backbone).__name__}: "
                "give its class or a function that builds it."
            )
        self.model_sizes = [None if budget == bases else budget for budget in budgets]

    def with_initial_weights(self, network: State, what: str = "The network") -> Self:
        """Refused: networks with equal initial weights would stay equal."""
        raise FederationError(
            f"{what} is one, but SplitMix trains networks that start from different weights: leave init_from out."
        )

    def build(self) -> None:
        count = self.num_bases if self.model_size is None else int(self.model_size)
        self.bases = nn.ModuleList(self.new_backbone() for _ in range(count))
        needs_classifier(self.bases[0], "SplitMix predicts with the mean of its networks' logits")

    def continued_names(self) -> set[str]:
        """None: each round gives the client other networks under the same names."""
        return set()

    def every_logits(self, x: Tensor) -> Tensor:
        """Logits of every network, ``(networks, B, C)``."""
        return torch.stack([self.mask(base(x)) for base in self.bases])

    def forward(self, x: Tensor) -> Tensor:
        """Mean of the logits, ``(B, C)``."""
        return self.every_logits(x).mean(dim=0)

    def client_loss(self, batch: Any) -> Tensor:
        """Sum of the networks' losses; each network gets a gradient only from its own loss."""
        x, y = self.unpack(batch)
        return torch.stack([self.criterion(logits, y) for logits in self.every_logits(x)]).sum()

    def phases(self) -> list[Phase]:
        return [replace(phase, terms=len(self.bases)) for phase in super().phases()]

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that distributes the networks and averages each over the clients that trained it."""
        self.refuse_frozen("gives a client some of many networks")
        return SplitMixServer(self, clients)


class SplitMixServer(SizedServer):
    """Assigns networks to participants and averages them.

    Args:
        method: the method, built; its sizes are numbers of networks.
        clients: all clients.
    """

    version_name = "mix"

    def __init__(self, method: SplitMix, clients: Sequence[ClientInfo]) -> None:
        super().__init__(method.shared_state(), clients, method, method.head_names())
        self.bases = method.num_bases
        self.key = int(torch.randint(2**31, ()))
        self.taken = 0  # places of the queue, by earlier cohorts
        self.assigned: dict[int, list[int]] = {}

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        """Give each participant the next network of the queue and others at random."""
        super().on_round_start(round, cohort)
        self.assigned = {}
        for turn, client in enumerate(cohort, start=self.taken):
            cycle, place = divmod(turn, self.bases)
            first = self.queue(cycle)[place]
            others = [base for base in torch.randperm(self.bases).tolist() if base != first]
            self.assigned[client.id] = [first, *others[: self._budget(client.id) - 1]]

    def queue(self, cycle: int) -> list[int]:
        """Order of the networks in a cycle, which is once through all of them: a function of the cycle's number, so that a
        continued run draws as an uninterrupted one.
        """
        return np.random.default_rng([self.key, cycle]).permutation(self.bases).tolist()

    def _budget(self, client: int) -> int:
        size = self.model_size[client]
        return self.bases if size is None else int(size)

    def version(self, size: float | None) -> State:
        """The first networks."""
        return self.state if size is None else renamed(self.state, {k: k for k in range(int(size))})

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The client's networks, in its order."""
        places = {base: place for place, base in enumerate(self.assigned[client.id])}
        return Broadcast(renamed(self.state, places), self.model_size[client.id])

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        """The first networks, as many as the client can hold."""
        return self._with_statistics(super().broadcast(client))

    def global_models(self) -> dict[str, Broadcast]:
        """``global``, all networks, and the first k for every smaller k."""
        mixes = {f"{self.version_name}_{k}": Broadcast(self.version(k), k) for k in range(1, self.bases)}
        return {name: self._with_statistics(model) for name, model in {"global": Broadcast(self.state), **mixes}.items()}

    def refresh_statistics(self, statistics_of: Callable[[Broadcast], State]) -> None:
        """Statistics of all networks; those of the first k are a part of them."""
        statistics = statistics_of(Broadcast(self.state))
        self._statistics = {None: statistics}
        for k in range(1, self.bases):
            self._statistics[k] = renamed(statistics, {base: base for base in range(k)})

    def embed(self, update: ClientUpdate) -> State:
        """The networks under their indices on the server."""
        return renamed(update.state, dict(enumerate(self.assigned[update.client])))

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Average, and advance in the queue by the cohort. If no update arrives, the server stays as it is."""
        arrived: list[int] = []
        metrics = super().aggregate(noted(updates, lambda update: arrived.append(update.client)))
        if arrived:
            self.taken += len(self.assigned)
        return metrics

    def state_dict(self) -> State:
        """The networks, and the place in the queue."""
        return super().state_dict() | {TAKEN: torch.tensor(self.taken)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict({name: tensor for name, tensor in state.items() if name != TAKEN})
        self.taken = int(state[TAKEN])


def renamed(state: State, places: Mapping[int, int]) -> State:
    """Rename ``bases.<i>.…`` with i in ``places`` to ``bases.<places[i]>.…`` and drop others; tensors of a loss are unchanged."""
    result = {name: tensor for name, tensor in state.items() if not name.startswith("bases.")}
    for name in state.keys() - result.keys():
        prefix, base, rest = name.split(".", 2)
        if int(base) in places:
            result[f"{prefix}.{places[int(base)]}.{rest}"] = state[name]
    return result
