"""A channel between two processes of one machine, through a socket in a folder: access to the folder is access to the channel."""

import socket
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path

from lightning_fed.errors import FederationError

LONGEST = 100
"""Maximum number of characters of a socket's path; systems allow little more."""


class Listener:
    """A socket that another process connects to.

    Args:
        path: path of the socket. A socket there that no process listens at, because it was killed, is replaced.
        mode: permissions of the socket for users that can reach the folder.

    Raises:
        FederationError: if the path is too long, if something else than such a socket is there, or if it cannot be used.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        if len(str(path)) > LONGEST:
            raise FederationError(f"{path} is too long for a socket: give a path of at most {LONGEST} characters.")
        self.path = path
        try:
            _clear(path)
            self._socket = _listening(path, mode)
        except OSError as error:
            raise FederationError(f"The socket {path} cannot be made ({error}): give another one.") from error

    def accept(self, seconds: float) -> Connection | None:
        """The next connection; None if there is none within ``seconds``."""
        self._socket.settimeout(seconds)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.setblocking(True)
        return Connection(connection.detach())

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Remove a socket that no process listens at; anything else is refused."""
    if not path.is_socket():
        if path.exists() or path.is_symlink():
            raise FederationError(f"{path} exists and is not a socket: give an unused path for the socket.")
        return
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise FederationError(
                f"Another process answers at the socket {path}, perhaps another site: end it, or give another path."
            )


def _listening(path: Path, mode: int) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(str(path))
        path.chmod(mode)
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def connect(path: str, patience: float = 60.0) -> Connection:
    """A connection to the process behind a socket, which may be about to start.

    Raises:
        OSError: if there is no such process.
    """
    ends = time.monotonic() + patience
    while True:
        try:
            return Client(path, "AF_UNIX")
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.5)
