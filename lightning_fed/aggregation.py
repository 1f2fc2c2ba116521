"""How the server merges payloads: pure functions on state dicts."""

from collections.abc import Iterable

import torch

from lightning_fed.errors import FederationError
from lightning_fed.exchange import ClientUpdate, State, check_finite, check_fits


class WeightedMean:
    """A weighted mean that streams: it holds one sum, not the states.

    Floating-point tensors are summed in float64 and divided once at the end. With integer weights (numbers of examples) each
    product is exact, so the mean of equal states is that state, bit for bit. Integer and boolean tensors (``num_batches_tracked``)
    take the maximum: a mean of counters would turn them into floats.
    """

    def __init__(self) -> None:
        self._sum: State = {}
        self._like: State = {}
        self._weight = 0.0

    def add(self, state: State, weight: float) -> None:
        """Add one state. Raises :class:`FederationError` for a weight that is not positive."""
        if not weight > 0:
            raise FederationError(f"An average needs positive weights, got {weight}.")
        if not self._like:
            self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
        for name, tensor in state.items():
            if not tensor.is_floating_point():
                self._sum[name] = torch.maximum(self._sum[name], tensor) if name in self._sum else tensor.clone()
            elif name in self._sum:
                self._sum[name].add_(tensor, alpha=weight)  # in float64: the wider of the two
            else:
                self._sum[name] = tensor.to(torch.float64, copy=True).mul_(weight)
        self._weight += weight

    def result(self) -> State:
        """The mean of what was added, each tensor in its own dtype; empty if nothing was added."""
        return {
            name: (total / self._weight).to(self._like[name].dtype) if total.is_floating_point() else total
            for name, total in self._sum.items()
        }


class EntryMean:
    """A weighted mean of states that cover only a part of a larger one: each entry is averaged over those that cover it.

    A part covers the leading indices of every dimension. Entries that nobody covers keep their value. Sums are in float64.

    Args:
        whole: the larger state, all floating point.
    """

    def __init__(self, whole: State) -> None:
        self._whole = whole
        self._sum = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in whole.items()}
        self._weight = {name: torch.zeros_like(tensor) for name, tensor in self._sum.items()}

    def add(self, part: State, weight: float = 1.0, rows: State | None = None) -> None:
        """Add a part.

        Args:
            part: tensors of at most the size of the whole's, with the same names or some of them.
            weight: of all its entries, positive.
            rows: for some tensors, which rows (indices of the first dimension) are covered, as booleans; all by default.
        """
        for name, tensor in part.items():
            region = tuple(slice(size) for size in tensor.shape)
            covered = torch.tensor(weight, dtype=torch.float64)
            if rows is not None and name in rows:
                covered = (covered * rows[name]).view(-1, *[1] * (tensor.dim() - 1))
            self._sum[name][region] += covered * tensor.double()
            self._weight[name][region] += covered

    def scale(self, factor: float) -> None:
        """Multiply all weights so far, as if each had been added with ``factor`` times its own."""
        for sums in (self._sum, self._weight):
            for tensor in sums.values():
                tensor.mul_(factor)

    def result(self) -> State:
        """The mean, each tensor in the dtype that it has in the whole."""
        return {
            name: torch.where(self._weight[name] > 0, total / self._weight[name], self._whole[name]).to(self._whole[name].dtype)
            for name, total in self._sum.items()
        }


def weighted_mean(states: Iterable[State], weights: Iterable[float]) -> State:
    r""":math:`\sum_k w_k s_k / \sum_k w_k` per tensor; see :class:`WeightedMean`."""
    mean = WeightedMean()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean.result()


def check_update(update: ClientUpdate, expected: State) -> None:
    """Check that a payload has exactly the expected names, shapes and dtypes, in ordinary tensors, and only finite values. The run
    does this once, before a server sees the update (see :meth:`.Server.expected`): with another dtype a mean would lose precision,
    or become a maximum, without a word.

    Raises:
        FederationError: naming the client and the tensor.
    """
    what = f"The update of client {update.client}"
    check_fits(update.state, expected, what)
    for name, like in expected.items():
        tensor = update.state[name]
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "meta tensor, which holds no numbers" if tensor.is_meta else f"{tensor.layout} tensor"
            raise FederationError(f"{what} has {name!r} as a {kind}: send an ordinary (dense) tensor.")
        if tensor.dtype != like.dtype:
            raise FederationError(
                f"{what} has {name!r} of {tensor.dtype}, expected {like.dtype}, as it was sent: convert it back before it is sent."
            )
    check_finite(update.state, what)
