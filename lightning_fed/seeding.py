"""Random streams that belong to (seed, round, client), never to a process or an order of events."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

COHORT, INITIAL, TURN, SERVER_ROUND, FINE_TUNE, BRANCH, PUBLIC, PUBLIC_TRAINING, COMPRESSION, ORDER = range(10)
UNSEEN, DROPOUT, ATTACK, NOISE = range(10, 14)
"""What a stream is for, so that streams of different use never coincide."""


def derive_seed(*keys: int) -> int:
    """A 32-bit seed that is a pure function of integer keys, well mixed."""
    return int(np.random.SeedSequence([key if key >= 0 else key % 2**32 for key in keys]).generate_state(1)[0])


def seed_all(*keys: int) -> int:
    """Start the stream of ``keys`` in Python, NumPy and torch alike, so that a user's transform is as reproducible as the library's
    own code; returns the derived seed.
    """
    seed = derive_seed(*keys)
    random.seed(seed)
    np.random.seed(seed)
    seed_torch(seed)
    return seed


def seed_torch(seed: int) -> None:
    """``torch.manual_seed``, which without an accelerator takes milliseconds: for each kind that there might be it writes down the
    whole call stack.
    """
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()  # which opens the driver's library each time


@contextmanager
def seeded(*keys: int) -> Iterator[None]:
    """Run a block on the stream of ``keys`` and leave the caller's random state as it was."""
    with isolated():
        seed_all(*keys)
        yield


@contextmanager
def isolated() -> Iterator[None]:
    """Leave the random state as it was, also where the block fails, which Lightning's ``isolate_rng`` does not."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def branched(step: int, device: torch.device) -> Iterator[None]:
    """Run a block on a random stream beside torch's own, which it leaves where it was: a network that runs in it does not shift
    what others draw. The stream is a function of the seed that torch's began with and of the step, so nothing has to be kept.
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
    """Go on from a :func:`random_state`."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
