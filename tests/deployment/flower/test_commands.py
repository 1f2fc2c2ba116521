"""Flower's commands and the processes that they run in, without Flower."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_fed.deployment.flower import commands
from lightning_fed.deployment.flower.channel import Listener, connect
from lightning_fed.errors import FederationError

pytestmark = pytest.mark.usefixtures("lines")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def written(path: Path, lines: int = 1) -> list[int]:
    """The numbers that another process writes to a file."""
    for _ in range(600):
        if path.exists() and len(found := path.read_text().split()) == lines:
            return [int(number) for number in found]
        time.sleep(0.05)
    raise AssertionError(f"{path} has not got {lines} lines")


def gone(*pids: int) -> bool:
    for _ in range(200):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


FAMILY = "sleep 600 & echo $! > pids; echo $$ >> pids; wait"

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


@needs_proc
def test_a_child_goes_with_all_that_it_has_started() -> None:
    child = commands.Child(["sh", "-c", FAMILY], Path("log"))
    pids = written(Path("pids"), 2)
    assert child.exit_code is None
    child.stop()
    assert gone(*pids)


@needs_proc
def test_a_child_does_not_outlive_whoever_started_it() -> None:
    """However that ends."""
    program = (
        f"from lightning_fed.deployment.flower.commands import *; Child(['sh', '-c', {FAMILY!r}], Path('log')); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) as parent:
        pids = written(Path("pids"), 2)
        parent.send_signal(signal.SIGKILL)
    assert gone(*pids)


def test_a_child_that_ends_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    """What it was is printed before, in a form in which it can be typed."""
    child = commands.Child(["sh", "-c", "echo trouble; exit 7"], Path("log"), Path("home"))
    with pytest.raises(FederationError, match="sh ended with exit code 7: log says why"):
        commands.wait_for_port(child, "127.0.0.1", commands.free_port(), 60)
    assert Path("log").read_text() == "trouble\n"
    child.stop()
    expected = "FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=home sh -c 'echo trouble; exit 7'  # what it prints"
    assert capsys.readouterr().out.startswith(expected)


def test_a_command_that_fails_is_quoted() -> None:
    with pytest.raises(FederationError, match=r"^sh failed \(exit code 3\): no such thing$"):
        commands.run_command(["sh", "-c", "echo no such thing >&2; exit 3"], Path())
    commands.run_command(["sh", "-c", 'test "$FLWR_HOME" = here -a "$FLWR_TELEMETRY_ENABLED" = 0'], Path("here"))


def test_a_port_that_is_taken_is_named() -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(FederationError, match=f"Another process answers at 127.0.0.1:{port}"):
            commands.refuse_taken("127.0.0.1", port)
    commands.refuse_taken("127.0.0.1", port)


def test_what_flower_is_told_is_toml() -> None:
    import tomllib

    commands.write_home(Path("home"), "127.0.0.1:8000", Path("/certificates"))
    commands.write_app(Path("app"), Path("/tmp/serve.sock"))
    assert tomllib.loads(Path("home/config.toml").read_text())["superlink"] == {
        "default": "study",
        "study": {"address": "127.0.0.1:8000", "root-certificates": "/certificates/ca.crt"},
    }
    app = tomllib.loads(Path("app/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == {"socket": "/tmp/serve.sock"}
    for name in app["components"].values():  # which are there, and plain assignments, as Flower asks
        module, _, attribute = name.partition(":")
        source = Path(str(commands.__file__)).with_name("apps.py")
        assert module == "lightning_fed.deployment.flower.apps"
        assert f"\n{attribute} = " in source.read_text()
    assert {path.name for path in Path("app").iterdir()} == {"LICENSE", "pyproject.toml"}  # no code travels


# ----------------------------------------------------------------------------------------------------------------- the socket


def test_bytes_come_through_a_socket(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "listener")
    assert (listener.path.stat().st_mode & 0o777) == 0o600
    assert listener.accept(0.01) is None
    large, answers = os.urandom(1 << 20), []

    def visit() -> None:
        with connect(str(listener.path)) as inside:
            inside.send_bytes(large)
            answers.append(inside.recv_bytes())

    visitor = threading.Thread(target=visit)
    visitor.start()
    found = listener.accept(60)
    assert found is not None
    with found:
        assert found.recv_bytes() == large
        found.send_bytes(b"seen")
    visitor.join()
    assert answers == [b"seen"]
    listener.close()
    assert not listener.path.exists()
    with pytest.raises(OSError, match="No such file"):
        connect(str(listener.path), patience=0)


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="is too long for a socket: give a path of at most 100 characters"):
        Listener(tmp_path / ("x" * 100))
    with pytest.raises(FederationError, match="cannot be made"):
        Listener(Path("nowhere/listener"))


def test_who_waits_for_a_socket_comes_in_when_it_is_there(tmp_path: Path) -> None:
    """A worker that is started again is waited for."""
    path, seen = tmp_path / "listener", []
    visitor = threading.Thread(target=lambda: seen.append(connect(str(path), patience=60)))
    visitor.start()
    time.sleep(0.1)
    listener = Listener(path)
    found = listener.accept(60)
    visitor.join()
    assert found is not None
    for connection in (found, *seen):
        connection.close()
    listener.close()


def test_the_apps_and_what_they_need_import_nothing_that_learns() -> None:
    """A new process imports them for each message."""
    parts = "sys, lightning_fed.deployment.flower.channel, lightning_fed.deployment.flower.commands"
    code = f"import {parts}; print({{'torch', 'lightning'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
