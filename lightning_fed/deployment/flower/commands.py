"""Flower's commands: what they are, and processes that end when this one does."""

import contextlib
import importlib.util
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.errors import FederationError

logger = logging.getLogger(__name__)

SILENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""What keeps Flower from calling home."""

SUPERNODE_PORT = 9094
"""Flower's own choice, of which one SuperNode per machine can make use."""

GRACE = 10.0
"""Seconds that Flower's processes have to end."""

CONNECTION = "study"
"""What the SuperLink is called in Flower's configuration."""


def need_flower() -> None:
    """Raises :class:`FederationError` where Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise FederationError("Sites are reached through Flower, which is not installed: pip install 'lightning-fed[flower]'.")


def superlink(certificates: Path, host: str, port: int) -> list[str]:
    """What starts the SuperLink, for nodes with registered keys alone."""
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(certificates / "ca.crt")),
        *("--ssl-certfile", str(certificates / "server.pem")),
        *("--ssl-keyfile", str(certificates / "server.key")),
        *("--host", host, "--port", str(port)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def register(key: Path, client: int) -> list[str]:
    """What registers the key of a client's site."""
    return ["flwr", "supernode", "register", str(key), CONNECTION, "--name", f"client-{client}"]


def run_app(folder: Path) -> list[str]:
    """What starts the app, in a folder that :func:`write_app` wrote."""
    return ["flwr", "run", str(folder), CONNECTION]


def supernode(server: str, key: Path, root_certificates: Path, path: Path, port: int) -> list[str]:
    """What starts a site's SuperNode.

    Args:
        server: address of the SuperLink, or of the proxy in front of it.
        key: the site's private key.
        root_certificates: of whom has signed the server's certificate.
        path: of the socket behind which the worker is.
        port: on which it speaks with the ClientApps that it starts, on this machine alone.
    """
    return [
        "flower-supernode",
        *("--superlink", server),
        *("--root-certificates", str(root_certificates)),
        *("--auth-supernode-private-key", str(key)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--node-config", f'socket="{path}"'),
    ]


def write_home(folder: Path, address: str, certificates: Path) -> None:
    """Flower's configuration, which names the SuperLink."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]"]
    lines += [f'address = "{address}"', f'root-certificates = "{certificates / "ca.crt"}"', ""]
    (folder / "config.toml").write_text("\n".join(lines))


def write_app(folder: Path, path: Path) -> None:
    """The app that Flower is given: it names what is installed at the server and at the sites, and holds no code.

    Args:
        folder: of the app.
        path: of the socket behind which ``lightning-fed serve`` is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "LICENSE").write_text("Apache-2.0\n")
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "lightning-fed-relay"
version = "1.0.0"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41,<2"]

[tool.flwr.app]
publisher = "lightning-fed"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "lightning_fed.deployment.flower.apps:server"
clientapp = "lightning_fed.deployment.flower.apps:client"

[tool.flwr.app.config]
socket = "{path}"
"""
    )


def environment(home: Path | None = None) -> dict[str, str]:
    """This process's, with Flower's programs on the path; and with its home there."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **SILENT, "PATH": path} | ({} if home is None else {"FLWR_HOME": str(home)})


def shell_line(command: Sequence[str], home: Path | None = None) -> str:
    """A command as one can type it."""
    settings = SILENT | ({} if home is None else {"FLWR_HOME": str(home)})
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(command)])


def free_port() -> int:
    """A port of this machine that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int) -> bool:
    """Whether somebody listens at a port."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def refuse_taken(host: str, port: int) -> None:
    """Raises :class:`FederationError` if somebody listens at a port, such as the SuperLink of another study."""
    if answers(host, port):
        raise FederationError(f"Something answers at {host}:{port} already, another study perhaps: end it, or give another --port.")


def run_command(command: Sequence[str], home: Path) -> None:
    """Print a command, and wait until it has done its work. Raises :class:`FederationError` with what it says, if it fails."""
    logger.info(shell_line(command, home))
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise FederationError(f"{command[0]} failed (exit code {done.returncode}): {words[-500:]}")


class Child:
    """A command of Flower's that runs until it is ended, or until this process is, however that ends."""

    def __init__(self, command: Sequence[str], log: Path, home: Path | None = None) -> None:
        self.command, self.log, self.home = command, log, home
        logger.info(f"{shell_line(command, home)}  # what it prints is in {log}")
        leash = [sys.executable, "-m", __name__, *command]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                leash,
                env=environment(home),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End it, with all that it has started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2 * GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def wait_for_port(child: Child, host: str, port: int, seconds: float) -> None:
    """Wait until a server answers. Raises :class:`FederationError` if it ends, or takes longer."""
    ends = time.monotonic() + seconds
    while True:
        if child.exit_code is not None:
            raise FederationError(f"{child.command[0]} ended with exit code {child.exit_code}: {child.log} says why.")
        if answers(host, port):
            return
        if time.monotonic() > ends:
            raise FederationError(f"{child.command[0]} did not answer within {seconds:g} seconds: see {child.log}.")
        time.sleep(0.2)


def leash(command: Sequence[str]) -> int:
    """Run a command in a group of its own until it ends, or until nobody holds the other end of standard input; with it goes the
    whole group. Returns its exit code.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        os.read(0, 1)  # nothing is ever written; sys.stdin would hold a lock when the interpreter ends
        _signal(process.pid, signal.SIGTERM)
        time.sleep(GRACE)
        _signal(process.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    code = process.wait()
    ends = time.monotonic() + 2
    while _signal(process.pid, signal.SIGTERM) and time.monotonic() < ends:  # what it has started and left
        time.sleep(0.1)
    _signal(process.pid, signal.SIGKILL)
    return code


def _signal(group: int, number: int) -> bool:
    """Whether there is anybody to be told."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(leash(sys.argv[1:]))
