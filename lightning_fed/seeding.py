"""Random streams that depend on (seed, round, client), never on a process or an order of events."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

COHORT, INITIAL, TURN, SERVER_ROUND, FINE_TUNE, BRANCH, PUBLIC, PUBLIC_TRAINING, COMPRESSION, ORDER = range(10)
UNSEEN, DROPOUT, ATTACK, NOISE = range(10, 14)
"""Purposes of streams, so that streams for different purposes never coincide."""


def derive_seed(*keys: int) -> int:
    """A well-mixed 32-bit seed that is a pure function of integer keys."""
    return int(np.random.SeedSequence([key if key >= 0 else key % 2**32 for key in keys]).generate_state(1)[0])


def seed_all(*keys: int) -> int:
    """Seed Python, NumPy and torch with the stream of ``keys``, so that a user's transform is as reproducible as the library's
    code; returns the derived seed.
    """
    seed = derive_seed(*keys)
    random.seed(seed)
    np.random.seed(seed)
    seed_torch(seed)
    return seed


def seed_torch(seed: int) -> None:
    """``torch.manual_seed``, avoiding its cost without an accelerator: it takes milliseconds, because it records the call stack for
    each kind of accelerator.
    """
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()  # opens the driver's library each time


@contextmanager
def seeded(*keys: int) -> Iterator[None]:
    """Run a block on the stream of ``keys`` and restore the random state."""
    with isolated():
        seed_all(*keys)
        yield


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the random state after a block, also on an error, which Lightning's ``isolate_rng`` does not."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def branched(step: int, device: torch.device) -> Iterator[None]:
    """Run a block on a separate random stream and leave torch's own unchanged: a network that runs in it does not shift other
    draws. The stream is a function of torch's initial seed and of the step, so that no state has to be stored.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index])
    states = [generator.get_state() for generator in generators]
    seed = derive_seed(torch.initial_seed(), BRANCH, step)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, in types that any checkpoint can hold."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a :func:`random_state`."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
