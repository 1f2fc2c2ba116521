"""A worker in another process, whatever brings its turns: made of a packed spec, it gives packed answers."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_fed.core.messages import Broadcast
from lightning_fed.engines.block import Block
from lightning_fed.engines.packing import Buffer, Packed, pack, unpack
from lightning_fed.engines.worker import Worker
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError


@dataclass(frozen=True)
class TorchSettings:
    """Settings of PyTorch on which numbers depend, and which a process does not inherit."""

    threads: int
    dtype: torch.dtype
    matmul_precision: str
    deterministic: bool
    warn_only: bool

    @classmethod
    def of_this_process(cls, threads: int) -> "TorchSettings":
        """As they are, with so many threads."""
        return cls(
            threads,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def set(self) -> None:
        """Set them."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)


class WorkerError(RuntimeError):
    """An exception in a worker process, as text: type, message and traceback."""


def portable(error: Exception) -> FederationError | WorkerError:
    """What to raise elsewhere in place of an exception: not all can be unpickled, and one that cannot would end the reader."""
    if isinstance(error, FederationError):
        return FederationError(str(error))
    return WorkerError(f"{type(error).__name__} in a worker process: {error}\n\n{''.join(traceback.format_exception(error))}")


class RemoteWorker:
    """A worker of this process for another one. What goes wrong, from the start on, is an answer.

    Args:
        packed: the spec.
        allocate: makes the buffers in which answers travel, see :func:`.pack`.
    """

    def __init__(self, packed: Packed, allocate: Callable[[int], Buffer] = Block) -> None:
        self._worker = _made(packed)
        self._allocate = allocate

    def answer(self, packed: Packed, broadcast: Broadcast) -> Packed | Exception:
        """Carry out a turn.

        Args:
            packed: the turn without its broadcast, and the client's private state.
            broadcast: the broadcast.

        Returns:
            The packed result.
        """
        if isinstance(self._worker, Exception):
            return self._worker
        try:
            turn, private = unpack(packed)
            return pack(self._worker.run_turn(replace(turn, broadcast=broadcast), private), allocate=self._allocate)
        except Exception as error:
            return portable(error)


def _made(packed: Packed) -> Worker | Exception:
    try:
        spec: WorkerSpec = unpack(packed)
        return spec.worker()
    except (AttributeError, ImportError) as error:
        return FederationError(
            f"A worker process cannot load this run ({error}): what is defined in a notebook, or at a prompt, is unknown to other "
            "processes. Put it into a module that can be imported, or use the engine InProcess."
        )
    except Exception as error:
        return portable(error)
