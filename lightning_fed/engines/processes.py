"""The engine Processes: turns in worker processes on this machine."""

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
from lightning_fed.options import PositiveFloat, PositiveInt
from lightning_fed.storage.client_store import ClientStore
from lightning_fed.system.children import safe_path
from lightning_fed.system.logs import LOGGER
from lightning_fed.system.signals import without_preemption

NAME = "lightning-fed worker"
"""Name of worker processes, followed by their number."""

GRACE = 5.0
"""Seconds that a process gets to end before it is killed."""


class Processes(Engine):
    """Runs turns in worker processes on this machine.

    Results equal those of ``InProcess`` with the same number of threads, for any number of workers; on GPUs with the trainer's
    ``deterministic: true``.

    Data, tokens and frozen networks are in shared memory, once for all workers. Processes start with the first turn and are reused
    by later runs of this engine. This process merges updates and stores the private states; at most twice as many updates as
    workers are in memory. If a worker dies (killed, out of memory), its turn is restarted once.

    Args:
        workers: number of workers. Several GPUs are assigned to them in turn, so that more workers than GPUs share them. None: one
            per GPU; without GPUs, as many as the cores allow. If the trainer names a GPU other than the first one
            (``devices: [1]``), all workers use that one.
        threads: number of torch threads of each worker, and of this process during a run.
        turn_timeout: seconds after which the worker of a turn counts as dead. None: no limit; a line names turns that take much
            longer than earlier ones.
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
        """Pack the spec, and stop processes if the number of workers has changed.

        Raises:
            FederationError: for what cannot be sent to another process, or if this is a worker process itself.
        """
        if multiprocessing.current_process().name.startswith(NAME):
            # A script without a main guard: its own workers import it. The parent process explains that.
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
        """Release the run; the processes wait for the next one."""
        self._opened = None
        if self._pool is not None:
            self._pool.forget()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()


@dataclass
class _Slot:
    """A worker process, this end of its pipe, and what has been sent to it."""

    process: "ForkServerProcess | SpawnProcess"
    pipe: Pipe
    ready: bool = False
    spec: Packed | None = None
    broadcast: Packed | None = None


class _Processes(WorkerPool):
    """Worker processes, each with its own pipe, which shows whose worker dies."""

    remedy = "set federation.engine.init_args.workers lower"

    def __init__(self, size: int, settings: Settings, turn_timeout: float | None) -> None:
        super().__init__(turn_timeout)
        self.size = size
        self.settings = settings
        self.spec: Packed | None = None
        self._blocks = ReusedBlocks(keep=2 * WAITING * size)  # a broadcast and a private state for each turn in progress
        self.broadcasts = Broadcasts(partial(pack, allocate=self._blocks))
        self._slots: dict[int, _Slot] = {}
        # multiprocessing waits for processes at exit; this must run before. Handlers run in reverse order of registration.
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
            pass  # it has died, which wait() reports

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
        slot.process.kill()  # it may hang
        self._start(worker)
        return True

    def drop(self, busy: Iterable[int]) -> None:
        _end({worker: self._slots.pop(worker) for worker in busy if worker in self._slots}, gently=False)

    def forget(self) -> None:
        """Release the workers' networks and data."""
        self.end_turns()
        self.spec = None
        self.broadcasts.clear()
        self._blocks.clear()
        for worker, slot in list(self._slots.items()):
            slot.spec = slot.broadcast = None
            try:
                slot.pipe.send(None)
            except OSError:  # it died while idle
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
        with without_preemption(), safe_path():
            process.start()
        theirs.close()  # only the worker has it now: this end notices when the worker dies
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
        raise FederationError(f"A worker process ended during its start, {how}; its output is above.{guard if code == 1 else ''}")


def _end(slots: Mapping[int, _Slot], gently: bool = True) -> None:
    """End processes: idle ones end when their pipe is closed; busy ones are terminated, then killed."""
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
    """A context that forks workers from a server with all imports done, where the system has fork: they start in a second."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__, *(name for name in ("transformers", "peft") if name in sys.modules)])
    return context


def _cores() -> int:
    """Number of cores that this process may use; if the system does not say, the number of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else multiprocessing.cpu_count()


def _gpus(spec: WorkerSpec) -> list[str | None]:
    """The GPUs to assign to workers, by their names in CUDA_VISIBLE_DEVICES: all of this process. None: the one that the trainer
    names, by its index among them.
    """
    with quiet_lightning():
        if _names_devices(spec.new_trainer) or spec.new_trainer(**QUIET).device_ids != [0]:
            return [None]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(named.split(",")) if named else [str(k) for k in range(torch.cuda.device_count())]


def _names_devices(new_trainer: TrainerFactory) -> bool:
    """Whether a Trainer's devices are given by index (``[0]``, ``"0,"``) instead of by number. The Trainer itself no longer knows,
    and a user's function does not say.
    """
    if not isinstance(new_trainer, partial):
        return False
    settings = dict(new_trainer.keywords)
    for block in filter(lambda argument: isinstance(argument, Mapping), new_trainer.args):  # a configuration's trainer block
        settings |= block
    devices = settings.get("devices")
    return isinstance(devices, list | tuple) or (isinstance(devices, str) and "," in devices)
