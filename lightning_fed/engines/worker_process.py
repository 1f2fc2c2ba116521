"""What happens in a worker process: it carries out what comes through its pipe."""

import multiprocessing
import os
import signal
import threading
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

import torch

from lightning_fed.engines.block import Pipe
from lightning_fed.engines.packing import Packed, pack, unpack
from lightning_fed.engines.recipe import Recipe
from lightning_fed.engines.worker import Worker
from lightning_fed.errors import FederationError
from lightning_fed.exchange import Broadcast
from lightning_fed.lean import lean_lightning
from lightning_fed.quiet import quiet_lightning


@dataclass(frozen=True)
class Numerics:
    """Settings of PyTorch on which numbers depend, and which a process does not inherit."""

    dtype: torch.dtype
    matmul_precision: str
    deterministic: bool
    warn_only: bool

    @classmethod
    def of_this_process(cls) -> "Numerics":
        """As they are."""
        return cls(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def set(self) -> None:
        """Set them."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)


@dataclass(frozen=True)
class Settings:
    """What worker processes have in common: torch threads, numerics, and the GPU of each, by its name in CUDA_VISIBLE_DEVICES."""

    threads: int
    numerics: Numerics
    gpus: list[str]


class WorkerError(RuntimeError):
    """An exception in a worker process, as text: type, message and traceback."""


class Ready:
    """A worker's first word."""


@dataclass(frozen=True)
class Failure:
    """An exception as text: not all exceptions can be unpickled, and one that cannot would end the reader."""

    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """An exception, with its notes."""
        kind = "refused" if isinstance(error, FederationError) else type(error).__name__
        return cls(kind, str(error), "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        """What to raise in its place."""
        if self.kind == "refused":
            return FederationError(self.message)
        return WorkerError(f"{self.kind} in a worker process: {self.message}\n\n{self.trace}")


def serve(connection: Connection, number: int, settings: Settings) -> None:
    """A worker process: carries out what comes through the connection until that is closed."""
    pipe = Pipe(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if settings.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.gpus[number]
    torch.set_num_threads(settings.threads)
    settings.numerics.set()
    pipe.send(Ready())
    worker: Worker | Failure | None = None
    broadcast = Broadcast({})
    with quiet_lightning(), lean_lightning():
        while True:
            try:
                message = pipe.recv()
                if message is None:
                    worker, broadcast = None, Broadcast({})
                elif isinstance(message, Packed):
                    worker = _made(message)
                else:
                    packed, new = message
                    if new is not None:
                        broadcast = unpack(new)
                    pipe.send(_answer(worker, packed, broadcast))
            except (EOFError, OSError):  # nobody is at the other end any more
                return


def _made(packed: Packed) -> "Worker | Failure":
    try:
        recipe: Recipe = unpack(packed)
        return recipe.worker()
    except (AttributeError, ImportError) as error:
        hint = FederationError(
            f"A worker process cannot load this run ({error}): what is defined in a notebook, or at a prompt, is unknown to other "
            "processes. Put it into a module that can be imported, or use the engine InProcess."
        )
        return Failure.of(hint)
    except Exception as error:
        return Failure.of(error)


def _answer(worker: "Worker | Failure | None", packed: Packed, broadcast: Broadcast) -> "Packed | Failure":
    if isinstance(worker, Failure):
        return worker
    assert worker is not None, "the recipe comes first"
    try:
        turn, private = unpack(packed)
        return pack(worker.take(replace(turn, broadcast=broadcast), private))
    except Exception as error:
        return Failure.of(error)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
