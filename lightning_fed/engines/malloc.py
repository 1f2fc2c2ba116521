"""The memory of the process while a run lasts: what a training step frees stays for the next one."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""What glibc's ``malloc.h`` calls ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``."""

NEVER = -1
MIB = 2**20


@contextmanager
def retained_memory() -> Iterator[None]:
    """Let glibc keep the memory that PyTorch frees on the CPU, until the run ends.

    A step asks for the activations and gradients again that the step before has freed. glibc gives the larger of them back to the
    kernel, which then has to find and clear every page anew: a tenth of a step of CNN-1, a quarter of one of ResNet-18. The numbers
    that are computed do not depend on it. A process keeps what it needed at its peak, and returns it afterwards.

    Where the C library is another one nothing is done, nor where the environment says how it is to be.
    """
    if platform.libc_ver()[0] != "glibc" or _is_configured():
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(TRIM_THRESHOLD, NEVER)
    if not libc.mallopt(MMAP_THRESHOLD, 1024 * MIB):
        libc.mallopt(MMAP_THRESHOLD, 32 * MIB)  # the most that older ones take
    try:
        yield
    finally:
        # what glibc comes to by itself when large buffers are freed, the most it would
        libc.mallopt(TRIM_THRESHOLD, 64 * MIB)
        libc.mallopt(MMAP_THRESHOLD, 32 * MIB)
        libc.malloc_trim(0)


def _is_configured() -> bool:
    named = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    return bool(named) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
