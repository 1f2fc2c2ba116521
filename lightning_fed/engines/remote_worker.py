"""A worker in another process, independent of the transport: created from a packed spec, it returns packed results."""

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
    """PyTorch settings that affect results and that a process does not inherit."""

    threads: int
    dtype: torch.dtype
    matmul_precision: str
    deterministic: bool
    warn_only: bool

    @classmethod
    def of_this_process(cls, threads: int) -> "TorchSettings":
        """The current settings, with this number of threads."""
        return cls(
            threads,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def set(self) -> None:
        """Apply the settings."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)


class WorkerError(RuntimeError):
    """An exception in a worker process, as text: type, message and traceback."""


def portable(error: Exception) -> FederationError | WorkerError:
    """An exception that can be sent instead: not all can be unpickled, and one that cannot would end the receiver."""
    if isinstance(error, FederationError):
        return FederationError(str(error))
    return WorkerError(f"{type(error).__name__} in a worker process: {error}\n\n{''.join(traceback.format_exception(error))}")


class RemoteWorker:
    """A worker in this process that serves another one. Errors, also at creation, are returned as answers.

    Args:
        packed: the spec.
        allocate: creates the buffers in which answers are sent, see :func:`.pack`.
    """

    def __init__(self, packed: Packed, allocate: Callable[[int], Buffer] = Block) -> None:
        self._worker = _made(packed)
        self._allocate = allocate

    def answer(self, packed: Packed, broadcast: Broadcast) -> Packed | Exception:
        """Run a turn.

        Args:
            packed: the turn without its broadcast, and the client's private state.
            broadcast: the broadcast.

        Returns:
            The packed result, or an exception.
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
            f"A worker process cannot load this run ({error}): it does not know definitions of a notebook or an interactive "
            "session. Move them into a module that can be imported, or use the engine InProcess."
        )
    except Exception as error:
        return portable(error)
