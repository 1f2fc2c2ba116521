"""A row for each of some classes, the mean of a client's examples of the class: how it travels.

Names begin with what the rows are of. ``rows`` ``(n, D)`` has one for each class that has any; ``labels`` says which these are, a
bit for each of C classes; ``counts`` ``(n,)``, which may be left out, of how many examples each is the mean.
"""

import torch
from torch import Tensor

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.errors import FederationError
from lightning_fed.tensors import State, pack_bits, unpack_bits


def pack_rows(prefix: str, table: Tensor, present: Tensor, counts: Tensor | None = None) -> State:
    """What travels.

    Args:
        prefix: what the names begin with.
        table: a row for each class, ``(C, D)``.
        present: which of them travel, ``(C,)`` booleans.
        counts: of how many examples each is the mean, ``(C,)``; None: that does not travel.
    """
    packed = {f"{prefix}rows": table[present], f"{prefix}labels": pack_bits(present)}
    return packed if counts is None else packed | {f"{prefix}counts": counts[present].int()}


def present_classes(prefix: str, state: State, num_classes: int) -> Tensor:
    """Which classes have a row, ``(C,)`` booleans; none if that is not said as it should be."""
    packed = state.get(f"{prefix}labels", torch.empty(0))
    if packed.dtype != torch.uint8 or packed.shape != (-(-num_classes // 8),):
        return torch.zeros(num_classes, dtype=torch.bool)
    return unpack_bits(packed, num_classes)


def expected_rows(prefix: str, state: State, like: Tensor, counted: bool = False) -> State:
    """Tensors with the names, shapes and dtypes that a state should have, by the classes that it says it has.

    Args:
        prefix: what the names begin with.
        state: what came.
        like: a table of all classes, ``(C, D)``, in the dtype that travels.
        counted: whether counts travel.
    """
    counts = torch.zeros(len(like)) if counted else None
    return pack_rows(prefix, like.cpu(), present_classes(prefix, state, len(like)), counts)


def check_counts(prefix: str, update: ClientUpdate) -> None:
    """Raises :class:`FederationError` for a row that is the mean of no example."""
    counts = update.state.get(f"{prefix}counts")
    if counts is not None and (counts < 1).any():
        raise FederationError(
            f"The update of client {update.client} has '{prefix}counts' down to {int(counts.min())}, expected at least 1: a row is "
            "the mean of examples."
        )


def unpack_rows(prefix: str, state: State, like: Tensor) -> tuple[Tensor, Tensor]:
    """The table of all classes ``(C, D)``, zero where there is no row, as ``like`` is; and the counts ``(C,)``: 0 where there is no
    row, 1 where there is one and no counts travel.
    """
    present = present_classes(prefix, state, len(like)).to(like.device)
    table, counts = torch.zeros_like(like), torch.zeros(len(like), dtype=torch.int32, device=like.device)
    table[present] = state[f"{prefix}rows"].to(like)
    counts[present] = state[f"{prefix}counts"].to(counts) if f"{prefix}counts" in state else 1
    return table, counts
