"""Packs objects for another process: a few bytes, and all their tensors in one block of memory.

Never unpack bytes from an untrusted source: they are unpickled.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_fed.engines.block import Block
from lightning_fed.errors import FederationError

ALIGNMENT = 64
"""Alignment in bytes of every tensor in a block, the same as PyTorch's own."""

LONG = 2**14
"""Bytes from which a head is in the block, padded to a multiple of this, so that similar heads need equal blocks. A pipe takes some
200 KiB that nobody has read: two processes that send each other more at the same time would wait for each other for ever.
"""


class Buffer(Protocol):
    """Memory that holds tensors while they are sent to another process."""

    bytes: Tensor


class Packed(NamedTuple):
    """An object in the form that is sent.

    Args:
        head: the object, pickled without its tensors; if that is long, where it starts in the block.
        block: the bytes of the tensors, and of a long head. None: there are none.
    """

    head: bytes | int
    block: Buffer | None


class Place(NamedTuple):
    """Position and layout of a tensor in a block."""

    start: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, block: Tensor) -> Tensor:
        """The tensor, a view of the block."""
        count = torch.Size(self.size).numel()
        flat = block[self.start : self.start + count * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


class Packer(pickle.Pickler):
    """Pickles everything but ordinary tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[Tensor, Place]] = {}
        self.bytes = 0

    def persistent_id(self, thing: Any) -> Place | None:
        if type(thing) is not Tensor or thing.device.type != "cpu" or thing.layout is not torch.strided or thing.requires_grad:
            return None
        if id(thing) not in self.tensors:
            stride = thing.stride() if is_dense(thing) else torch.empty(thing.shape, device="meta").stride()
            self.tensors[id(thing)] = thing, Place(self.bytes, thing.dtype, tuple(thing.shape), tuple(stride))
            self.bytes += -(-thing.numel() * thing.element_size() // ALIGNMENT) * ALIGNMENT
        return self.tensors[id(thing)][1]


def pack(thing: Any, move: bool = False, allocate: Callable[[int], Buffer] = Block, packer: type[Packer] = Packer) -> Packed:
    """Pack an object. A view takes only the space of its values; a tensor that occurs twice is packed once.

    Args:
        thing: the object.
        move: move the object's own tensors into the block, so that they are in memory once.
        allocate: creates a buffer of that many bytes; by default in memory that the processes of this machine share.
        packer: pickles the rest.

    Raises:
        FederationError: if there is not enough shared memory.
        Exception: whatever pickling raises; :func:`unpicklable` finds the cause.
    """
    file = io.BytesIO()
    pickler = packer(file)
    pickler.dump(thing)
    head, start = file.getvalue(), pickler.bytes
    size = start + (-(-len(head) // LONG) * LONG if len(head) >= LONG else 0)
    block = allocate(size) if size else None
    if block is not None:
        for tensor, place in pickler.tensors.values():
            view = place.of(block.bytes)
            view.copy_(tensor)
            if move:
                tensor.data = view
        if size > start:
            block.bytes[start : start + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            return Packed(start, block)
    return Packed(head, block)


def unpack(packed: Packed) -> Any:
    """The object. Its tensors are views of the block: copy them before changing or keeping them."""
    return _Unpacker(packed).load()


def unpicklable(name: str, thing: Any, packer: type[Packer] = Packer, seen: frozenset[int] = frozenset()) -> str | None:
    """The path to what cannot be pickled, such as ``trainer.callbacks[0].lock``, or None if everything can be.

    Args:
        name: name of ``thing``.
        thing: object to search.
        packer: see :func:`pack`.
        seen: ids of the objects that contain it.
    """
    if id(thing) in seen:
        return None
    try:
        pack(thing, packer=packer)
    except FederationError:
        raise
    except Exception:
        within = seen | {id(thing)}
        return next((found for path, part in _parts(name, thing) if (found := unpicklable(path, part, packer, within))), name)
    return None


def _parts(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        yield from ((f"{name}[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"{name}[{place}]", value) for place, value in enumerate(thing))
    elif hasattr(thing, "func") and hasattr(thing, "keywords"):  # a partial
        yield from _parts(name, [thing.func, *thing.args])
        yield from ((f"{name}.{key}", value) for key, value in thing.keywords.items())
    elif not isinstance(thing, type):
        yield from ((f"{name}.{key}", value) for key, value in getattr(thing, "__dict__", {}).items())


class _Unpacker(pickle.Unpickler):
    """Reads what a packer wrote; the tensors come from the block."""

    def __init__(self, packed: Packed) -> None:
        self._bytes = packed.block.bytes if packed.block is not None else torch.empty(0, dtype=torch.uint8)
        head = packed.head if isinstance(packed.head, bytes) else self._bytes[packed.head :].numpy().tobytes()
        super().__init__(io.BytesIO(head))
        self._tensors: dict[Place, Tensor] = {}

    def persistent_load(self, place: Place) -> Tensor:
        if place not in self._tensors:
            self._tensors[place] = place.of(self._bytes)
        return self._tensors[place]


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is dense in some order of its dimensions, as channels-last images are: sums over it run in this order, so
    that it has to be preserved.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tensor.permute(order).is_contiguous()
