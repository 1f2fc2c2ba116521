"""Locks on folders: only one process writes to a folder at a time."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_fed.errors import FederationError
from lightning_fed.system.locks import taken

log = logging.getLogger(__name__)

LOCK = ".lock"
PREFIX = "lightning_fed_states_"
PATIENCE = 6.0
"""Seconds to wait for a lock: processes that load data keep holding the lock of a killed parent until they notice, which they check
every 5 seconds."""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """A context in which this is the only process that writes to a run's folder. The operating system releases the lock with the
    process.

    Raises:
        FederationError: if another process is writing to the folder, or if it is not writable.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise FederationError(
            f"The folder of the run, {folder}, is not writable ({error.strerror}): make it writable, or start a new run "
            "without --ckpt_path."
        ) from error
    try:
        ends = time.monotonic() + PATIENCE
        while not _locked(descriptor, folder):
            if time.monotonic() > ends:
                raise FederationError(
                    f"Another process is writing to {folder}, and a run has one writer: wait until it ends, or start a new run "
                    "without --ckpt_path."
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, folder: Path) -> bool:
    try:
        return taken(descriptor)
    except OSError as error:  # some network file systems have no locks
        log.warning(f"{folder} cannot be locked ({error.strerror}): make sure that no other process continues this run.")
        return True


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A context with a folder for the states of a run without a folder. Also removes such folders of processes that were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), _opened(lock) as descriptor:  # the folder may belong to another user
            if taken(descriptor):
                shutil.rmtree(lock.parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        new = folder / f"{LOCK}.new"
        new.touch()
        with suppress(OSError):  # without locks, only this process may remove it
            if taken(stack.enter_context(_opened(new))):
                new.rename(folder / LOCK)  # from now on, other processes check the lock
        yield folder


@contextmanager
def _opened(lock: Path) -> Iterator[int]:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
