"""The main loop of a worker process, which runs the turns that arrive through its pipe."""

import gc
import multiprocessing
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from lightning_fed.core.messages import Broadcast
from lightning_fed.engines.block import Pipe, ReusedBlocks
from lightning_fed.engines.malloc import retained_memory
from lightning_fed.engines.packing import Packed, unpack
from lightning_fed.engines.remote_worker import RemoteWorker, TorchSettings
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.system.children import forget_safe_path
from lightning_fed.system.logs import LOGGER, lines_shown

forget_safe_path()  # in the server that imports this module before it forks workers; elsewhere it does nothing


@dataclass(frozen=True)
class Settings:
    """Common settings of worker processes.

    Args:
        torch_settings: see :class:`.TorchSettings`.
        gpus: the GPUs to assign, by their names in CUDA_VISIBLE_DEVICES; None if the trainer names the GPU.
        log_level: level of the package's logger.
    """

    torch_settings: TorchSettings
    gpus: list[str | None]
    log_level: int


class Ready:
    """A worker's first message."""


class Assignment(NamedTuple):
    """A packed turn with the client's private state, and its packed broadcast; None: the same broadcast as before."""

    turn: Packed
    broadcast: Packed | None


def serve(connection: Connection, number: int, settings: Settings) -> None:
    """Main function of a worker process: runs what arrives through the connection until it is closed."""
    pipe = Pipe(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # so may a queueing system's signal
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if settings.gpus and (gpu := settings.gpus[number]) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    settings.torch_settings.set()
    LOGGER.setLevel(settings.log_level)
    pipe.send(Ready())
    worker: RemoteWorker | None = None
    broadcast = Broadcast({})
    with lines_shown(), quiet_lightning(), ExitStack() as run:
        while True:
            try:
                message = pipe.recv()
                if message is None:
                    worker, broadcast = None, Broadcast({})
                    gc.collect()  # Trainers and modules refer to each other
                    run.close()
                elif isinstance(message, Packed):
                    run.enter_context(retained_memory())
                    worker = RemoteWorker(message, allocate=ReusedBlocks())
                else:
                    if message.broadcast is not None:
                        broadcast = unpack(message.broadcast)
                    assert worker is not None, "the spec comes first"
                    pipe.send(worker.answer(message.turn, broadcast))
            except (EOFError, OSError):  # the other end is closed
                return


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
