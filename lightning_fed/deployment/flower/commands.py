"""Flower's commands, as processes that end when this one does."""

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
"""Variables that disable Flower's telemetry."""

SUPERNODE_PORT = 9094
"""Flower's default, which only one SuperNode per machine can use."""

GRACE = 10.0
"""Seconds that Flower's processes get to end."""

CONNECTION = "study"
"""Name of the SuperLink in Flower's configuration."""


def need_flower() -> None:
    """Raises :class:`FederationError` if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise FederationError("Sites are reached through Flower, which is not installed: pip install 'lightning-fed[flower]'.")


def superlink(certificates: Path, host: str, port: int) -> list[str]:
    """The command of the SuperLink, which only accepts nodes with registered keys."""
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(certificates / "ca.crt")),
        *("--ssl-certfile", str(certificates / "server.pem")),
        *("--ssl-keyfile", str(certificates / "server.key")),
        *("--host", host, "--port", str(port)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def register(key: Path, client: int) -> list[str]:
    """The command that registers the key of a client's site."""
    return ["flwr", "supernode", "register", str(key), CONNECTION, "--name", f"client-{client}"]


def run_app(folder: Path) -> list[str]:
    """The command of the app in a folder that :func:`write_app` wrote."""
    return ["flwr", "run", str(folder), CONNECTION]


def supernode(server: str, key: Path, root_certificates: Path, path: Path, port: int) -> list[str]:
    """The command of a site's SuperNode.

    Args:
        server: address of the SuperLink, or of the proxy in front of it.
        key: the site's private key.
        root_certificates: certificate that signed the server's certificate.
        path: path of the worker's socket.
        port: port for its ClientApps, on this machine only.
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
    """Write Flower's configuration, which names the SuperLink."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]"]
    lines += [f'address = "{address}"', f'root-certificates = "{certificates / "ca.crt"}"', ""]
    (folder / "config.toml").write_text("\n".join(lines))


def write_app(folder: Path, path: Path) -> None:
    """Write the app for Flower: it names code that is installed at the server and at the sites, and contains none. ``path`` is that
    of the socket of ``lightning-fed serve``.
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
    """The environment of this process with Flower's programs on the path and, if given, Flower's home."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **SILENT, "PATH": path} | ({} if home is None else {"FLWR_HOME": str(home)})


def shell_line(command: Sequence[str], home: Path | None = None) -> str:
    """A command as a shell command."""
    settings = SILENT | ({} if home is None else {"FLWR_HOME": str(home)})
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(command)])


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int) -> bool:
    """Whether a process listens at a port."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def refuse_taken(host: str, port: int) -> None:
    """Raises :class:`FederationError` if a process listens at a port, such as the SuperLink of another study."""
    if answers(host, port):
        raise FederationError(f"Another process answers at {host}:{port}, perhaps another study: end it, or give another --port.")


def run_command(command: Sequence[str], home: Path) -> None:
    """Print a command and wait until it has ended. Raises :class:`FederationError` with its output if it fails."""
    logger.info(shell_line(command, home))
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise FederationError(f"{command[0]} failed (exit code {done.returncode}): {words[-500:]}")


class Child:
    """A Flower command that runs until it is stopped, or until this process ends in any way."""

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
        """The exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Stop it, with all processes that it has started."""
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
    """Run a command in its own process group until it ends, or until the other end of standard input is closed; then the whole
    group is ended. Returns the exit code.
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
    while _signal(process.pid, signal.SIGTERM) and time.monotonic() < ends:  # remaining processes of the group
        time.sleep(0.1)
    _signal(process.pid, signal.SIGKILL)
    return code


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; returns whether it exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(leash(sys.argv[1:]))
