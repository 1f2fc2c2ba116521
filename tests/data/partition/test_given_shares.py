"""Who holds what, written down."""

import re

import numpy as np
import pytest
from tiny_partitions import histogram

from lightning_fed.data import GivenShares
from lightning_fed.errors import FederationError

TRAIN = np.random.default_rng(1).permutation(np.repeat(np.arange(3), 600))
TEST = np.random.default_rng(2).permutation(np.repeat(np.arange(3), 100))


def test_clients_hold_what_is_written() -> None:
    written = [[600, 17, 0], [0, 583, 1], [0, 0, 599]]
    parts = GivenShares(written)(TRAIN, 3, 0)
    assert histogram(parts, TRAIN).tolist() == written
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert not np.array_equal(parts[1], GivenShares(written)(TRAIN, 3, 1)[1])  # of equally many, others


def test_numbers_are_proportions() -> None:
    train, test = GivenShares([[1, 0.5, 0], [1, 1.5, 0]]).pools(TRAIN, TEST, 2, 0)
    assert histogram(train, TRAIN).tolist() == [[300, 150, 0], [300, 450, 0]]  # nobody has the last class
    assert histogram(test, TEST).tolist() == [[50, 25, 0], [50, 75, 0]]


@pytest.mark.parametrize(
    ("shares", "clients", "said"),
    [
        ([[1, 2, 3]], 2, "got shares of 1 clients and 3 classes, but there are 2 clients and 3 classes: set num_clients to 1"),
        ([[1, 2]], 1, "got shares of 1 clients and 2 classes, but there are 1 clients and 3 classes"),
        ([[1, 2, 3], [0, 0, 0]], 2, "The partition leaves 1 of 2 clients without examples"),
        ([[1, 2, 3], [1, 2]], 2, "got rows of [2, 3] numbers: give a row per client"),
        ([[1, -2, 3]], 1, "got shares with [-2]: give numbers from 0"),
        ([[1, float("inf"), 3]], 1, "got shares with [inf]: give numbers from 0"),
        ([[1, float("nan"), 3]], 1, "got shares with [nan]: give numbers from 0"),
        ([], 1, "got rows of [] numbers"),
    ],
)
def test_what_is_no_such_table_is_refused(shares: list[list[float]], clients: int, said: str) -> None:
    with pytest.raises(FederationError, match=re.escape(said)):
        GivenShares(shares)(TRAIN, clients, 0)
