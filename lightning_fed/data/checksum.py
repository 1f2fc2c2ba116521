"""Checksum of inputs, by which a run knows its data again."""

from zlib import crc32

import torch

from lightning_fed.data.batches import Inputs
from lightning_fed.data.lazy import LazyInputs

MOST = 2**28
"""About the number of bytes of a tensor in a checksum, which takes half a second. Of larger ones, evenly spread rows are taken."""

PIECE = 2**24
"""About the number of bytes that are copied at a time, if a tensor is not contiguous."""


def checksum_of(inputs: Inputs, start: int = 0) -> int:
    """CRC-32 of inputs, continued from another one; of lazily read ones, see :meth:`.LazyInputs.checksum`."""
    if isinstance(inputs, LazyInputs):
        return inputs.checksum(start)
    for name, tensor in sorted((inputs if isinstance(inputs, dict) else {"": inputs}).items()):
        start = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), start)
        rows = tensor[:: max(1, tensor.nbytes // MOST)]
        for piece in rows.split(max(1, PIECE * len(rows) // max(1, rows.nbytes))):
            start = crc32(piece.contiguous().flatten().view(torch.uint8).numpy(), start)
    return start
