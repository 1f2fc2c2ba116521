"""One row per class, the mean over a client's examples of that class: how such tables are computed and sent.

``classes/rows`` ``(n, D)`` has a row for each class that is present; ``classes/labels`` marks these classes with a bit for each of
C classes; the optional ``classes/counts`` ``(n,)`` are the numbers of examples that were averaged.
"""

import torch
from torch import Tensor

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.errors import FederationError
from lightning_fed.tensors import State, pack_bits, unpack_bits, widened

ROWS, LABELS, COUNTS = "classes/rows", "classes/labels", "classes/counts"


def class_sums(features: Tensor, y: Tensor, num_classes: int) -> State:
    """Sums of features ``(B, D)`` by class ``(C, D)``, and the numbers of examples ``(C,)``. A product, because ``index_add`` has
    no fixed order on a GPU.
    """
    belongs, features = y == torch.arange(num_classes, device=y.device)[:, None], widened(features)
    return {"features": belongs.to(features.dtype) @ features, "examples": belongs.sum(1)}


def class_means(sums: State) -> tuple[Tensor, Tensor]:
    """The means of what :func:`class_sums` found, ``(C, D)``, zero for classes without examples; and the numbers of examples."""
    return sums["features"] / sums["examples"].clamp(min=1)[:, None], sums["examples"]


def pack_rows(table: Tensor, present: Tensor, counts: Tensor | None = None) -> State:
    """Pack the rows of the present classes into a state to send.

    Args:
        table: a row for each class, ``(C, D)``.
        present: which classes to send, ``(C,)`` booleans.
        counts: number of examples that each row averages, ``(C,)``. None: counts are not sent.
    """
    packed = {ROWS: table[present], LABELS: pack_bits(present)}
    return packed if counts is None else packed | {COUNTS: counts[present].int()}


def present_classes(state: State, num_classes: int) -> Tensor:
    """Which classes have a row, ``(C,)`` booleans; none if the state does not say so in the expected form."""
    packed = state.get(LABELS, torch.empty(0))
    if packed.dtype != torch.uint8 or packed.shape != (-(-num_classes // 8),):
        return torch.zeros(num_classes, dtype=torch.bool)
    return unpack_bits(packed, num_classes)


def expected_rows(state: State, like: Tensor, counted: bool = False) -> State:
    """Tensors with the names, shapes and dtypes that a state should have, given the classes that it claims to have.

    Args:
        state: the received state.
        like: a table of all classes, ``(C, D)``, in the dtype that is sent.
        counted: whether counts are sent.
    """
    counts = torch.zeros(len(like)) if counted else None
    return pack_rows(like.cpu(), present_classes(state, len(like)), counts)


def check_counts(update: ClientUpdate) -> None:
    """Raises :class:`FederationError` if a row claims to be the mean of no examples."""
    counts = update.state.get(COUNTS)
    if counts is not None and (counts < 1).any():
        raise FederationError(
            f"The update of client {update.client} has {COUNTS!r} down to {int(counts.min())}, expected at least 1: a row is "
            "the mean of examples."
        )


def unpack_rows(state: State, like: Tensor) -> tuple[Tensor, Tensor]:
    """The table of all classes ``(C, D)`` in the form of ``like``, zero where a row is missing, and the counts ``(C,)``: 0 where a
    row is missing, 1 for present rows if no counts were sent.
    """
    present = present_classes(state, len(like)).to(like.device)
    table, counts = torch.zeros_like(like), torch.zeros(len(like), dtype=torch.int32, device=like.device)
    table[present] = state[ROWS].to(like)
    counts[present] = state[COUNTS].to(counts) if COUNTS in state else 1
    return table, counts
