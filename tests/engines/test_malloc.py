"""What PyTorch frees stays with the process while a run lasts."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

PROBE = """
import resource, sys, types

sys.modules["lightning_fed.engines"] = package = types.ModuleType("engines")
package.__path__ = ["lightning_fed/engines"]  # the file alone: the package gathers engines, which import torch
from lightning_fed.engines.malloc import retained_memory

MIB = 2**20

def faults(repetitions=5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repetitions):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def step():  # as a network does: what is needed for the gradients is there together, and then freed
    kept = [b"1" * (10 * MIB) for _ in range(4)]
    kept.append(b"1" * (50 * MIB))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // MIB

step()
outside = faults()
with retained_memory():
    faults(3)  # until everything has found its place
    inside, held = faults(), resident()
print(outside, inside, held, resident(), faults())
"""


def probe(**environment: str) -> list[int]:
    """Page faults before and in it, the MiB in memory at its end and after, page faults after."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_steps_get_the_memory_that_steps_before_them_had() -> None:
    outside, inside, held, left, after = probe()
    assert min(outside, after) > 1000
    assert inside < outside / 20
    assert held - left > 80  # it is given back


@pytest.mark.often(1)
@pytest.mark.parametrize("told", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}])
def test_who_has_told_the_c_library_is_heard(told: dict[str, str]) -> None:
    outside, inside, *_ = probe(**told)
    assert inside > outside / 2


def test_other_settings_are_no_reason() -> None:
    outside, inside, *_ = probe(MALLOC_ARENA_MAX="2")
    assert inside < outside / 20
