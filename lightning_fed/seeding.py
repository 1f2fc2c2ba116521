"""Random streams that belong to (seed, round, client), never to a process or an order of events."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

COHORT, INITIAL, TURN, SERVER_ROUND, ADAPT = range(5)
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
    torch.manual_seed(seed)
    return seed


@contextmanager
def seeded(*keys: int) -> Iterator[None]:
    """Run a block on the stream of ``keys`` and leave the caller's random state as it was."""
    with isolate_rng():
        seed_all(*keys)
        yield
