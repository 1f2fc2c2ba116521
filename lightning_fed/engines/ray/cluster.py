"""This process's connection to a Ray cluster."""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn

from lightning_fed.errors import FederationError, one_line

SILENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # older versions warn that this will be so; workers see to it themselves
}
"""What Ray does not do unless it is asked to: report what it is used for, and warn."""

PATIENCE = 30.0
"""Seconds in which the cluster's head may be started again. Ray gives it a minute, and then ends this process."""

PROBE = """
import logging, sys
import ray

try:
    ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


def the_package() -> ModuleType:
    """Ray, which need not be installed.

    Raises:
        FederationError: if it is not.
    """
    try:
        import ray
    except ImportError as error:
        raise FederationError(
            f'The engine Ray needs the package ray, which cannot be imported ({error}): pip install "lightning-fed[ray]".'
        ) from error
    return ray


class Cluster:
    """A connection. A process that is connected already keeps that connection; otherwise the environment is what it was when the
    connection is closed.

    Args:
        address: of the cluster; None: of one on this machine alone, which is started.
        wait: seconds to wait for an answer.
        log_to_driver: whether what Ray and the workers print is printed here.

    Attributes:
        is_gone: whether it is there no more: it must not be asked for anything.

    Raises:
        FederationError: if there is no answer, or none that is of use.
    """

    def __init__(self, address: str | None, wait: float, log_to_driver: bool) -> None:
        self._ray = the_package()
        self._ours = not self._ray.is_initialized()
        self._environment = dict(os.environ)
        self._raylet: socket.socket | None = None
        self._head, self._next_look = "", 0.0
        self.is_gone = False
        if not self._ours:
            self._watch()
            return
        if address is not None:
            _ask(address, wait)
        os.environ |= SILENT | self._environment
        options = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": log_to_driver}
        try:
            with _own_signals():
                self._ray.init(address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            self.close()
            raise FederationError(f"Ray cannot be started: {one_line(error)}") from error
        except BaseException:
            self.close()
            raise
        self._ray._private.worker._worker_logs_enabled = log_to_driver  # which it otherwise is of deaths, with a page about each
        self._watch()

    def check(self) -> None:
        """See that the cluster is still there. Where it is not, Ray ends this process as soon as it is asked for something, without
        a word or with words of its own.

        Raises:
            FederationError: if it is not.
        """
        if self._raylet is not None and select.select([self._raylet], [], [], 0)[0]:  # which says nothing while it lives
            self._refuse("Ray's process on this machine (raylet) has ended, perhaps for lack of memory")
        if time.monotonic() < self._next_look:
            return
        host, _, port = self._head.rpartition(":")
        since = time.monotonic()
        while not _answers(host, int(port)):
            if time.monotonic() - since > PATIENCE:
                self._refuse(f"The head of Ray's cluster (GCS, {self._head}) has not answered for {PATIENCE:g} s")
            time.sleep(0.5)
        self._next_look = time.monotonic() + 1

    def _refuse(self, why: str) -> NoReturn:
        self.is_gone = True
        raise FederationError(f"{why}. The last checkpoint is from before this round: continue with --ckpt_path last.")

    def _watch(self) -> None:
        self._head = self._ray.get_runtime_context().gcs_address
        node = self._ray._private.worker._global_node
        if node is not None and hasattr(socket, "AF_UNIX"):
            self._raylet = socket.socket(socket.AF_UNIX)
            self._raylet.connect(node.raylet_socket_name)

    def close(self) -> None:
        """End it, if it is ours."""
        if self._raylet is not None:
            self._raylet.close()
        if not self._ours:
            return
        self._ray.shutdown()
        self._ray._private.worker._worker_logs_enabled = True
        for name in {name for name in os.environ if name.startswith(("RAY_", "PYTHONBREAKPOINT"))} | SILENT.keys():
            if name in self._environment:
                os.environ[name] = self._environment[name]
            else:
                os.environ.pop(name, None)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it connects. Who had it before has it again, and hears of one that came meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    terminated = False
    try:
        yield
    except SystemExit as error:
        terminated = error.code == signal.SIGTERM
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
        if terminated:
            signal.raise_signal(signal.SIGTERM)


def _ask(address: str, wait: float) -> None:
    """Ask a cluster whether it is there, in a process that can be ended: Ray itself tries again and again, for many minutes."""
    if "://" in address:
        raise FederationError(
            f"federation.engine.init_args.address is {address}: the engine Ray runs on a machine of the cluster. Start the run "
            'there, with the address "auto", or send it there with `ray job submit`.'
        )
    try:
        subprocess.run(
            [sys.executable, "-c", PROBE, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=wait,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise FederationError(
            f"Ray at {address} has not answered within {wait:g} s: is it running there (ray start --head), is the port that of "
            "the cluster (6379, if no other was chosen), and can it be reached from here? federation.engine.init_args.wait waits "
            "longer."
        ) from None
    except subprocess.CalledProcessError as error:
        told = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise FederationError(f"Ray at {address} cannot be used: {told[-1]}") from None
