"""The engine Ray: turns in processes of a Ray cluster, on many machines."""

import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn, TurnFailure, TurnResult
from lightning_fed.engines.base import Engine
from lightning_fed.engines.packing import Packed, Packer, pack, unpack
from lightning_fed.engines.pool import Broadcasts, Job, WorkerDeath, WorkerPool
from lightning_fed.engines.ray.cluster import Cluster, the_package
from lightning_fed.engines.ray.worker import CopiedBuffer, SharedBuffer, new_actor
from lightning_fed.engines.remote_worker import TorchSettings, WorkerError
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.options import NonNegativeFloat, PositiveFloat, PositiveInt
from lightning_fed.storage.client_store import ClientStore

log = logging.getLogger(__name__)

SETTLED = 2.0
"""Seconds after which Ray has found resources for workers, if there are any."""

LOOK = 1.0
"""Seconds between checks that the cluster is still there."""

STARTED = 300.0
"""Seconds after which a worker that has not answered at all is given up."""


class Ray(Engine):
    """Runs turns on the machines of a Ray cluster (``pip install "lightning-fed[ray]"``, on each of them).

    Results equal those of ``InProcess`` with the same number of threads, for any number of workers and machines, if their
    processors are of one kind; on GPUs with the trainer's ``deterministic: true``.

    Each worker is an actor. Data and frozen networks are sent once and are in memory once per machine; what all clients of a round
    receive is sent to each machine once. This process merges updates and stores the private states; at most twice as many updates
    as workers are in memory. If a worker dies, its turn is restarted once; if a machine has left the cluster, the other workers
    take over. Workers end with the run.

    Args:
        address: address of the cluster, ``host:port``; ``auto``: the cluster of this machine. None: a new cluster on this machine
            only, which ends with the run. A process that is already connected (``ray.init``) keeps its connection.
        workers: maximum number of workers. None: as many as there are resources for, also on machines that join later.
        cpus_per_worker: CPUs that Ray reserves for a worker; this does not limit what the worker uses.
        gpus_per_worker: GPUs that Ray reserves for a worker; 0.25 lets four workers share a GPU.
        threads: number of torch threads of each worker, and of this process during a run.
        wait: seconds to wait for an answer of the cluster, and for resources for a worker.
        log_to_driver: whether to print here what workers and Ray print.
        turn_timeout: seconds after which the worker of a turn counts as dead. None: no limit; a line names turns that take much
            longer than earlier ones.

    Raises:
        FederationError: if Ray is not installed.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: PositiveInt | None = None,
        cpus_per_worker: PositiveFloat = 1,
        gpus_per_worker: NonNegativeFloat = 0,
        threads: PositiveInt = 1,
        wait: PositiveFloat = 60,
        log_to_driver: bool = False,
        turn_timeout: PositiveFloat | None = None,
    ) -> None:
        the_package()
        self.address = address
        self.workers = workers
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker
        self.threads: int = threads
        self.wait = wait
        self.log_to_driver = log_to_driver
        self.turn_timeout = turn_timeout
        self._opened: tuple[Cluster, _Actors, ClientStore] | None = None

    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        """Connect to the cluster and store the spec there.

        Raises:
            FederationError: for what cannot be sent to another process, or if the cluster does not answer or cannot be used.
        """
        self.close()
        spec = spec.unbuilt()
        if not self.gpus_per_worker and spec.is_for_gpu():
            raise FederationError(
                "The trainer computes on a GPU, but workers get none: set federation.engine.init_args.gpus_per_worker, to 1 or, if "
                "several are to share a GPU, to a fraction; or trainer.accelerator to cpu."
            )
        packed = spec.packed(allocate=SharedBuffer, packer=_by_value())
        cluster = Cluster(self.address, self.wait, self.log_to_driver)
        try:
            ordered = the_package().put((packed, TorchSettings.of_this_process(self.threads)))
            share = {"CPU": float(self.cpus_per_worker), "GPU": float(self.gpus_per_worker)}
            share = {name: amount for name, amount in share.items() if amount}
            pool = _Actors(cluster, self.workers, share, self.wait, ordered, self.turn_timeout)
        except BaseException:
            cluster.close()
            raise
        self._opened = cluster, pool, states

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        assert self._opened is not None, "open() comes first"
        _, pool, states = self._opened
        try:
            yield from pool.run_turns(turns, states)
        finally:
            pool.broadcasts.clear()

    def close(self) -> None:
        """End the workers, and the cluster if this run started it."""
        if self._opened is not None:
            cluster, pool, _ = self._opened
            self._opened = None
            pool.stop()
            cluster.close()


def _by_value() -> type[Packer]:
    """A packer that pickles definitions of a script or a notebook with their code: other machines have neither."""

    class ByValue(Packer, the_package().cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles classes of ``__main__`` by value, and collects tensors."""

    return ByValue


@dataclass
class _Member:
    """An actor: answers expected before its turns and when the first is due, answers to its turns, and its machine."""

    actor: Any
    first: deque["Future[Any]"]
    until: float | None
    turns: deque["Future[Any]"] = field(default_factory=deque)
    node: str = "an unknown machine"
    node_id: str | None = None


class _Actors(WorkerPool):
    """Actors, each in its own reservation, which shows whether there are resources for one before it starts.

    Args:
        cluster: the cluster.
        workers: maximum number of workers. None: as many as there are resources for.
        share: resources to reserve for each, by Ray's names.
        wait: seconds to wait for resources.
        ordered: Ray's reference to what creates a worker.
        turn_timeout: see :class:`Ray`.
    """

    remedy = "set federation.engine.init_args.cpus_per_worker higher, so that fewer workers share a machine"

    def __init__(
        self,
        cluster: Cluster,
        workers: int | None,
        share: dict[str, float],
        wait: float,
        ordered: Any,
        turn_timeout: float | None,
    ) -> None:
        super().__init__(turn_timeout)
        self._cluster = cluster
        ray = the_package()
        self._ray = ray
        known = ray.exceptions
        self._deaths = known.RayActorError, known.NodeDiedError, known.ObjectLostError, known.OutOfMemoryError
        self._class = ray.remote(new_actor())
        self._versions = new_actor()().versions()[1]
        self._workers, self._share, self._wait, self._ordered = workers, share, wait, ordered
        numbers = count(1)
        self.broadcasts = Broadcasts(lambda broadcast: (next(numbers), ray.put(pack(broadcast, allocate=CopiedBuffer))))
        self._reserved: list[Any] = []
        self._members: dict[int, _Member] = {}
        self._told = 0

    def available(self) -> list[int]:
        self._cluster.check()
        self._end_idle_where_machines_left()
        wanted = self._workers or max(1, self._room())
        new = wanted - len(self._reserved)
        self._reserved += [self._reserve() for _ in range(new)]
        start = time.monotonic()
        while True:
            ready = [worker for worker in range(len(self._reserved)) if worker in self._members or self._has_room(worker)]
            waited = time.monotonic() - start
            if len(ready) == len(self._reserved) or (ready and (new <= 0 or waited > SETTLED)):
                break
            if waited > self._wait:
                share = " and ".join(f"{amount:g} {name}" for name, amount in self._share.items())
                raise FederationError(
                    f"Ray has had no resources for a worker ({share} each) for {self._wait:g} s: its machines are too small or "
                    "busy. Lower federation.engine.init_args.cpus_per_worker and gpus_per_worker, or set its wait higher."
                )
            time.sleep(0.05)
        if self._workers and len(ready) < self._workers and len(ready) != self._told:
            log.warning(f"Ray has resources for {len(ready)} of {self._workers} workers.")
        self._told = len(ready)
        return ready

    def send(self, worker: int, job: Job) -> None:
        self._cluster.check()
        member = self._members.get(worker) or self._start(worker)
        number, broadcast = self.broadcasts.sent(job.turn.broadcast, keep=2 * len(self._reserved))
        turn = pack((replace(job.turn, broadcast=Broadcast({})), job.private), allocate=CopiedBuffer)
        member.turns.append(member.actor.take.remote(turn, number, [broadcast]).future())

    def has_started(self, worker: int) -> bool:
        return not self._members[worker].first

    def name(self, worker: int) -> str:
        return f"a worker on {self._members[worker].node}"

    def wait(self, busy: Iterable[int], seconds: float | None) -> list[tuple[int, TurnResult | Exception | WorkerDeath]]:
        members = {worker: self._members[worker] for worker in busy}
        heads = {(member.first or member.turns)[0]: worker for worker, member in members.items()}
        ends = [max(0.0, member.until - time.monotonic()) for member in members.values() if member.until is not None]
        ends += [LOOK] if seconds is None else [LOOK, seconds]
        # Not ray.wait, which loses Ctrl-C: these futures are Python's own.
        done, _ = wait_for(heads, min(ends), FIRST_COMPLETED)
        self._cluster.check()
        answers: list[tuple[int, TurnResult | Exception | WorkerDeath]] = []
        for head in done:
            member = members[heads[head]]
            (member.first or member.turns).popleft()
            if (answer := self._read(member, head)) is not None:
                answers.append((heads[head], answer))
        if not done:
            late = [worker for worker, member in members.items() if member.until is not None and member.until <= time.monotonic()]
            answers += [(worker, WorkerDeath(f"without an answer for {STARTED:g} s")) for worker in late]
        return answers

    def _read(self, member: _Member, head: "Future[Any]") -> TurnResult | Exception | WorkerDeath | None:
        """An actor's answer; None if it is not about a turn."""
        try:
            said = head.result()
        except self._deaths as error:
            return WorkerDeath(f"on {member.node} {_reason(error)}")
        except Exception as error:
            return WorkerError(f"A Ray worker on {member.node} failed to start: {error}")
        if isinstance(said, Packed):
            result: TurnResult = unpack(said)
            return result
        if isinstance(said, Exception):
            return said
        if isinstance(said, str):
            member.node_id = said
        elif said is not None:
            (member.node, versions), member.until = said, None
            self._compare(member.node, versions)
        return None

    def replace(self, worker: int) -> bool:
        self._end(worker)
        # A new reservation: the old one may be on a machine that has left without Ray knowing yet.
        self._ray.util.remove_placement_group(self._reserved[worker])
        self._reserved[worker] = self._reserve()
        until = time.monotonic() + SETTLED
        while not (room := self._has_room(worker)) and time.monotonic() < until:
            time.sleep(0.05)
        return room

    def drop(self, busy: Iterable[int]) -> None:
        for worker in busy:
            self._end(worker)

    def stop(self) -> None:
        """End all actors and free their resources."""
        self.end_turns()
        self.drop(list(self._members))
        while self._reserved:
            reserved = self._reserved.pop()
            if not self._cluster.is_gone:
                self._ray.util.remove_placement_group(reserved)
        self.broadcasts.clear()
        self._ordered = None

    def _end_idle_where_machines_left(self) -> None:
        """End idle workers on machines that have left. Otherwise they would be found dead at their next turn, and it would count as
        a death in that turn.
        """
        left = {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}
        for worker in [worker for worker, member in self._members.items() if member.node_id in left and not member.turns]:
            self._end(worker)

    def _room(self) -> int:
        """Number of workers that the machines have resources for if nobody else uses them."""
        totals = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(min(int(total.get(name, 0) / amount + 1e-6) for name, amount in self._share.items()) for total in totals)

    def _reserve(self) -> Any:
        return self._ray.util.placement_group([self._share])

    def _has_room(self, worker: int) -> bool:
        return self._ray.util.placement_group_table(self._reserved[worker])["state"] == "CREATED"

    def _start(self, worker: int) -> _Member:
        actor = self._class.options(
            num_cpus=self._share["CPU"],
            num_gpus=self._share.get("GPU", 0),
            scheduling_strategy=self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._reserved[worker]),
            max_restarts=0,
            max_task_retries=0,
        ).remote()
        first = [actor.versions.remote(), actor.start.remote(self._versions, [self._ordered])]
        member = _Member(actor, deque(said.future() for said in first), time.monotonic() + STARTED)
        self._members[worker] = member
        return member

    def _end(self, worker: int) -> None:
        if worker in self._members:
            self._ray.kill(self._members.pop(worker).actor)

    def _compare(self, node: str, versions: dict[str, str | None]) -> None:
        other = [
            f"{package} {found or 'missing'} instead of {self._versions[package]}"
            for package, found in versions.items()
            if found != self._versions[package]
        ]
        if other:
            raise FederationError(
                f"Ray's machine {node} has {', '.join(other)}: install the versions of the machine that starts the run."
            )


def _reason(error: Exception) -> str:
    """Short reason of a death; Ray's own messages take a page."""
    told = str(error)
    if found := re.search(r"Worker exit type: (\w+)", told):
        return f"({found[1]})"
    return "with that machine" if "node" in told.lower() else f"({type(error).__name__})"
