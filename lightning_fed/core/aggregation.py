"""How the server averages updates, and what it checks of them."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_fed.core.messages import STAGES, ClientUpdate
from lightning_fed.errors import FederationError
from lightning_fed.formatting import shown
from lightning_fed.tensors import State, check_dtypes, check_finite, check_fits


class WeightedMean:
    """A streaming weighted mean, which holds one sum instead of all states.

    Floating-point tensors are summed in float64 and divided once at the end. With integer weights (numbers of examples) each
    product is exact, so that the mean of equal states is that state, bit for bit. Integer and boolean tensors
    (``num_batches_tracked``) take the maximum: averaging counters would turn them into floats.
    """

    def __init__(self) -> None:
        self._sum: State = {}
        self._like: State = {}
        self._weight = 0.0

    def add(self, state: State, weight: float) -> None:
        """Add a state. Raises :class:`FederationError` if the weight is not positive."""
        if not weight > 0:
            raise FederationError(f"An average needs positive weights, got {weight}.")
        if not self._like:
            self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
        for name, tensor in state.items():
            if not tensor.is_floating_point():
                self._sum[name] = torch.maximum(self._sum[name], tensor) if name in self._sum else tensor.clone()
            elif name in self._sum:
                self._sum[name].add_(tensor, alpha=weight)  # computed in float64, the wider of the two
            else:
                self._sum[name] = tensor.to(torch.float64, copy=True).mul_(weight)
        self._weight += weight

    def result(self) -> State:
        """The mean of the added states, each tensor in its own dtype; empty if nothing was added."""
        return {
            name: (total / self._weight).to(self._like[name].dtype) if total.is_floating_point() else total
            for name, total in self._sum.items()
        }


class EntryMean:
    """A weighted mean of states that cover parts of a larger state: each entry is averaged over the states that cover it.

    A part covers the leading indices of every dimension. Entries that no part covers keep their value. Sums are in float64;
    means of integers are rounded.

    Args:
        whole: the larger state.
    """

    def __init__(self, whole: State) -> None:
        self._whole = whole
        self._sum = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in whole.items()}
        self._weight = {name: torch.zeros_like(tensor) for name, tensor in self._sum.items()}

    def add(self, part: State, weight: float = 1.0, rows: State | None = None) -> None:
        """Add a part.

        Args:
            part: tensors that are at most as large as those of the whole, for some or all of its names.
            weight: weight of all its entries, positive.
            rows: for some tensors, which rows (indices of the first dimension) are covered, as booleans, or the weights of the
                rows; by default all rows count equally.
        """
        for name, tensor in part.items():
            region = tuple(slice(size) for size in tensor.shape)
            covered = torch.tensor(weight, dtype=torch.float64)
            if rows is not None and name in rows:
                covered = (covered * rows[name]).view(-1, *[1] * (tensor.dim() - 1))
            self._sum[name][region] += covered * tensor.double()
            self._weight[name][region] += covered

    def scale(self, factor: float) -> None:
        """Multiply all weights so far by ``factor``."""
        for sums in (self._sum, self._weight):
            for tensor in sums.values():
                tensor.mul_(factor)

    def result(self) -> State:
        """The mean, each tensor in its dtype in the whole."""
        means = {
            name: torch.where(self._weight[name] > 0, total / self._weight[name], self._whole[name])
            for name, total in self._sum.items()
        }
        return {
            name: (mean if self._whole[name].is_floating_point() else mean.round()).to(self._whole[name].dtype)
            for name, mean in means.items()
        }


def weighted_mean(states: Iterable[State], weights: Iterable[float]) -> State:
    r""":math:`\sum_k w_k s_k / \sum_k w_k` per tensor; see :class:`WeightedMean`."""
    mean = WeightedMean()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean.result()


def noted(updates: Iterable[ClientUpdate], note: Callable[[ClientUpdate], object]) -> Iterator[ClientUpdate]:
    """Yields updates one at a time and calls ``note`` with each as it arrives."""
    for update in updates:
        note(update)
        yield update


def check_payload(update: ClientUpdate, expected: State) -> None:
    """Check that an update whose form has been checked has the expected names, shapes and dtypes, and finite values: with another
    dtype a mean would silently lose precision or become a maximum.

    Raises:
        FederationError: if a check fails; names the client and the tensor.
    """
    what = f"The update of client {update.client}"
    check_fits(update.state, expected, what)
    check_dtypes(update.state, expected, what, ", as it was sent: convert it back before it is sent.")
    check_finite(update.state, what)


def check_form(update: ClientUpdate, *needed: str) -> None:
    """Check what does not depend on the expected tensors: names, usable tensors, the number of examples, and the names and values
    of metrics. Code that derives the expected tensors from an update can rely on this.

    Raises:
        FederationError: if a check fails; names the client and the tensor or metric.
    """
    what = f"The update of client {update.client}"
    for part, kind in ((update.state, "payload"), (update.metrics, "metrics")):
        if not isinstance(part, dict) or not all(isinstance(name, str) for name in part):
            raise FederationError(f"{what} has {shown(part)} as its {kind}, expected a dict whose keys are text.")
    for name, tensor in update.state.items():
        if odd := _oddity(tensor):
            raise FederationError(f"{what} has {shown(name)} as a {odd}: send an ordinary (dense) tensor on the CPU.")
    if not is_count(update.num_examples):
        raise FederationError(f"{what} says that its client has {shown(update.num_examples)} training examples: send a number.")
    if lacking := sorted(set(needed) - update.metrics.keys()):
        raise FederationError(f"{what} lacks the metric {lacking[0]!r}, which a turn reports.")
    if len(update.metrics) > MOST_METRICS:
        raise FederationError(f"{what} has {len(update.metrics)} metrics, expected {MOST_METRICS} at most: leave some out.")
    for name, value in update.metrics.items():
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            raise FederationError(
                f"{what} has a metric named {shown(name)}: give it a name of at most {LONGEST_NAME} characters in one line, "
                "because it becomes a column of tables."
            )
        if name in COUNTED and not (_is_number(value) and value >= 0):
            raise FederationError(f"{what} has the metric {name!r} = {shown(value)}, expected a finite number, 0 or more.")
        if not _is_number(value) and not (name.startswith(MEASURED) and isinstance(value, float)):
            raise FederationError(f"{what} has the metric {shown(name)} = {shown(value)}, expected a finite number in float32.")


REQUIRED = {"fit": ("flops",), "train_on_public": ("flops",), "compute_statistics": ("batches",)}
"""Metrics that a turn must report, by its verb."""

COUNTED = frozenset({"flops", "steps", "batches", "fine_tune/flops"})
"""Metrics of a turn that are sums and cannot be negative."""

MEASURED = ("val/", "test/", *(f"{stage}/" for stage in STAGES))
"""Prefixes of metrics that may be NaN (of too few examples) or infinite (a perplexity)."""


MOST_METRICS = 1000
"""Maximum number of metrics of a turn; most are the ranks of each layer's adapters."""

LONGEST_NAME = 200
"""Maximum number of characters of a metric's name."""

LARGEST = torch.finfo(torch.float32).max
"""Maximum absolute value of a metric, so that sums and means over all clients and rounds stay finite."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_count(value: object) -> bool:
    """Whether a value is a non-negative integer that a float represents exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _oddity(tensor: object) -> str | None:
    """Why a server cannot compute with a tensor; None if it can."""
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}"
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"{type(tensor).__name__}, which is a subclass of tensor"
    if tensor.is_meta:
        return "meta tensor, which holds no numbers"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"{'nested' if tensor.is_nested else tensor.layout} tensor"
    if tensor.is_quantized:
        return "quantised tensor"
    if tensor.device.type != "cpu":
        return f"tensor on {tensor.device}"
    if tensor.requires_grad:
        return "tensor that requires gradients (detach it)"
    return _memory_oddity(tensor)


def _memory_oddity(tensor: Tensor) -> str | None:
    """Why a tensor's memory layout is invalid: each value needs its own place in memory that exists. None if it is valid."""
    end = 1  # past the dimensions so far, from the smallest stride on
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return "tensor whose values share memory (an expanded one, for example; clone it)"
            end += stride * (size - 1)
    if tensor.numel() and tensor.untyped_storage().nbytes() < (tensor.storage_offset() + end) * tensor.element_size():
        return "tensor whose memory has been freed"
    return None
