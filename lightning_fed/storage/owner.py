"""A folder has one process that writes to it, for as long as that process lives."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_fed.errors import FederationError
from lightning_fed.locks import taken

log = logging.getLogger(__name__)

LOCK = ".lock"
PREFIX = "lightning_fed_states_"
PATIENCE = 6.0
"""Seconds to wait for a lock: processes that load data go on holding that of the one that forked them until they see that it was
killed, which they look for every 5 seconds."""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the only process that writes to a run's folder, within the block. The operating system ends it with the process.

    Raises:
        FederationError: if another process is, or if nothing can be written to the folder.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise FederationError(
            f"Nothing can be written to the folder of the run, {folder} ({error.strerror}): make it writable, or start a new run "
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
        log.warning(f"{folder} cannot be locked ({error.strerror}): see to it that no other process continues this run.")
        return True


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for states of a run that has no folder of its own, within the block; and an end to those that processes left which
    were killed.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), _opened(lock) as descriptor:  # it may be another user's
            if taken(descriptor):
                shutil.rmtree(lock.parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        new = folder / f"{LOCK}.new"
        new.touch()
        with suppress(OSError):  # where there are no locks, nobody may remove it but we
            if taken(stack.enter_context(_opened(new))):
                new.rename(folder / LOCK)  # from here on, others look at it
        yield folder


@contextmanager
def _opened(lock: Path) -> Iterator[int]:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
