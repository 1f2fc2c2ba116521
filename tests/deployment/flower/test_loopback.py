"""The real Flower on this machine: a SuperLink, SuperNodes, certificates and keys. Run with .ci/flower."""

import datetime
import importlib.util
import ipaddress
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from tiny import final_checkpoint, same
from tiny_stations import station

from lightning_fed.__main__ import main
from lightning_fed.deployment.flower import commands
from lightning_fed.deployment.site import SiteStore

pytestmark = [pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs Flower")]

CONFIG = """
seed_everything: 0
data: {class_path: Digits, init_args: {num_clients: 2, image_size: 8}}
model: {class_path: METHOD, init_args: {backbone: {class_path: MLP, init_args: {inputs: 192, hidden: [16]}}}}
federation: {rounds: 3, run_dir: runs, evaluate_every: 0}
trainer: {accelerator: cpu}
"""


def write_keys(folder: Path, *names: str) -> None:
    """A key pair per name, as ssh-keygen makes them."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        (folder / name).write_bytes(private)
        (folder / name).chmod(0o600)
        public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
        (folder / f"{name}.pub").write_bytes(public)


def write_certificates(folder: Path) -> None:
    """Of an authority of one's own, for this machine."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, key: Any, issuer: str, by: Any, *extensions: Any) -> bytes:
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
            key.public_key(),
            x509.random_serial_number(),
            now - datetime.timedelta(days=1),
            now + datetime.timedelta(days=1),
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(by, hashes.SHA256()).public_bytes(form.Encoding.PEM)

    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "ca.crt").write_bytes(certificate("Authority", authority, "Authority", authority, constraints))
    (folder / "server.pem").write_bytes(certificate("localhost", server, "Authority", authority, names))
    private = server.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (folder / "server.key").write_bytes(private)


class Stations:
    """The sites, each a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tiny_stations"])
        self.processes: dict[int, ForkServerProcess] = {}

    def start(self, client: int, *options: str) -> None:
        args = ["join", "--config", "study.yaml", "--server", f"localhost:{self.port}", "--client", str(client)]
        args += ["--key", f"keys/{client}", "--root_certificates", "certificates/ca.crt", "--partitioned", "--threads=1", *options]
        process = self._context.Process(target=station, args=(args, str(Path.cwd()), f"join-{client}.out"))
        process.start()
        self.processes[client] = process

    def end(self, client: int, number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(client)
        assert process.pid is not None
        assert process.is_alive(), Path(f"join-{client}.out").read_text()
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode is not None
        return process.exitcode

    def end_all(self) -> None:
        for client in list(self.processes):
            assert self.end(client) == 128 + signal.SIGTERM


@pytest.fixture
def stations() -> Iterator[Stations]:
    write_certificates(Path("certificates"))
    write_keys(Path("keys"), "0", "1", "stranger")
    Path("sites").mkdir()
    for client in (0, 1):
        (Path("sites") / f"{client}.pub").write_bytes((Path("keys") / f"{client}.pub").read_bytes())
    stations = Stations(commands.free_port())
    yield stations
    for process in stations.processes.values():
        process.terminate()
        process.join(60)


def serve(stations: Stations, *options: str) -> None:
    args = ["serve", "--config", "study.yaml", "--sites", "sites", "--certificates", "certificates", "--port", str(stations.port)]
    main([*args, *options])


def here(method: str) -> Path:
    """The run in one process."""
    engine = ["--federation.engine", "InProcess", "--federation.engine.init_args.threads", "1"]
    main(["fit", "--config", "study.yaml", "--federation.run_dir", f"here-{method}", *engine])
    return Path(f"here-{method}/version_0")


def write_study(method: str) -> None:
    Path("study.yaml").write_text(CONFIG.replace("METHOD", method))


def test_a_study_with_private_networks(stations: Stations) -> None:
    """A stranger is refused; the server is stopped after two rounds and goes on; a site is killed meanwhile and comes back."""
    write_study("PFedLoRA")
    for client in (0, 1):
        stations.start(client)
    stranger = commands.supernode(
        f"localhost:{stations.port}", Path("keys/stranger"), Path("certificates/ca.crt"), Path("none.sock"), commands.free_port()
    )
    path = ["sh", "-c", f"sleep 20; exec {' '.join(stranger[:-1])} 'socket=\"none.sock\"'"]
    child = commands.Child(path, Path("stranger.log"), Path("stranger"))
    serve(stations, "--federation.rounds", "2")
    assert child.exit_code is not None, Path("stranger.log").read_text()
    assert "Failed to activate SuperNode" in Path("stranger.log").read_text()
    child.stop()

    assert stations.end(1, signal.SIGKILL) == -signal.SIGKILL
    stations.start(1)
    serve(stations, "--ckpt_path", "last")
    stations.end_all()

    together = here("PFedLoRA")
    _, _, rows, server, clients = final_checkpoint(together)
    _, _, ours, apart, stamps = final_checkpoint(Path("runs/version_0"))
    assert same(server, apart)
    for row, theirs in zip(ours, rows, strict=True):
        # the last of the first two rounds was measured because it was the last
        assert {name: value for name, value in row.items() if name.startswith(("train/", "after/", "traffic/"))}.items() >= {
            name: value for name, value in theirs.items() if name.startswith(("train/", "after/", "traffic/"))
        }.items()
    [run] = {bytes(stamp["run"].tolist()).hex() for client, stamp in stamps.items() if client < 0}
    for client, state in clients.items():
        assert same(SiteStore(Path(f"site-{client}/states")).get(run, 3), state)
        assert set(stamps[client]) == {"round"}
    assert not list(Path("runs").rglob("*.sock"))


def test_a_site_with_another_model_is_refused(stations: Stations, capsys: pytest.CaptureFixture[str]) -> None:
    """And taken when it has the right one."""
    write_study("FedAvg")
    stations.start(0)
    stations.start(1, "--model.init_args.epochs", "2")
    with pytest.raises(SystemExit):
        serve(stations)
    assert "The site of client 1 cannot take part: this is another study: model.epochs is 2 at the site and 1 at the server" in (
        capsys.readouterr().err
    )
    assert not list(Path("runs").glob("version_*"))
    assert stations.end(1) == 128 + signal.SIGTERM
    stations.start(1)
    serve(stations)
    stations.end_all()
    _, _, _, server, _ = final_checkpoint(here("FedAvg"))
    _, _, _, apart, _ = final_checkpoint(Path("runs/version_0"))
    assert same(server, apart)
    deadline = time.monotonic() + 30
    while (left := flowers()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left  # nothing of Flower's stays behind


def flowers() -> list[str]:
    """Living processes of Flower that were started here."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command, state = (folder / "cmdline").read_text(), (folder / "stat").read_text().rpartition(")")[2].split()[0]
                here = (folder / "cwd").readlink() == Path.cwd()
            except OSError:  # it has ended meanwhile
                continue
            if state != "Z" and here and "flower-" in command:
                found.append(command)
    return found
