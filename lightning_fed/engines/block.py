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


class Block:
    """Bytes that other processes can map. A last byte, which is not among them, says whether one that was sent has been let go.

    Args:
        size: how many.
        descriptor: of a block that came from another process; None makes a new one.

    Raises:
        FederationError: if there is not enough memory.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        mine = descriptor is None
        try:
            self.descriptor = _new_descriptor(size + 1) if mine and ANONYMOUS else descriptor
            self._mapped = _mapped(size + 1, self.descriptor, mine)
        except (OSError, RuntimeError) as error:
            raise FederationError(
                f"{size / 2**20:.1f} MiB of shared memory cannot be had ({error}): set federation.engine.init_args.workers lower, "
                "or use the engine InProcess. A container has what it was started with (docker run --memory=16g --shm-size=8g)."
            ) from error
        self.bytes: Tensor = self._mapped[:size]
        if mine and self.descriptor is not None:
            weakref.finalize(self, os.close, self.descriptor)

    def lend(self) -> None:
        """It is on its way to one receiver."""
        self._mapped[-1] = 1

    @property
    def is_back(self) -> bool:
        """Whether the receiver has no tensor of it any more."""
        return not self._mapped[-1]


class ReusedBlocks:
    """Room for what one receiver is sent. To find and clear new memory takes much longer than to write to it: a block that the
    receiver has let go of is used again.

    Args:
        keep: this many, of which the receiver may still have some.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self._blocks: list[Block] = []

    def __call__(self, size: int) -> Block:
        """A block of exactly this size, for one message: the receiver may keep it, and counts the bytes that it was sent."""
        block = next((block for block in self._blocks if len(block.bytes) == size and block.is_back), None) or Block(size)
        self._blocks = [*(other for other in self._blocks if other is not block), block][-self.keep :]
        block.lend()
        return block


def _new_descriptor(size: int) -> int:
    descriptor = os.memfd_create("lightning-fed")
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, rather than with a bus error when it is written to
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(size: int, descriptor: int | None, mine: bool) -> Tensor:
    if descriptor is None:
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    if not mine:
        weakref.finalize(memory, _let_go, descriptor, size, os.getpid()).atexit = False  # tensors live on while others end
    return torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the mapping


def _let_go(descriptor: int, size: int, receiver: int) -> None:
    if os.getpid() == receiver:  # not in a child that was forked from it: what the child forgets, the receiver may still have
        os.pwrite(descriptor, b"\0", size - 1)
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
        self.connection.send_bytes(pickle.dumps(([len(block.bytes) for block in pickler.blocks], file.getvalue())))
        if pickler.blocks:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
                socket.send_fds(ours, [b"."], [block.descriptor for block in pickler.blocks if block.descriptor is not None])

    def recv(self) -> Any:
        """Wait for an object. Raises :class:`EOFError` or :class:`OSError` if nobody is at the other end."""
        if not ANONYMOUS:
            return self.connection.recv()
        sizes, data = pickle.loads(self.connection.recv_bytes())
        blocks: list[Block] = []
        if sizes:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
                _, descriptors, _, _ = socket.recv_fds(ours, 1, len(sizes))
            if len(descriptors) != len(sizes):
                raise EOFError("the sender died in the middle of a message")
            blocks = [Block(size, descriptor) for size, descriptor in zip(sizes, descriptors, strict=True)]
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
