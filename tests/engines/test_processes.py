"""Worker processes: the same numbers as in one process, and no end of trouble survived."""

import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from often import mostly_slow
from tiny import (
    METHODS,
    Net,
    Shuffled,
    assert_same,
    assert_same_end,
    data_for,
    new_data,
    new_federation,
    new_method,
    new_trainer,
    private_states,
)
from tiny_deaths import Failing, assert_undisturbed, dying
from tiny_frozen import new_case
from tiny_sessions import family, gone_within
from torch import Tensor

from lightning_fed.__main__ import main
from lightning_fed.cli.trainer import build_trainer
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Server
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines import InProcess, Processes, block
from lightning_fed.engines.processes import NAME
from lightning_fed.engines.remote_worker import WorkerError
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.storage.client_store import ClientStore

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks processes and their memory up in /proc")


@pytest.fixture
def engine(two_workers: Processes) -> Processes:
    return two_workers


def fit(engine: InProcess | Processes, name: str = "PFedLoRA", rounds: int = 2, **options: Any) -> Federation:
    """Two of three clients in a round, everybody measured in each."""
    options = {"participation": 0.7, "evaluate_every": 1} | options
    federation = new_federation(rounds, engine=engine, **options)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=100), "last" if "run_dir" in options else None)
    return federation


def in_shared_memory(tensor: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= tensor.data_ptr() < int(end, 16):
            return "/memfd:lightning-fed" in line
    raise AssertionError("nowhere in memory")


def worker_pids(engine: Processes) -> dict[int, int]:
    assert engine._pool is not None
    return {worker: slot.process.pid for worker, slot in engine._pool._slots.items() if slot.process.pid is not None}


OFTEN = {"PFedLoRA", "FedHM", "SCAFFOLD", "HETLoRA"}
"""What is tried in the default tests: networks and sizes of one's own, statistics, a payload, texts. The rest is slow: that any
method's turns are the same where its spec has travelled to, tests/engines/test_worker.py holds without processes.
"""


@pytest.mark.parametrize("name", mostly_slow(METHODS, OFTEN))
def test_numbers_are_those_of_one_process(name: str, engine: Processes) -> None:
    """Also with a store without memory."""
    assert_same(fit(engine, name, store_limit_mb=1e-6), fit(InProcess(threads=1), name))


@pytest.mark.often(1)
@pytest.mark.parametrize("order", ["forth", "back"])
def test_a_run_continues_on_the_other_engine(order: str, engine: Processes) -> None:
    whole, here = fit(InProcess(threads=1), rounds=4), InProcess(threads=1)
    first, second = (here, engine) if order == "forth" else (engine, here)
    fit(first, rounds=2, run_dir="runs")
    assert_same(fit(second, rounds=4, run_dir="runs"), whole)


def test_the_number_of_workers_changes_nothing(engine: Processes) -> None:
    three = Processes(workers=3)
    assert_same(fit(three, "FedHM"), fit(engine, "FedHM"))
    three._stop()


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["projection", "adapter"])
def test_what_is_drawn_and_frozen_is_the_same_on_any_worker(name: str, engine: Processes) -> None:
    """Whichever client a worker meets first."""
    ends = []
    for chosen in (engine, InProcess(threads=1), Shuffled(), Processes(workers=1)):
        method, data = new_case(name)
        federation = new_federation(2, engine=chosen, participation=0.5, evaluate_every=1)
        federation.fit(method, data)
        ends.append(federation)
        if isinstance(chosen, Processes) and chosen is not engine:
            chosen._stop()
    for other in ends[1:]:
        assert_same(ends[0], other)


@needs_proc
def test_data_and_frozen_networks_are_in_memory_once(engine: Processes) -> None:
    data = new_data(3)
    before = data.setup() or data._data.images.clone()  # type: ignore[union-attr]
    new_federation(1, engine=engine).fit(new_method("FedAvg"), data)
    assert data._data is not None
    assert in_shared_memory(data._data.images)
    assert torch.equal(data._data.images, before)


@needs_proc
def test_private_states_do_not_stay_in_shared_memory(engine: Processes) -> None:
    assert not any(in_shared_memory(tensor) for state in private_states(fit(engine)).values() for tensor in state.values())


@pytest.mark.often(1)
@pytest.mark.skipif(not block.ANONYMOUS, reason="shared memory has names here, and is not used again")
@pytest.mark.parametrize("name", ["FedAvg", "Ditto"])  # one broadcast for all, and private states besides
def test_later_rounds_send_in_the_memory_of_earlier_ones(name: str, engine: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    new_descriptor = block._new_descriptor
    monkeypatch.setattr(block, "_new_descriptor", lambda size: (sizes.append(size), new_descriptor(size))[1])
    fit(engine, name, rounds=4, participation=1.0)
    few = len(sizes)
    sizes.clear()
    fit(engine, name, rounds=12, participation=1.0)
    assert 0 < len(sizes) <= few + 5  # some more where workers were slow to let go, but not one per round


def test_workers_stay_for_the_next_run_and_let_go_of_the_last(engine: Processes) -> None:
    fit(engine)
    pids = worker_pids(engine)
    fit(engine, "FedAvg")
    assert worker_pids(engine) == pids
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("devices", "workers", "gpus"),
    [(1, None, ["0", "1"]), (1, 3, ["0", "1", "0"]), ([1], None, [None]), ([0], None, [None]), ("0,", 2, [None, None])],
)
@pytest.mark.parametrize("in_a_block", [False, True], ids=["of Python", "of a configuration"])
def test_gpus_are_dealt_out_unless_the_trainer_names_one(
    in_a_block: bool, devices: Any, workers: int | None, gpus: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = {"accelerator": "gpu", "devices": devices}
    engine, trainer = Processes(workers), partial(build_trainer, settings) if in_a_block else partial(L.Trainer, **settings)
    engine.open(WorkerSpec(FedAvg(Net, 4), new_data(2), trainer, 0), ClientStore(Path("states"), 10**6))
    assert engine._pool is not None
    assert engine._pool.settings.gpus == gpus
    assert engine._pool.size == len(gpus)


# --------------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.often(1)
@pytest.mark.parametrize("stage", ["fit", "evaluate"])
def test_a_worker_that_is_killed_is_replaced(stage: str, engine: Processes) -> None:
    federation = new_federation(2, engine=engine, evaluate_every=1)
    federation.fit(dying(stage, 1, 1), new_data(3))
    assert Path("notes").read_bytes() == b"x"
    assert_undisturbed(federation)


@needs_proc
@pytest.mark.slow  # its turns must end in time, however busy the machine is
def test_a_worker_that_stands_still_is_replaced_after_the_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Processes(workers=2, turn_timeout=10)
    federation = new_federation(2, engine=engine, evaluate_every=1)
    federation.fit(dying("fit", 1, 1, of=signal.SIGSTOP), new_data(3))
    engine._stop()
    said = r"Round 1: the turn of client 1 \(fit\) has taken 10 s in process (\d+); .* The worker counts as dead\.\n"
    found = re.fullmatch(said, capsys.readouterr().out)
    assert found
    assert not Path(f"/proc/{found[1]}").exists()
    assert_undisturbed(federation)


def test_two_deaths_end_the_run_with_client_round_signal_and_remedy(engine: Processes) -> None:
    federation = new_federation(3, engine=engine, run_dir="runs")
    with pytest.raises(
        FederationError,
        match=r"Two workers that trained client 2 in round 1 died, the last one by signal 9 \(SIGKILL, perhaps out of memory\): "
        r"set federation.engine.init_args.workers lower",
    ):
        federation.fit(dying("fit", 2, 2), new_data(3))
    assert Path("notes").read_bytes() == b"xx"
    fit(engine)  # it works again


class Refusing(FedAvg):
    """Cannot be measured; in the last round participants are, before aggregation, in their fit turns."""

    def on_test_start(self) -> None:
        raise FederationError("no test: give another")


def test_an_exception_arrives_with_traceback_and_client(engine: Processes) -> None:
    with pytest.raises(WorkerError) as error:
        new_federation(1, engine=engine).fit(Failing(Net, 4), new_data(3))
    assert "ZeroDivisionError in a worker process: division by zero" in str(error.value)
    assert "1 / 0" in str(error.value)
    assert "In this turn: Client 1 in round 1, phase local." in str(error.value)


def test_a_refusal_arrives_as_one_line(engine: Processes) -> None:
    with pytest.raises(FederationError, match=r"^Client 0 in round 1, during evaluation: no test: give another$"):
        new_federation(1, engine=engine).fit(Refusing(Net, 4), new_data(3))


class Forgetful(FedAvg):
    """Its server fails when the first update of its second round has arrived."""

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        return ForgetfulServer(self.shared_state(), holds_model=True)


class ForgetfulServer(Server):
    rounds = 0

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        self.rounds += 1
        if self.rounds == 2:
            next(iter(updates))
            raise ArithmeticError("forgotten")
        return super().aggregate(updates)


def test_what_is_left_of_a_run_whose_exception_is_held_reaches_no_other_run(engine: Processes) -> None:
    """As notebooks and debuggers hold one, and with it all that was under way."""
    with pytest.raises(ArithmeticError) as held:
        new_federation(2, engine=engine).fit(Forgetful(Net, 4), new_data(4))
    options = {"name": "FedAvg", "participation": 1.0}
    whole = fit(InProcess(threads=1), **options)
    assert_same(fit(engine, **options), whole)
    pids = worker_pids(engine)
    held.value.with_traceback(None)
    del held
    assert_same(fit(engine, **options), whole)
    assert worker_pids(engine) == pids


def test_what_cannot_be_pickled_is_named(engine: Processes) -> None:
    model = FedAvg(Net, 4, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(FederationError, match=r"^model\.optimizer cannot be sent to worker processes .*: give something that can"):
        new_federation(1, engine=engine, run_dir="runs").fit(model, new_data(3))
    assert not any(Path("runs").iterdir())
    trainer = partial(L.Trainer, accelerator="cpu", devices=1, callbacks=[Locked()])
    with pytest.raises(FederationError, match=r"^trainer\.callbacks\[0\]\.lock cannot be sent"):
        new_federation(1, engine=engine, trainer=trainer).fit(FedAvg(Net, 4), new_data(3))


class Locked(L.Callback):
    """Holds what no process can hand on."""

    def __init__(self) -> None:
        import threading

        self.lock = threading.Lock()


def test_too_little_shared_memory_is_one_line(engine: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(FederationError, match=r"No room for .* MiB of shared memory .*federation.engine.init_args.workers lower"):
        new_federation(1, engine=engine).fit(FedAvg(Net, 4), new_data(3))


# ------------------------------------------------------------------------------------------------- from outside, for real

SCRIPT = """
import sys
sys.path[:0] = {path!r}
from tiny import Net, new_data, new_federation
from lightning_fed.engines import Processes
from lightning_fed.methods import FedAvg

def main():
    new_federation({rounds}, "runs", engine=Processes(2)).fit(FedAvg(Net, 4), new_data(4))
"""
GUARDED, UNGUARDED = 'if __name__ == "__main__":\n    main()\n', "main()\n"


def start(tail: str, rounds: int = 1) -> subprocess.Popen[str]:
    path = [str(Path(__file__).parents[1])]
    Path("script.py").write_text(SCRIPT.format(path=path, rounds=rounds) + tail)
    command = [sys.executable, "script.py"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.slow
@needs_proc
def test_a_script_without_a_main_guard_is_told_so() -> None:
    process = start(UNGUARDED)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert 'must run them under `if __name__ == "__main__":`, for they import the script script.py.' in output
    assert output.count("Traceback") == 1
    assert gone_within(process.pid, 6)
    assert not any(Path("runs").iterdir())  # its workers did not get as far, and a run without a round leaves nothing


CONFIG = """
data: {class_path: Digits, init_args: {num_clients: 4, image_size: 32}}
model: {class_path: FedAvg, init_args: {backbone: CNN5}}
federation: {rounds: 500, evaluate_every: 0, progress: false, logger: false}
trainer: {accelerator: cpu}
"""
COMMAND = "from lightning_fed.__main__ import main\n\nif __name__ == '__main__':\n    main()\n"


@needs_proc
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        pytest.param(signal.SIGINT, 130, "lightning-fed: interrupted.", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "lightning-fed: terminated (SIGTERM).", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, "", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_command_leaves_nothing_but_its_checkpoints(number: int, code: int, line: str) -> None:
    Path("config.yaml").write_text(CONFIG)
    Path("command.py").write_text(COMMAND)
    named = set(Path("/dev/shm").iterdir())
    options = ["--federation.engine", "Processes", "--federation.engine.init_args.workers", "2", "--federation.run_dir", "runs"]
    command = [sys.executable, "command.py", "fit", "--config", "config.yaml", *options]
    with Path("output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        while not Path("runs/version_0/checkpoints/round_000002").exists():
            assert process.poll() is None, Path("output").read_text()
            time.sleep(0.01)
        assert len(family(process.pid)) >= 4  # itself, the server, two workers
        os.kill(process.pid, number)
        assert process.wait(30) == code
    assert gone_within(process.pid, 6)
    assert set(Path("/dev/shm").iterdir()) <= named
    said = Path("output").read_text().strip()
    assert said == (f"{line} Continue with: {shlex.join(['lightning-fed', *command[2:], '--ckpt_path', 'last'])}" if line else "")
    newest = max(int(path.name[-6:]) for path in Path("runs/version_0/checkpoints").glob("round_*"))
    for run_dir in ("runs", "whole"):
        own = ["--federation.rounds", str(newest + 1), "--federation.run_dir", run_dir, "--ckpt_path", "last"]
        main(["fit", "--config", "config.yaml", *own])
    assert_same_end(Path("runs/version_0"), Path("whole/version_0"))


@pytest.mark.slow
@needs_proc
def test_workers_do_not_outlive_the_interpreter() -> None:
    process = start(GUARDED)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert gone_within(process.pid, 6)


@pytest.mark.slow
def test_a_notebook_is_told_what_to_do() -> None:
    """As in a notebook, the main module is no file."""
    code = SCRIPT.format(path=[str(Path(__file__).parents[1])], rounds=1).replace("FedAvg(Net, 4)", "Mine(Net, 4)")
    code += "class Mine(FedAvg):\n    pass\n\nmain()\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "it does not know definitions of a notebook or an interactive session. Move them into a module" in run.stderr


def test_a_worker_never_starts_workers(monkeypatch: pytest.MonkeyPatch, engine: Processes) -> None:
    monkeypatch.setattr("multiprocessing.current_process", lambda: type("Process", (), {"name": f"{NAME} 0"}))
    with pytest.raises(SystemExit):
        new_federation(1, engine=engine).fit(FedAvg(Net, 4), new_data(3))


@pytest.mark.parametrize(
    ("asked", "gains_from", "expected"),
    [(2, 1e9, 2), (None, 1e9, 1), (None, 0, 3), (1, 0, 1)],
    ids=["asked", "small", "large", "one"],
)
def test_threads_during_a_run_alone(asked: int | None, gains_from: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.engines.base.GAINS_FROM_THREADS", gains_from)
    before = torch.get_num_threads()
    seen = []

    class Noting(FedAvg):
        def on_test_start(self) -> None:
            seen.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        new_federation(1, engine=InProcess(asked), trainer=new_trainer).fit(Noting(Net, 4), new_data(2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {expected}


def test_the_size_of_a_step_decides_on_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        network = torch.nn.Linear(999, 1000)  # a million parameters
        assert [InProcess().threads_for(network, batch) for batch in (19, 20)] == [1, 3]
    finally:
        torch.set_num_threads(before)


def test_a_queueing_systems_signal_ends_no_process_of_a_run(two_workers: Processes) -> None:
    new_federation(1, engine=two_workers).fit(FedAvg(Net), new_data())
    workers = [process.pid for process in multiprocessing.active_children() if process.name.startswith(NAME)]
    parents = {re.findall(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[0] for pid in workers}
    assert parents
    assert str(os.getpid()) not in parents  # but what they are forked from
    for parent in parents:
        [blocked] = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{parent}/status").read_text())
        assert int(blocked, 16) & 1 << (signal.SIGUSR1 - 1)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
