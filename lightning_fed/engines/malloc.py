"""Memory of the process during a run: memory that a training step frees is kept for the next one."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of glibc's ``malloc.h``."""

NEVER = -1
MIB = 2**20


@contextmanager
def retained_memory() -> Iterator[None]:
    """A context in which glibc keeps the memory that PyTorch frees on the CPU.

    Each step allocates the activations and gradients again that the previous step freed. glibc returns the larger ones to the
    kernel, which then has to find and clear every page again: this takes a tenth of a step of CNN-1, a quarter of one of ResNet-18.
    Results do not depend on it. A process keeps its peak memory until the run ends.

    Nothing is done with another C library, or if environment variables configure malloc.
    """
    if platform.libc_ver()[0] != "glibc" or _is_configured():
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(TRIM_THRESHOLD, NEVER)
    if not libc.mallopt(MMAP_THRESHOLD, 1024 * MIB):
        libc.mallopt(MMAP_THRESHOLD, 32 * MIB)  # the maximum of older versions
    try:
        yield
    finally:
        # The largest values that glibc would adapt to by itself when large buffers are freed.
        libc.mallopt(TRIM_THRESHOLD, 64 * MIB)
        libc.mallopt(MMAP_THRESHOLD, 32 * MIB)
        libc.malloc_trim(0)


def _is_configured() -> bool:
    named = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    return bool(named) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
