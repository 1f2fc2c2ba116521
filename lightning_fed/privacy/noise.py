"""Sources of noise: the run's seed, which simulates privacy, or a secret key."""

import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fed.errors import FederationError, require
from lightning_fed.seeding import COHORT, NOISE
from lightning_fed.system.folders import from_home

KEY_BYTES = 32

VERSION = b"1"
"""Of how noise is made of a key: a change of it makes other noise."""

BLOCK = 2**14
"""Numbers of secret noise that are made at once: what fits into a processor's cache takes half the time."""


class Noise(ABC):
    """Standard normal numbers of a round, by name: the same if the round is repeated."""

    @abstractmethod
    def normals(self, round: int, name: str, count: int) -> NDArray[np.float64]:
        """A number of them."""

    @abstractmethod
    def cohort_stream(self, round: int) -> list[int]:
        """Seed of NumPy's generator for the round's cohort."""


class SeededNoise(Noise):
    """Noise from the run's seed: a simulation, since anyone who knows the seed can subtract it.

    Args:
        seed: the run's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def normals(self, round: int, name: str, count: int) -> NDArray[np.float64]:
        keys = [self.seed, NOISE, round, *name.encode()]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(keys))).standard_normal(count)

    def cohort_stream(self, round: int) -> list[int]:
        return [self.seed, COHORT, round]


class SecretNoise(Noise):
    """Noise from a key: SHAKE-256 of key, run, round and name, by Box and Muller's transform. Each number is half the sum of four
    normal ones, so that its last bits do not reveal the value it is added to (Holohan & Braghin 2021,
    https://arxiv.org/abs/2107.10138).

    Args:
        key: 32 bytes.
        run: random for each new run. Two runs must not share noise: it would cancel in their difference.
    """

    def __init__(self, key: bytes, run: str) -> None:
        self._key, self._run = key, run.encode()

    def _stream(self, round: int, name: str, size: int) -> bytes:
        parts = (self._key, VERSION, self._run, str(round).encode(), name.encode())
        return hashlib.shake_256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest(size)

    def normals(self, round: int, name: str, count: int) -> NDArray[np.float64]:
        found = np.empty(count)
        for start in range(0, count, BLOCK):
            size = min(BLOCK, count - start)
            words = np.frombuffer(self._stream(round, f"noise/{start}/{name}", 32 * size), dtype="<u8").reshape(2, 2, size)
            uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # neither 0 nor 1
            radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
            found[start : start + size] = (radius * (np.cos(angle) + np.sin(angle))).sum(axis=0) / 2
        return found

    def cohort_stream(self, round: int) -> list[int]:
        return list(self._stream(round, "cohort", KEY_BYTES))


def read_key(path: Path, continues: bool) -> bytes:
    """The key of a file; for a new run a new key is created, which only its owner can read.

    Args:
        path: the file, outside any run's folder.
        continues: whether the run resumes from a checkpoint, whose key must exist.

    Raises:
        FederationError: if the key does not exist, is not a key, or is readable by others.
    """
    path = from_home(path)
    try:
        if not path.exists() and not continues:
            _make_key(path)
        key, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        lost = "without it this run cannot go on; start a new run, whose ε comes on top of what this one has spent"
        remedy = lost if continues else "give a file that you can read, or one that can be made"
        raise FederationError(f"The key {path} cannot be {'read' if continues else 'had'} ({error.strerror}): {remedy}.") from error
    require(len(key) == KEY_BYTES, f"The key {path} has {len(key)} bytes, expected {KEY_BYTES}: give a new file, and one is made.")
    require(
        os.name != "posix" or not mode & 0o077,
        f"The key {path} is open to other users (mode {mode & 0o777:o}): make it yours alone, chmod 600, if nobody has read it.",
    )
    return key


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
