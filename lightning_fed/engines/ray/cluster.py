"""The connection of this process to a Ray cluster."""

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
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # older versions warn that this will be the default; workers handle it
}
"""Environment variables that stop Ray from sending usage reports and printing warnings."""

PATIENCE = 30.0
"""Seconds in which the cluster's head may restart. Ray allows a minute, and then ends this process."""

PROBE = """
import logging, sys
import ray

try:
    ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


def the_package() -> ModuleType:
    """Ray, which is an optional dependency.

    Raises:
        FederationError: if it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise FederationError(
            f'The engine Ray needs the package ray, which cannot be imported ({error}): pip install "lightning-fed[ray]".'
        ) from error
    return ray


class Cluster:
    """A connection to a cluster. A process that is already connected keeps its connection; otherwise closing it restores the
    environment.

    Args:
        address: address of the cluster. None: a new one on this machine only.
        wait: seconds to wait for an answer.
        log_to_driver: whether to print here what Ray and the workers print.

    Attributes:
        is_gone: whether the cluster is gone and must not be used.

    Raises:
        FederationError: if the cluster does not answer or cannot be used.
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
        self._ray._private.worker._worker_logs_enabled = log_to_driver  # otherwise Ray prints a page about each death
        self._watch()

    def check(self) -> None:
        """Check that the cluster is still there. If it is not, Ray ends this process on the next request, silently or with its own
        message.

        Raises:
            FederationError: if it is gone.
        """
        if self._raylet is not None and select.select([self._raylet], [], [], 0)[0]:  # readable only once it has ended
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
        """Close the connection, if this object opened it."""
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
    """Ray installs its own SIGTERM handler when it connects. This restores the earlier handler, and calls it for a signal that came
    meanwhile.
    """
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
    """Check that a cluster answers, in a process that can be killed: Ray itself retries for many minutes."""
    if "://" in address:
        raise FederationError(
            f"federation.engine.init_args.address is {address}: the engine Ray runs on a machine of the cluster. Start the run "
            'there, with the address "auto", or submit it with `ray job submit`.'
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
