"""Clients with some examples of some classes."""

import re

import numpy as np
import pytest
from tiny_partitions import histogram

from lightning_fed.data import NWayKShot
from lightning_fed.errors import FederationError

TRAIN = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 600))
TEST = np.random.default_rng(2).permutation(np.repeat(np.arange(10), 300))


def test_every_client_has_its_own_number_of_its_own_classes() -> None:
    seen_ways, seen_shots = set(), set()
    for seed in range(10):
        parts = NWayKShot((2, 4), (9, 10))(TRAIN, 20, seed)
        together = np.concatenate(parts)
        assert len(np.unique(together)) == len(together)  # nobody holds another's examples
        for row in histogram(parts, TRAIN):
            [shots] = set(row[row > 0].tolist())  # as many of each class
            seen_shots.add(shots)
            seen_ways.add(int((row > 0).sum()))
    assert seen_ways == {2, 3, 4}
    assert seen_shots == {9, 10}


def test_tests_are_of_the_classes_that_a_client_trains_on() -> None:
    train, test = (
        histogram(parts, of)
        for parts, of in zip(NWayKShot((2, 4), (9, 10), 6).pools(TRAIN, TEST, 20, 3), (TRAIN, TEST), strict=True)
    )
    assert np.array_equal(train > 0, test > 0)
    assert set(test[test > 0].tolist()) == {6}


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        (NWayKShot((2, 11)), "got ways=[2, 11], but the data have 10 classes"),
        (NWayKShot((10, 10), (61, 61)), "asks for 610 examples of a class that has 600: lower num_clients"),
    ],
)
def test_more_than_there_is_is_refused(partition: NWayKShot, said: str) -> None:
    with pytest.raises(FederationError, match=re.escape(said)):
        partition(TRAIN, 10, 0)


@pytest.mark.parametrize("wrong", [{"ways": (0, 2)}, {"ways": (3, 2)}, {"shots": (0, 0)}, {"test_shots": 0}], ids=repr)
def test_ranges_that_are_none_are_refused(wrong: dict) -> None:
    [name] = wrong
    with pytest.raises(FederationError, match=f"NWayKShot got {name}="):
        NWayKShot(**{"ways": (2, 3)} | wrong)
