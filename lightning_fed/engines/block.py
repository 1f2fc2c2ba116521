"""Memory that several processes of this machine map, and pipes that pass it on."""

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
import torch.multiprocessing  # pickles blocks on systems without descriptors
from torch import Tensor

from lightning_fed.errors import FederationError

ANONYMOUS = sys.platform == "linux"
"""Whether memory can be shared without a name: the last process that maps it frees it, and ``/dev/shm`` does not limit it."""


RECEIVERS = 4096
"""Maximum number of receivers of a piece of memory. Each has a byte at its end that says whether it still uses the memory."""


class Memory:
    """Memory that other processes can map.

    Args:
        size: size in bytes.
        descriptor: file descriptor of memory from another process. None: new memory.
        place: index of this process among the receivers.

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
                f"No room for {size / 2**20:.1f} MiB of shared memory ({error}): set federation.engine.init_args.workers lower, "
                "or use the engine InProcess. A container has what it was started with (docker run --memory=16g --shm-size=8g)."
            ) from error
        self.bytes, self._flags = mapped[:size], mapped[size:]
        if mine and self.descriptor is not None:
            weakref.finalize(self, os.close, self.descriptor)

    def lend(self) -> int:
        """Mark the memory as sent to a receiver; returns the receiver's index."""
        place = int(self._flags.argmin())
        self._flags[place] = 1
        return place

    @property
    def is_back(self) -> bool:
        """Whether no receiver has a tensor of it any more. Unknown, and False, for memory with a name."""
        return self.descriptor is not None and not self._flags.any()


class Block:
    """Bytes that other processes can map.

    Args:
        size: number of bytes.
        memory: memory that holds them. None: new memory.

    Raises:
        FederationError: if there is not enough memory.
    """

    def __init__(self, size: int, memory: Memory | None = None) -> None:
        self.memory = memory or Memory(size)
        self.bytes: Tensor = self.memory.bytes


class ReusedBlocks:
    """Allocates blocks for messages and reuses memory once the sender has no block and no receiver a tensor of it. Mapping and
    clearing new memory takes much longer than writing to it.

    Args:
        keep: number of pieces of memory to keep, including those that receivers still use.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self._memories: list[tuple[Memory, weakref.ref[Block]]] = []

    def __call__(self, size: int) -> Block:
        """A block of exactly this size for one message: a receiver may keep it, and counts its bytes."""
        free = (memory for memory, block in self._memories if memory.size == size and block() is None and memory.is_back)
        block = Block(size, next(free, None))
        others = [other for other in self._memories if other[0] is not block.memory]
        self._memories = [*others, (block.memory, weakref.ref(block))][-self.keep :]
        return block

    def clear(self) -> None:
        """Drop all memory."""
        self._memories.clear()


def _new_descriptor(size: int) -> int:
    descriptor = os.memfd_create("lightning-fed")
    try:
        os.posix_fallocate(descriptor, 0, size)  # fail now, rather than with a bus error on a write
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(size: int, descriptor: int | None, flag: int | None) -> Tensor:
    """All bytes of a piece of memory; ``flag`` is the offset that a receiver clears when it drops its last tensor."""
    if descriptor is None:
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    if flag is not None:
        weakref.finalize(memory, _let_go, descriptor, flag, os.getpid()).atexit = False  # tensors may outlive other objects
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive


def _let_go(descriptor: int, flag: int, receiver: int) -> None:
    if os.getpid() == receiver:  # not in a forked child: the receiver may still use what the child drops
        os.pwrite(descriptor, b"\0", flag)
    os.close(descriptor)


class Pipe:
    """A connection between two processes that transfers objects and blocks. A block's descriptor directly follows its message, so
    that a sent message arrives even if the sender dies.

    Args:
        connection: one end of ``multiprocessing.Pipe()``.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, thing: Any) -> None:
        """Send an object. Raises :class:`OSError` if the other end is closed."""
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
        """Wait for an object. Raises :class:`EOFError` or :class:`OSError` if the other end is closed."""
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
    """Replaces blocks by indices and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.blocks: list[Block] = []

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, Block):
            return None
        self.blocks.append(thing)
        return len(self.blocks) - 1


class _BlockUnpickler(pickle.Unpickler):
    """Replaces indices by blocks."""

    def __init__(self, data: bytes, blocks: list[Block]) -> None:
        super().__init__(io.BytesIO(data))
        self._blocks = blocks

    def persistent_load(self, place: int) -> Block:
        return self._blocks[place]
