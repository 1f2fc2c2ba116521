"""Clients of different capacity: one global model on the server, and smaller versions of it on the clients."""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, EntryMean, FederatedModule, FederationError, Server, State
from lightning_fed.models import Backbone, BackboneFactory
from lightning_fed.nn import mask_absent, running_statistics
from lightning_fed.options import PositiveInt

Assignment = Literal["fixed", "redrawn"]


def default_sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with learning rate 0.1, momentum 0.9 and weight decay 5e-4: HeteroFL's, and what the FedHM paper states for all methods
    that it compares.
    """
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)


class SizedModule(FederatedModule):
    r"""Base of FedHM, HeteroFL, FedRolex and Split-Mix: static batch norm and a masked loss.

    *Static batch norm* (HeteroFL). Running means and variances neither travel nor are averaged. Before each evaluation every
    client passes its training data once through the evaluated model, in batches as in training; the statistics are the
    plain mean over the batches of all clients. These passes, like all evaluation, are not counted as traffic or FLOPs.

    *Masked cross-entropy* (HeteroFL). A client's logits of classes that it has no training example of are set to 0: those rows of
    the head get no gradient. The server averages a row of the head over the clients that have its class. A client is evaluated with
    the mask, the global model without.

    Monitored: accuracy of the global model on the test data of all clients. ``before/…`` and ``after/…`` are each client's own
    version, masked, on its own data.

    Args:
        backbone: the global model.
        model_sizes: the sizes of its versions; 1 is the whole. Client ``k`` has entry ``k mod len(list)``.
        num_classes: number of classes; None: as many as the data have.
        assignment: ``"fixed"``, or ``"redrawn"``: each round, every client gets one of the sizes at random.
        masked: whether to mask absent classes.
        optimizer: optimizer of the clients. Default: SGD, lr 0.1, momentum 0.9, weight decay 5e-4; see :func:`default_sgd`.
        **kwargs: see :class:`.FederatedModule`.
    """

    refuses_adapters = "its models of several sizes are made of the network's own weights"

    changes_in_each_round = ""
    """Why a client's moments are not of what it trains next, as a part of a sentence. Empty: with ``fixed`` sizes they are."""

    monitor_model = "global"
    weighting = "uniform"
    needs_cross_entropy = (
        "its mask of absent classes is one of a softmax: set masked to false, or use CrossEntropyLoss (smoothing, class weights)."
    )

    def __init__(
        self,
        backbone: BackboneFactory,
        model_sizes: Sequence[float],
        num_classes: PositiveInt | None = None,
        assignment: Assignment = "fixed",
        masked: bool = True,
        optimizer: OptimizerCallable = default_sgd,
        **kwargs: Any,
    ) -> None:
        self.masked = masked
        super().__init__(backbone, num_classes, optimizer, **kwargs)
        if not model_sizes:
            raise FederationError(
                f"{type(self).__name__} got an empty list of sizes (ratios, widths, budgets): give at least one, 1 for the whole "
                "model."
            )
        changes = self.changes_in_each_round or ("sizes are redrawn" if assignment == "redrawn" else "")
        if self.persistent and changes:
            raise FederationError(f"{type(self).__name__} got persistent, but {changes} in each round: leave persistent out.")
        self.model_sizes = [None if size == 1 else size for size in model_sizes]
        self.assignment = assignment

    def check_task(self) -> None:
        """Only the mask needs a softmax."""
        if self.masked:
            super().check_task()

    def refuse_frozen(self, why: str) -> None:
        """Refuse a network with frozen tensors, which do not travel, for methods that distribute parts of it."""
        if self.frozen_names:
            raise FederationError(
                f"{type(self).__name__} {why}, but {min(self.frozen_names)!r} is frozen and does not travel: let the whole "
                "network learn, or use a method whose clients have the same network, such as FedAvg."
            )

    def recomputed_buffers(self) -> set[str]:
        return running_statistics(self)

    def mask(self, logits: Tensor) -> Tensor:
        """Logits ``(B, C)`` with those of the client's absent classes set to 0."""
        if not self.masked or self.client is None or self.client.id < 0:
            return logits
        if len(self.client.label_counts) != logits.shape[1]:
            raise FederationError(
                f"{type(self).__name__} masks classes that a client has no example of, but the data count examples by "
                f"{len(self.client.label_counts)} labels, not by the {logits.shape[1]} classes: set masked to false."
            )
        return mask_absent(logits, torch.tensor(self.client.label_counts, device=logits.device) > 0)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, C)``; those of classes that the client does not have are 0."""
        return self.mask(self.backbone(x))

    def head_names(self) -> set[str]:
        """Names of the tensors with a row per class, averaged over the clients that have the class; none without mask."""
        heads = [module.head for module in self.modules() if isinstance(module, Backbone)] if self.masked else []
        own = {id(p) for head in heads for p in head.parameters()}
        return {name for name, p in self.named_parameters(remove_duplicate=False) if id(p) in own}


class Contribution(NamedTuple):
    """A part of the whole to average, its model size, and the rows of some tensors that it covers."""

    state: State
    model_size: float | None
    rows: State | None = None


class SizedServer(Server):
    """Holds the global model, sends each client a version of its size, and averages each entry over the clients that trained it.

    Args:
        state: the global model.
        clients: all clients.
        method: gives the sizes, with None for the whole model (``model_sizes``; client ``k`` has entry ``k mod len(list)``),
            and whether they are fixed or redrawn each round (``assignment``).
        heads: names of the tensors of which a client covers only the rows of its own classes.
    """

    version_name = "size"
    """What a size is called in the names of metrics."""

    def __init__(self, state: State, clients: Sequence[ClientInfo], method: Any, heads: Collection[str] = ()) -> None:
        super().__init__(state, "uniform")
        self.method = method
        self.model_sizes: Sequence[float | None] = method.model_sizes
        self.heads = heads
        self.owned = {client.id: torch.tensor(client.label_counts) > 0 for client in clients}
        self.model_size = {client.id: self.model_sizes[client.id % len(self.model_sizes)] for client in clients}
        self._statistics: dict[float | None, State] = {}

    def on_round_start(self, round: int, cohort: Sequence[ClientInfo]) -> None:
        super().on_round_start(round, cohort)
        if self.method.assignment == "redrawn":
            draws = torch.randint(len(self.model_sizes), (len(self.model_size),)).tolist()
            self.model_size = {client: self.model_sizes[draw] for client, draw in zip(self.model_size, draws, strict=True)}

    @abstractmethod
    def version(self, size: float | None) -> State:
        """The global model in a size; None: the whole."""

    def log_weight(self, size: float | None) -> float:
        """Logarithm of the weight of an update of a size. Default: equal weights."""
        return 0.0

    def embed(self, update: ClientUpdate) -> State:
        """An update as a part of the whole (see :class:`EntryMean`). Default: unchanged."""
        return update.state

    def contributions(self, updates: Iterable[ClientUpdate]) -> Iterator[Contribution]:
        """The contributions to average. Default: the updates."""
        for update in updates:
            rows = dict.fromkeys(self.heads, self.owned[update.client])
            yield Contribution(self.embed(update), self.model_size[update.client], rows)

    def merge(self, updates: Iterable[ClientUpdate], whole: State) -> State:
        """The mean of the contributions; entries that none covers keep their value. Weights are relative to the largest so far:
        it is not known in advance which updates arrive, and exponentials can overflow.
        """
        mean, largest = EntryMean(whole), -math.inf
        for state, size, rows in self.contributions(updates):
            exponent = self.log_weight(size)
            if exponent > largest:
                if largest > -math.inf:
                    mean.scale(math.exp(largest - exponent))
                largest = exponent
            mean.add(state, math.exp(exponent - largest), rows)
        return mean.result()

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        self.state = self.merge(updates, self.state)
        return {}

    def broadcast(self, client: ClientInfo) -> Broadcast:
        size = self.model_size[client.id]
        return Broadcast(self.version(size), size)

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        return self._with_statistics(self.broadcast(client))

    def global_models(self) -> dict[str, Broadcast]:
        """``global``, and every smaller size that a client may have."""
        smaller = sorted({size for size in self.model_sizes if size is not None}, reverse=True)
        versions = {f"{self.version_name}_{size:g}": Broadcast(self.version(size), size) for size in smaller}
        return {name: self._with_statistics(model) for name, model in {"global": Broadcast(self.version(None)), **versions}.items()}

    def refresh_statistics(self, statistics_of: Callable[[Broadcast], State]) -> None:
        self._statistics = {
            model.model_size: statistics_of(replace(model, statistics={})) for model in self.global_models().values()
        }

    def _with_statistics(self, model: Broadcast) -> Broadcast:
        return replace(model, statistics=self._statistics.get(model.model_size, {}))
