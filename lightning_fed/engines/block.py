"""Memory that several processes of this machine map, and pipes that hand it on."""

import io
import mmap
import os
import pickle
import socket
import sys
import weakref
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing  # so that a block can be pickled where it has no descriptor of its own
from torch import Tensor

from lightning_fed.errors import FederationError

ANONYMOUS = sys.platform == "linux"
"""Whether memory can be shared without a name: it goes with the last process that maps it, and ``/dev/shm`` does not limit it."""


RECEIVERS = 4096
"""How many can have a piece of memory at a time: each has a byte behind it, which says whether it still does."""


class Memory:
    """Memory that other processes can map.

    Args:
        size: bytes.
        descriptor: of memory that came from another process; None makes new memory.
        place: which receiver of it this process is.

    Raises:
        FederationError: if there is not enough memory.
    """

    def __init__(self, size: int, descriptor: int | None = None, place: int = 0) -> None:
        self.size = size
        mine = descriptor is None
        try:
            self.descriptor = _new_descriptor(size + RECEIVERS) if mine and ANONYMOUS else descriptor
            mapped = _mapped(size + RECEIVERS, self.descriptor, None if mine else size + place)
        except (OSError, RuntimeError) as error:
            raise FederationError(
                f"{size / 2**20:.1f} MiB of shared memory cannot be had ({error}): set federation.engine.init_args.workers lower, "
                "or use the engine InProcess. A container has what it was started with (docker run --memory=16g --shm-size=8g)."
            ) from error
        self.bytes, self._flags = mapped[:size], mapped[size:]
        if mine and self.descriptor is not None:
            weakref.finalize(self, os.close, self.descriptor)

    def lend(self) -> int:
        """It is on its way to a receiver; returns which one that is."""
        place = int(self._flags.argmin())
        self._flags[place] = 1
        return place

    @property
    def is_back(self) -> bool:
        """Whether no receiver has a tensor of it any more, as far as is known: of memory with a name nobody says."""
        return self.descriptor is not None and not self._flags.any()


class Block:
    """Bytes that other processes can map.

    Args:
        size: how many.
        memory: in which they are; None: new memory.

    Raises:
        FederationError: if there is not enough memory.
    """

    def __init__(self, size: int, memory: Memory | None = None) -> None:
        self.memory = memory or Memory(size)
        self.bytes: Tensor = self.memory.bytes


class ReusedBlocks:
    """Room for what is sent. To find and clear new memory takes much longer than to write to it: memory of which neither the sender
    has a block nor a receiver a tensor any more is used again.

    Args:
        keep: this many pieces of memory, of which some may still be with receivers.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self._memories: list[tuple[Memory, weakref.ref[Block]]] = []

    def __call__(self, size: int) -> Block:
        """A block of exactly this size, for one message: a receiver may keep it, and counts the bytes that it was sent."""
        free = (memory for memory, block in self._memories if memory.size == size and block() is None and memory.is_back)
        block = Block(size, next(free, None))
        others = [other for other in self._memories if other[0] is not block.memory]
        self._memories = [*others, (block.memory, weakref.ref(block))][-self.keep :]
        return block

    def clear(self) -> None:
        """Keep nothing."""
        self._memories.clear()


def _new_descriptor(size: int) -> int:
    descriptor = os.memfd_create("lightning-fed")
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, rather than with a bus error when it is written to
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(size: int, descriptor: int | None, flag: int | None) -> Tensor:
    """All bytes of some memory; where the flag is that a receiver clears when its last tensor goes."""
    if descriptor is None:
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    if flag is not None:
        weakref.finalize(memory, _let_go, descriptor, flag, os.getpid()).atexit = False  # tensors live on while others end
    return torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the mapping


def _let_go(descriptor: int, flag: int, receiver: int) -> None:
    if os.getpid() == receiver:  # not in a child that was forked from it: what the child forgets, the receiver may still have
        os.pwrite(descriptor, b"\0", flag)
    os.close(descriptor)


class Pipe:
    """A connection between two processes through which objects and blocks go. A block's descriptor follows its message at once, so
    that what has been sent arrives, whatever becomes of the sender.

    Args:
        connection: one end of ``multiprocessing.Pipe()``.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, thing: Any) -> None:
        """Send an object. Raises :class:`OSError` if nobody is at the other end."""
        if not ANONYMOUS:
            self.connection.send(thing)
            return
        pickler = _BlockPickler(file := io.BytesIO())
        pickler.dump(thing)
        memories = [block.memory for block in pickler.blocks]
        lent = [(memory.size, memory.lend()) for memory in memories]
        self.connection.send_bytes(pickle.dumps((lent, file.getvalue())))
        if memories:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
                socket.send_fds(ours, [b"."], [memory.descriptor for memory in memories if memory.descriptor is not None])

    def recv(self) -> Any:
        """Wait for an object. Raises :class:`EOFError` or :class:`OSError` if nobody is at the other end."""
        if not ANONYMOUS:
            return self.connection.recv()
        lent, data = pickle.loads(self.connection.recv_bytes())
        blocks: list[Block] = []
        if lent:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
                _, descriptors, _, _ = socket.recv_fds(ours, 1, len(lent))
            if len(descriptors) != len(lent):
                raise EOFError("the sender died in the middle of a message")
            for (size, place), descriptor in zip(lent, descriptors, strict=True):
                blocks.append(Block(size, Memory(size, descriptor, place)))
        return _BlockUnpickler(data, blocks).load()

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


class _BlockPickler(pickle.Pickler):
    """Collects blocks."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.blocks: list[Block] = []

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Block):
            return None
        self.blocks.append(thing)
        return len(self.blocks) - 1


class _BlockUnpickler(pickle.Unpickler):
    """Puts them in again."""

    def __init__(self, data: bytes, blocks: list[Block]) -> None:
        super().__init__(io.BytesIO(data))
        self._blocks = blocks

    def persistent_load(self, place: int) -> Block:
        return self._blocks[place]
