"""A site's side of Flower, with other commands in its place."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fed.deployment.flower.channel import Listener, connect
from lightning_fed.deployment.flower.node import answer_all
from lightning_fed.errors import FederationError

pytestmark = pytest.mark.usefixtures("lines")


class EnoughError(Exception):
    """Ends a site."""


class Echo:
    """A site that repeats what it hears, and ends when it is told to."""

    def answer(self, message: bytes) -> bytes:
        if message == b"end":
            raise EnoughError
        return b"you said " + message


def started(site: Echo, command: list[str], path: Path | None, by_hand: bool = False) -> tuple[threading.Thread, list[Path]]:
    """Answers in a thread; the paths with which the command is made."""
    made: list[Path] = []

    def supernode(path: Path) -> list[str]:
        made.append(path)
        return command

    def answer() -> None:
        with pytest.raises(EnoughError):
            answer_all(site, supernode, Path(), path, by_hand)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread, made


def until(true: Callable[[], bool]) -> None:
    for _ in range(1200):
        if true():
            return
        threading.Event().wait(0.05)
    raise AssertionError


def say(path: Path, message: bytes) -> bytes:
    with connect(str(path)) as site:
        site.send_bytes(message)
        return site.recv_bytes()


def test_messages_are_answered_and_what_ends_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_fed.deployment.flower.node.RETURN", 0.1)
    thread, made = started(Echo(), ["sh", "-c", "echo started >> starts; exit 5"], None)
    until(lambda: bool(made) and made[0].exists())
    [path] = made
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with connect(str(path)):
        pass  # somebody who is killed before he says anything
    assert say(path, b"hello") == b"you said hello"
    until(lambda: Path("starts").exists() and len(Path("starts").read_text().split()) >= 2)
    with pytest.raises(EOFError):
        say(path, b"end")
    thread.join(60)
    assert not path.parent.exists()
    told = capsys.readouterr()
    assert "Flower's process ended with exit code 5: supernode.log says why. It is started again in 0.1 seconds." in told.err
    assert "Flower's process has gone in the middle of a message" in told.err
    assert "sh -c 'echo started >> starts; exit 5'  # what it prints is in supernode.log" in told.out


def test_another_user_starts_the_supernode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who may use the socket by way of the group; its command is printed."""
    thread, _ = started(Echo(), ["sh", "-c", "touch started"], tmp_path / "relay.sock", by_hand=True)
    until((tmp_path / "relay.sock").exists)
    assert (tmp_path / "relay.sock").stat().st_mode & 0o777 == 0o660
    assert say(tmp_path / "relay.sock", b"hello") == b"you said hello"
    with pytest.raises(EOFError):
        say(tmp_path / "relay.sock", b"end")
    thread.join(60)
    assert not Path("started").exists()
    assert "sh -c 'touch started'  # is for another user to run" in capsys.readouterr().out


def test_a_socket_takes_the_place_of_nothing_but_a_socket_that_is_left_over(tmp_path: Path) -> None:
    """Of a process that was killed. A file stays, and so does the socket of somebody who listens."""
    path = tmp_path / "relay.sock"
    path.write_text("a thesis")
    with pytest.raises(FederationError, match=r"relay\.sock exists and is not a socket: give an unused path"):
        Listener(path)
    assert path.read_text() == "a thesis"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    listener = Listener(path)
    with pytest.raises(FederationError, match="Another process answers at the socket"):
        Listener(path)
    looked, entered, heard = listener.accept(5), connect(str(path)), listener.accept(5)
    assert looked is not None
    assert heard is not None
    with looked, entered, heard:
        entered.send_bytes(b"still here")
        assert heard.recv_bytes() == b"still here"
    listener.close()
    assert not path.exists()
