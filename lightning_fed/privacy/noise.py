"""Where noise comes from: the run's seed, which is a simulation of privacy, or a key that nobody else has."""

import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fed.errors import FederationError
from lightning_fed.seeding import COHORT, NOISE

KEY_BYTES = 32

VERSION = b"1"
"""Of how noise is made of a key: a change of it makes other noise."""

BLOCK = 2**14
"""Numbers of secret noise that are made at once: what fits into a processor's cache takes half the time."""


class Noise(ABC):
    """Standard normal numbers of a round, by name: the same when the round is played again."""

    @abstractmethod
    def normals(self, round: int, name: str, count: int) -> NDArray[np.float64]:
        """So many of them."""

    @abstractmethod
    def cohort_stream(self, round: int) -> list[int]:
        """What NumPy's generator of the round's cohort is seeded with."""


class SeededNoise(Noise):
    """Of the run's seed: a simulation. Who knows the seed can subtract it.

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
    """Of a key: SHAKE-256 of key, run, round and name, by Box and Muller's transform. Each number is half the sum of four normal
    ones, so that its last bits do not tell what was added to it (Holohan & Braghin 2021, https://arxiv.org/abs/2107.10138).

    Args:
        key: 32 bytes.
        run: drawn at random for each new run. Two runs must not share noise: it would cancel in their difference.
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
    """The key of a file; a new one is made for a new run, which its owner alone can read.

    Args:
        path: the file, which belongs into no folder of a run.
        continues: whether the run goes on from a checkpoint, whose key there must be.

    Raises:
        FederationError: if there is none, or if it is no key.
    """
    if not path.exists() and not continues:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
    try:
        key = path.read_bytes()
    except OSError as error:
        raise FederationError(
            f"The key {path} cannot be read ({error.strerror}): without it this run cannot go on; start a new run, whose ε comes "
            "on top of what this one has spent."
        ) from error
    if len(key) != KEY_BYTES:
        raise FederationError(f"The key {path} has {len(key)} bytes, expected {KEY_BYTES}: leave it out, and one is made.")
    return key
