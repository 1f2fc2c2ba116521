"""Turns in processes of their own, on this machine."""

import atexit
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess

import torch
from jsonargparse.typing import PositiveFloat

from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn, TurnFailure, TurnResult
from lightning_fed.engines.base import Engine
from lightning_fed.engines.block import Pipe, ReusedBlocks
from lightning_fed.engines.packing import Packed, pack, unpack
from lightning_fed.engines.pool import WAITING, Broadcasts, Job, WorkerDeath, WorkerPool
from lightning_fed.engines.remote_worker import TorchSettings
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.turn_loop import QUIET, TrainerFactory
from lightning_fed.engines.worker_process import Assignment, Ready, Settings, serve
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.logs import LOGGER
from lightning_fed.options import PositiveInt
from lightning_fed.storage.client_store import ClientStore

NAME = "lightning-fed worker"
"""What worker processes are called, in front of their number."""

GRACE = 5.0
"""Seconds that a process has to end when asked, before it is killed."""


class Processes(Engine):
    """Carries turns out in worker processes on this machine.

    The numbers are those of ``InProcess`` with as many threads, whatever the number of workers; on GPUs, with the trainer's
    ``deterministic: true``.

    Data, tokens and frozen networks are in shared memory, once for all workers. Processes start with the first turn and stay for
    later runs of this engine. This process merges updates and keeps the private states; at most twice as many updates as there are
    workers are in memory. A turn whose worker dies (killed, out of memory) is started again, once.

    Args:
        workers: how many; with several GPUs they are dealt out to the workers in turn, so that more workers than GPUs share them.
            None: one per GPU; without any, as many as there are cores for. If the trainer names a GPU other than the first one
            (``devices: [1]``), all workers have that one.
        threads: torch threads of each worker, and of this process during a run.
        turn_timeout: seconds after which the worker of a turn is taken for dead. None: it is waited for; of a turn that takes much
            longer than turns did so far a line says whose it is.
    """

    def __init__(
        self, workers: PositiveInt | None = None, threads: PositiveInt = 1, turn_timeout: PositiveFloat | None = None
    ) -> None:
        self.workers = workers
        self.threads: int = threads
        self.turn_timeout = turn_timeout
        self._pool: _Processes | None = None
        self._opened: tuple[Packed, ClientStore] | None = None

    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        """Pack the spec, and let go of processes that were for another number of workers.

        Raises:
            FederationError: for what cannot be sent to another process, or if this is a worker process itself.
        """
        if multiprocessing.current_process().name.startswith(NAME):
            # A script that is not protected by a main guard: it is imported by its own workers. The parent process says so.
            raise SystemExit(1)
        spec = spec.unbuilt()
        gpus = _gpus(spec) if spec.is_for_gpu() else []
        size = self.workers or len(gpus) or max(1, _cores() // self.threads)
        of_each = [gpus[k % len(gpus)] for k in range(size)] if gpus else []
        settings = Settings(TorchSettings.of_this_process(self.threads), of_each, LOGGER.level)
        self._opened = spec.packed(move=True), states
        if self._pool is None or self._pool.settings != settings or self._pool.size != size:
            self._stop()
            self._pool = _Processes(size, settings, self.turn_timeout)
        self._pool.spec = self._opened[0]

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        assert self._opened is not None, "open() comes first"
        assert self._pool is not None
        self._pool.broadcasts.clear()
        return self._pool.run_turns(turns, self._opened[1])

    def close(self) -> None:
        """Let go of the run; the processes wait for the next one."""
        self._opened = None
        if self._pool is not None:
            self._pool.forget()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()


@dataclass
class _Slot:
    """A place for a process: the one that is in it, this end of its pipe, and what it has been told."""

    process: "ForkServerProcess | SpawnProcess"
    pipe: Pipe
    ready: bool = False
    spec: Packed | None = None
    broadcast: Packed | None = None


class _Processes(WorkerPool):
    """Worker processes, each with a pipe of its own: whose worker dies is then known."""

    remedy = "set federation.engine.init_args.workers lower"

    def __init__(self, size: int, settings: Settings, turn_timeout: float | None) -> None:
        super().__init__(turn_timeout)
        self.size = size
        self.settings = settings
        self.spec: Packed | None = None
        self._blocks = ReusedBlocks(keep=2 * WAITING * size)  # a broadcast and a private state for each turn under way
        self.broadcasts = Broadcasts(partial(pack, allocate=self._blocks))
        self._slots: dict[int, _Slot] = {}
        # At exit, multiprocessing waits for processes; this has to come before. The order is that of registration, backwards.
        self._finalizer = weakref.finalize(self, _end, self._slots)
        atexit.register(self._finalizer)

    def available(self) -> range:
        return range(self.size)

    def send(self, worker: int, job: Job) -> None:
        slot = self._slots.get(worker) or self._start(worker)
        broadcast = self.broadcasts.sent(job.turn.broadcast, keep=2 * self.size)
        turn = pack((replace(job.turn, broadcast=Broadcast({})), job.private), allocate=self._blocks)
        try:
            if slot.spec is not self.spec:
                slot.pipe.send(self.spec)
                slot.spec = self.spec
            slot.pipe.send(Assignment(turn, None if slot.broadcast is broadcast else broadcast))
            slot.broadcast = broadcast
        except OSError:
            pass  # it has died; wait() will find out, and that is told once

    def has_started(self, worker: int) -> bool:
        return self._slots[worker].ready

    def wait(self, busy: Iterable[int], seconds: float | None) -> list[tuple[int, TurnResult | Exception | WorkerDeath]]:
        by_pipe = {self._slots[worker].pipe.connection: worker for worker in busy}
        answers: list[tuple[int, TurnResult | Exception | WorkerDeath]] = []
        for pipe in wait(list(by_pipe), seconds):
            assert isinstance(pipe, Connection)
            worker = by_pipe[pipe]
            slot = self._slots[worker]
            try:
                answer = slot.pipe.recv()
            except (EOFError, OSError):
                answer = None
            if answer is None:
                answers.append((worker, self._died(slot)))
            elif isinstance(answer, Ready):
                slot.ready = True
            elif isinstance(answer, Packed):
                answers.append((worker, unpack(answer)))
            else:
                answers.append((worker, answer))
        return answers

    def name(self, worker: int) -> str:
        return f"process {self._slots[worker].process.pid}"

    def replace(self, worker: int) -> bool:
        slot = self._slots.pop(worker)
        slot.pipe.close()
        slot.process.kill()  # it may stand still
        self._start(worker)
        return True

    def drop(self, busy: Iterable[int]) -> None:
        _end({worker: self._slots.pop(worker) for worker in busy if worker in self._slots}, gently=False)

    def forget(self) -> None:
        """Let the workers' networks and data go."""
        self.end_turns()
        self.spec = None
        self.broadcasts.clear()
        self._blocks.clear()
        for worker, slot in list(self._slots.items()):
            slot.spec = slot.broadcast = None
            try:
                slot.pipe.send(None)
            except OSError:  # it has died, with nothing to do
                self.drop([worker])

    def stop(self) -> None:
        """End all processes."""
        self.end_turns()
        atexit.unregister(self._finalizer)
        self._finalizer()

    def _start(self, worker: int) -> _Slot:
        context = _context()
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, worker, self.settings), name=f"{NAME} {worker}", daemon=False)
        process.start()
        theirs.close()  # the last copy is the worker's: when it dies, this end sees it
        self._slots[worker] = _Slot(process, Pipe(ours))
        return self._slots[worker]

    @staticmethod
    def _died(slot: _Slot) -> WorkerDeath:
        slot.process.join(GRACE)
        code = slot.process.exitcode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            known = {number.value: number.name for number in signal.Signals}
            name = known.get(-code, "a real-time signal")
            how = f"by signal {-code} ({name}{', perhaps out of memory' if name == 'SIGKILL' else ''})"
        if slot.ready:
            return WorkerDeath(how)
        script = f" {sys.argv[0]}" if sys.argv and sys.argv[0] else ""
        guard = (
            ' A script that uses worker processes must run them under `if __name__ == "__main__":`, for they import the script'
            f"{script}."
        )
        raise FederationError(
            f"A worker process ended while it started, {how}; what it printed is above.{guard if code == 1 else ''}"
        )


def _end(slots: Mapping[int, _Slot], gently: bool = True) -> None:
    """End processes: idle ones go by themselves when their pipe is closed, busy ones are told to, and then killed."""
    for slot in slots.values():
        slot.pipe.close()
        if not gently:
            slot.process.terminate()
    deadline = time.monotonic() + GRACE
    for slot in slots.values():
        slot.process.join(max(0.0, deadline - time.monotonic()))
        if slot.process.is_alive():
            slot.process.kill()
            slot.process.join()


def _context() -> ForkServerContext | SpawnContext:
    """Where there is one, a server that has everything imported and from which workers are forked: they start in a second."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__, *(name for name in ("transformers", "peft") if name in sys.modules)])
    return context


def _cores() -> int:
    """Cores that this process may use; where the system does not say, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else multiprocessing.cpu_count()


def _gpus(spec: WorkerSpec) -> list[str | None]:
    """The GPUs that are dealt out to workers, by the names that CUDA_VISIBLE_DEVICES has: all that this process has. None: the one
    that the trainer names, by its place among them.
    """
    with quiet_lightning():
        if _names_devices(spec.new_trainer) or spec.new_trainer(**QUIET).device_ids != [0]:
            return [None]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(named.split(",")) if named else [str(k) for k in range(torch.cuda.device_count())]


def _names_devices(new_trainer: TrainerFactory) -> bool:
    """Whether a Trainer's devices are given by their numbers (``[0]``, ``"0,"``) and not by how many there are. The Trainer itself
    does not know that any more; a function of the user's does not say it.
    """
    if not isinstance(new_trainer, partial):
        return False
    settings = dict(new_trainer.keywords)
    for block in filter(lambda argument: isinstance(argument, Mapping), new_trainer.args):  # the trainer block of a configuration
        settings |= block
    devices = settings.get("devices")
    return isinstance(devices, list | tuple) or (isinstance(devices, str) and "," in devices)
