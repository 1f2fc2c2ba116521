"""A Ray cluster: the same numbers as in one process; workers, machines and whole clusters that go."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny import (
    CLASSES,
    Net,
    assert_same,
    assert_same_end,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    private_states,
    sgd,
)
from tiny_deaths import Failing, assert_undisturbed, dying
from tiny_sessions import family, gone_within

import lightning_fed
from lightning_fed.__main__ import main
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.data import Digits
from lightning_fed.engines import Engine, InProcess, Ray
from lightning_fed.engines.ray.cluster import SILENT
from lightning_fed.engines.remote_worker import WorkerError
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, PFedLoRA
from lightning_fed.models import CNN1, CNN2, CNN3, CNN4, CNN5

ray = pytest.importorskip("ray", reason='needs pip install "lightning-fed[ray]"')
pytestmark = pytest.mark.slow  # a cluster takes seconds to start, and so do the workers of each run


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two processors, and a GPU that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import the tests' methods
        for name, value in SILENT.items():
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # which hides GPUs from tests, and Ray would not believe in one
        ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        yield
        ray.shutdown()


def fit(engine: Engine, method: Any = "PFedLoRA", data: Any = None, rounds: int = 2, **options: Any) -> Federation:
    """Two of three clients in a round, everybody measured in each."""
    options = {"participation": 0.7, "evaluate_every": 1} | options
    federation = new_federation(rounds, engine=engine, **options)
    method, data = (new_method(method), data_for(method, num_clients=3, size=100)) if isinstance(method, str) else (method, data)
    federation.fit(method, data)
    return federation


def objects() -> int:
    """How many there are in the object stores. Ray lets go of them a moment after the last reference is gone."""
    from ray._private.internal_api import node_stats

    return sum(
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats.num_local_objects
        for node in ray.nodes()
        if node["Alive"]
    )


def falls_to(number: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while objects() > number and time.monotonic() < deadline:
        time.sleep(0.1)
    return objects() <= number


def free() -> dict[str, float]:
    """What nobody has reserved, once Ray knows that a run is over."""
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}


class Store(FederationCallback):
    """Looks into the object store after each round."""

    def __init__(self) -> None:
        self.emptied: list[bool] = []

    def on_round_end(self, run: RunView) -> None:
        """But for the spec."""
        self.emptied.append(falls_to(1))


@pytest.mark.parametrize("name", ["FedAvg", "FedHM", "PF2LoRA", "FedDecomp", "FedDF"])
def test_numbers_are_those_of_one_process(name: str, cluster: None) -> None:
    store = Store()
    assert_same(fit(Ray(), name, callbacks=[store], store_limit_mb=1e-6), fit(InProcess(threads=1), name))
    assert store.emptied == [True, True]
    assert falls_to(0)
    assert free() == {"CPU": 2, "GPU": 1}


def test_private_adapters_of_five_networks_too(cluster: None) -> None:
    """Updates of megabytes, which do not fit into a message."""
    networks, store = [CNN1, CNN2, CNN3, CNN4, CNN5], Store()
    new = partial(PFedLoRA, networks, optimizer=momentum)
    data = partial(Digits, num_clients=5, image_size=32)
    options = {"rounds": 1, "participation": 1.0, "evaluate_every": 0}
    here = fit(InProcess(threads=1), new(), data(), **options)
    there = fit(Ray(), new(), data(), callbacks=[store], **options)
    assert_same(there, here)
    assert len(private_states(there)) == 5
    assert store.emptied == [True]


def test_batches_go_on_where_a_client_s_last_turn_stopped(cluster: None, tmp_path: Path) -> None:
    def run(engine: Engine, folder: Path, rounds: int, ckpt_path: str | None = None) -> None:
        federation = new_federation(rounds, engine=engine, run_dir=folder, participation=0.7, evaluate_every=1)
        data = new_data(3, 120, batch_size=8, continue_epochs=True, single_example="keep")
        federation.fit(FedAvg(Net, CLASSES, optimizer=sgd, steps=3), data, ckpt_path)

    run(InProcess(threads=1), tmp_path / "here", 4)
    run(Ray(), tmp_path / "there", 2)
    run(Ray(), tmp_path / "there", 4, "last")
    assert_same_end(tmp_path / "here" / "version_0", tmp_path / "there" / "version_0")


SCRIPT = """
import os
import torch
from lightning_fed.methods import FedAvg

class Noting(FedAvg):
    notes = ""

    def on_fit_start(self):
        super().on_fit_start()
        with open(self.notes, "a") as file:
            file.write(f"{os.getpid()} {torch.get_num_threads()} gpu={os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
"""
"""Defined as in a script or a notebook, which no worker can import; it writes down what process its turns are in."""


def noted(engine: Engine) -> tuple[int, set[str]]:
    """How many processes there were, and what else there is to be said of them."""
    exec(SCRIPT, own := {"__name__": "__main__"})
    own["Noting"].notes = str(Path("notes").absolute())
    fit(engine, own["Noting"](Net, 4), new_data(4), participation=1.0)
    lines = [line.split(" ", 1) for line in Path("notes").read_text().splitlines()]
    return len({pid for pid, _ in lines}), {rest for _, rest in lines}


def test_a_worker_has_its_threads_and_no_gpu_that_it_was_not_given(cluster: None) -> None:
    assert noted(Ray(workers=2, threads=2)) == (2, {"2 gpu="})


def test_workers_share_a_gpu(cluster: None) -> None:
    assert noted(Ray(gpus_per_worker=0.5)) == (2, {"1 gpu=0"})


def test_there_are_as_many_workers_as_there_is_room_for(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    processes, _ = noted(Ray(workers=3, gpus_per_worker=0.75))
    assert processes == 1
    assert "Ray has resources for 1 of 3 workers." in capsys.readouterr().out


def test_no_room_is_one_line(cluster: None) -> None:
    with pytest.raises(
        FederationError, match=r"^Ray has had no resources for a worker \(1 CPU and 2 GPU each\) for 1 s: its machines"
    ):
        fit(Ray(gpus_per_worker=2, wait=1))
    assert free() == {"CPU": 2, "GPU": 1}


@pytest.mark.parametrize("stage", ["fit", "evaluate"])
def test_a_worker_that_is_killed_is_replaced(stage: str, cluster: None, capfd: pytest.CaptureFixture[str]) -> None:
    federation = new_federation(2, engine=Ray(), evaluate_every=1)
    federation.fit(dying(stage, 1, 1), new_data(3))
    assert Path("notes").read_bytes() == b"x"
    assert_undisturbed(federation)


def test_a_worker_that_stands_still_is_replaced_after_the_timeout(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    federation = new_federation(2, engine=Ray(turn_timeout=15), evaluate_every=1)
    federation.fit(dying("fit", 1, 1, of=signal.SIGSTOP), new_data(3))
    said = r"Round 1: the turn of client 1 \(fit\) has taken 1[5-9][\d.]* s in a worker on [\d.]+.* The worker counts as dead\."
    assert re.search(said, capsys.readouterr().out)
    assert_undisturbed(federation)
    assert free() == {"CPU": 2, "GPU": 1}


def test_two_deaths_end_the_run_with_client_round_machine_and_remedy(cluster: None) -> None:
    with pytest.raises(
        FederationError,
        match=r"^Two workers that trained client 2 in round 1 died, the last one on [\d.]+ \(SYSTEM_ERROR\): "
        r"set federation.engine.init_args.cpus_per_worker higher, so that fewer workers share a machine, or use",
    ):
        new_federation(3, engine=Ray(), run_dir="runs").fit(dying("fit", 2, 2), new_data(3))
    assert Path("notes").read_bytes() == b"xx"
    assert free() == {"CPU": 2, "GPU": 1}


def test_an_exception_arrives_with_traceback_and_client(cluster: None) -> None:
    with pytest.raises(WorkerError) as error:
        fit(Ray(), Failing(Net, 4), new_data(3), participation=1.0)
    assert "ZeroDivisionError in a worker process: division by zero" in str(error.value)
    assert "1 / 0" in str(error.value)
    assert "In this turn: Client 1 in round 1, phase local." in str(error.value)


def test_other_versions_are_one_line_that_names_them(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lightning_fed.__version__
    monkeypatch.setattr("lightning_fed.__version__", "99.0")
    with pytest.raises(FederationError, match=rf"^Ray's machine [\d.]+ has lightning-fed {here} instead of 99.0: install there"):
        fit(Ray())
    assert falls_to(0)


# --------------------------------------------------------------------------------------------------- clusters of their own


@pytest.fixture
def no_cluster() -> None:
    """This process is connected to none."""
    ray.shutdown()


def test_an_address_that_does_not_answer_is_one_line_in_time(no_cluster: None) -> None:
    """Something listens there, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(FederationError, match=rf"^Ray at {address} has not answered within 3 s: is it running there"):
            fit(Ray(address, wait=3))
        assert time.monotonic() - start < 20


def test_an_address_that_is_none_is_one_line(no_cluster: None) -> None:
    with pytest.raises(FederationError, match=r"^Ray at over-there cannot be used: .*over-there"):
        fit(Ray("over-there"))


CONFIG = """
data: {class_path: Digits, init_args: {num_clients: 4, image_size: 32}}
model: {class_path: FedAvg, init_args: {backbone: CNN5}}
federation: {rounds: 500, evaluate_every: 0, progress: false, logger: false, run_dir: runs}
trainer: {accelerator: cpu}
"""


def command(*options: str) -> list[str]:
    Path("config.yaml").write_text(CONFIG)
    return [sys.executable, "-m", "lightning_fed", "fit", "--config", "config.yaml", "--federation.engine", "Ray", *options]


def environment() -> dict[str, str]:
    root = str(Path(lightning_fed.__file__).parents[1])
    return os.environ | {"PYTHONPATH": root, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def until(reached: Any, process: subprocess.Popen[bytes], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert process.poll() is None, Path("output").read_text()
        assert time.monotonic() < deadline, Path("output").read_text()
        time.sleep(0.05)


def has_round(number: int) -> bool:
    return Path(f"runs/version_0/checkpoints/round_{number:06d}").exists()


def newest_round() -> int:
    return max(int(path.name[-6:]) for path in Path("runs/version_0/checkpoints").glob("round_*"))


def actors(leader: int) -> list[int]:
    """Workers in the session that a process leads."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(leader)}
    return [pid for pid, name in names.items() if name.startswith(b"ray::Actor")]


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "lightning-fed: interrupted. Continue with: lightning-fed fit "),
        (signal.SIGTERM, 143, "lightning-fed: terminated (SIGTERM). Continue with: lightning-fed fit "),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_a_stopped_command_leaves_nothing_but_its_checkpoints(number: int, code: int, line: str) -> None:
    """A cluster of its own ends with it."""
    options = ["--federation.engine.init_args.workers", "2"]
    with Path("output").open("wb") as output:
        process = subprocess.Popen(command(*options), stdout=output, stderr=output, env=environment(), start_new_session=True)
        until(lambda: has_round(2), process)
        assert len(actors(process.pid)) == 2
        os.kill(process.pid, number)
        assert process.wait(60) == code
    assert gone_within(process.pid, 120)  # Ray's own processes look for each other every so often
    said = Path("output").read_text().splitlines()
    assert [one.startswith(line) and one.endswith(" --ckpt_path last") for one in said] == [True] * bool(line)
    newest = newest_round()
    for run_dir in ("runs", "whole"):
        own = ["--federation.rounds", str(newest + 1), "--federation.run_dir", run_dir, "--ckpt_path", "last"]
        main(["fit", "--config", "config.yaml", *own])
    assert_same_end(Path("runs/version_0"), Path("whole/version_0"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize(
    ("of_ray", "said"),
    [
        (b"raylet", r"Ray's process on this machine \(raylet\) has ended, perhaps for lack of memory\."),
        (b"gcs_server", r"The head of Ray's cluster \(GCS, [\d.]+:\d+\) has not answered for 30 s\."),
    ],
)
def test_a_cluster_that_is_lost_is_one_line(of_ray: bytes, said: str) -> None:
    """Ray's own processes are killed."""
    with Path("output").open("wb") as output:
        process = subprocess.Popen(command(), stdout=output, stderr=output, env=environment(), start_new_session=True)
        until(lambda: has_round(2), process)
        programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in family(process.pid)}
        (killed,) = [pid for pid, program in programs.items() if program.endswith(b"/" + of_ray)]
        os.kill(killed, signal.SIGKILL)
        assert process.wait(90) == 2, Path("output").read_text()
    assert re.search(rf"error: {said} The last checkpoint .* continue with --ckpt_path last\.$", Path("output").read_text(), re.M)
    assert gone_within(process.pid, 120)


class Node:
    """A machine of a cluster, as ``ray start`` makes it, on this one.

    Args:
        options: of ``ray start``.
    """

    def __init__(self, *options: str) -> None:
        self.log = Path(f"node{len(list(Path().glob('node*')))}")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus", "1", "--block"]
        command += ["--disable-usage-stats", "--object-store-memory", "100000000"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), start_new_session=True)

    def said(self, text: str, seconds: float = 180) -> None:
        """Wait until it has said something."""
        until(lambda: text in self.log.read_text(), self.process, seconds)

    def leave(self, number: int) -> None:
        """End it with a signal."""
        os.killpg(self.process.pid, number)
        self.process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_machine_leaves_in_the_middle_of_a_run(number: int) -> None:
    """Two machines with a worker each; the run ends with the numbers of one process."""
    port, folder = free_port(), tempfile.mkdtemp(prefix="ray")  # a short path: sockets lie in it
    head = Node("--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", folder)
    nodes = [head]
    try:
        head.said("Ray runtime started")
        nodes.append(Node("--address", f"127.0.0.1:{port}"))
        nodes[1].said("Ray runtime started")
        with Path("output").open("wb") as output:
            options = ["--federation.engine.init_args.address", f"127.0.0.1:{port}", "--federation.rounds", "12"]
            process = subprocess.Popen(command(*options), stdout=output, stderr=output, env=environment(), start_new_session=True)
            until(lambda: has_round(2), process)
            assert [len(actors(node.process.pid)) for node in nodes] == [1, 1]
            nodes[1].leave(number)
            left_after = newest_round()
            assert process.wait(300) == 0, Path("output").read_text()
    finally:
        for node in reversed(nodes):
            if node.process.poll() is None:
                node.leave(signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)
    assert left_after < 12
    assert not re.search("Traceback|raylet", Path("output").read_text())
    main(["fit", "--config", "config.yaml", "--federation.rounds", "12", "--federation.run_dir", "whole"])
    assert_same_end(Path("runs/version_0"), Path("whole/version_0"))
