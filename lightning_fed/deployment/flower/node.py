"""A site's side of Flower: its SuperNode, and the socket through which messages arrive."""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fed.deployment.flower import commands
from lightning_fed.deployment.flower.channel import Listener

if TYPE_CHECKING:
    from lightning_fed.deployment.site import Site

log = logging.getLogger(__name__)

RETURN = 10.0
"""Seconds until Flower's process is restarted. The server accepts a node that ended without notice again within a minute."""


class SuperNode:
    """Flower's process at a site, which is restarted when it ends."""

    def __init__(self, command: Sequence[str], folder: Path, by_hand: bool) -> None:
        self.command = command
        self.folder = folder
        self._child: commands.Child | None = None
        self._again = 0.0  # time from which it may be started
        if by_hand:
            log.info(f"{commands.shell_line(self.command)}  # is for another user to run")
            self._again = float("inf")

    def see_to(self) -> None:
        """Start it, if it is not running."""
        if self._child is not None and self._child.exit_code is not None:
            log.error(
                f"Flower's process ended with exit code {self._child.exit_code}: {self._child.log} says why. It is started again "
                f"in {RETURN:g} seconds."
            )
            self._child.stop()
            self._child, self._again = None, time.monotonic() + RETURN
        if self._child is None and time.monotonic() >= self._again:
            self._child = commands.Child(self.command, self.folder / "supernode.log", self.folder / "flower")

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()


def answer_all(site: "Site", command: Callable[[Path], Sequence[str]], folder: Path, path: Path | None, by_hand: bool) -> None:
    """Answer messages until the process ends.

    Args:
        site: the site that answers.
        command: returns the command of the SuperNode, given the path of this process's socket.
        folder: folder for Flower's log and files.
        path: path of the socket, which the group of this process may use. None: in a folder that no other user can open.
        by_hand: whether another user starts the SuperNode.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_fed_") as rooms:
        listener = Listener(path.absolute(), 0o660) if path else Listener(Path(rooms) / "site.sock")
        node = SuperNode(command(listener.path), folder, by_hand)
        try:
            while True:
                node.see_to()
                if (connection := listener.accept(1.0)) is None:
                    continue
                with connection:
                    try:
                        connection.send_bytes(site.answer(connection.recv_bytes()))
                    except (EOFError, OSError) as error:
                        log.error(f"Flower's process has gone in the middle of a message ({error}).")
        finally:
            node.stop()
            listener.close()
