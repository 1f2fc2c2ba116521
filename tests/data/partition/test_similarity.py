"""The partition by similarity: how much is dealt at random, who holds what of the rest, and how much guessing then achieves."""

from typing import Any

import numpy as np
import pytest
from tiny_partitions import histogram

from lightning_fed.data import BySimilarity
from lightning_fed.errors import FederationError

RNG = np.random.default_rng(2)
BALANCED = RNG.permutation(np.repeat([0, 1], 4000))


def pool(*shares: float, size: int = 80_000) -> np.ndarray:
    """Labels with the given shares."""
    return RNG.permutation(np.repeat(np.arange(len(shares)), np.rint(np.array(shares) * size).astype(int)))


@pytest.mark.parametrize("sorted_fraction", [0, 0.3, 0.9, 1])
@pytest.mark.parametrize(("size", "num_clients"), [(8000, 1), (8000, 8), (103, 10), (12, 8), (8, 8)])
def test_clients_are_disjoint_equal_and_leave_nothing_out(sorted_fraction: float, size: int, num_clients: int) -> None:
    parts = BySimilarity(sorted_fraction=sorted_fraction)(BALANCED[:size], num_clients, 0)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(size))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_all_at_random_gives_every_client_the_same_mix() -> None:
    labels = pool(0.1, 0.3, 0.6, size=8000)
    counts = histogram(BySimilarity(iid_fraction=1.0)(labels, 8, 0), labels)
    # Of 1,000 draws with p = 0.6 the standard deviation is 15.5, and less without replacement.
    assert np.abs(counts - [100, 300, 600]).max() < 4 * 15.5
    assert len(np.unique(counts[:, 0])) > 1  # a sample, not a stratified one


def test_all_sorted_gives_single_label_clients() -> None:
    counts = histogram(BySimilarity(iid_fraction=0.0)(BALANCED, 8, 0), BALANCED)
    assert counts.tolist() == [[1000, 0]] * 4 + [[0, 1000]] * 4


def test_the_sorted_part_is_contiguous_in_label() -> None:
    labels = pool(*[0.1] * 10, size=1000)
    counts = histogram(BySimilarity(sorted_fraction=1.0)(labels, 8, 0), labels)
    assert counts[0].tolist() == [100, 25, 0, 0, 0, 0, 0, 0, 0, 0]
    assert counts[3].tolist() == [0, 0, 0, 25, 100, 0, 0, 0, 0, 0]


def test_the_two_names_sum_to_one() -> None:
    # In floats, 0.29 * 100 and (1 - 0.9) * 100 are a little less than 29 and 10.
    for percent in range(101):
        one, other = BySimilarity(iid_fraction=percent / 100), BySimilarity(sorted_fraction=(100 - percent) / 100)
        pairs = zip(one(BALANCED[:100], 8, 0), other(BALANCED[:100], 8, 0), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs), percent


def test_train_and_test_pool_agree() -> None:
    train, test = pool(0.29, 0.71, size=8000), pool(0.29, 0.71, size=800)
    parts, test_parts = BySimilarity(sorted_fraction=0.9).pools(train, test, 8, 5)
    shares = histogram(parts, train) / 1000
    assert np.abs(shares - histogram(test_parts, test) / 100).max() < 0.06
    assert shares[0, 0] > 0.9
    assert shares[7, 1] > 0.9


@pytest.mark.parametrize(
    ("shares", "expected"),  # for sorted fractions of 0.1, 0.3, 0.6, 0.9 and 1
    [
        ((0.5, 0.5), (0.55, 0.65, 0.80, 0.95, 1.0)),  # QNLI
        ((0.44, 0.56), (0.56, 0.64, 0.77, 0.90, 0.94)),  # SST-2
        ((0.63, 0.37), (0.63, 0.67, 0.81, 0.95, 0.995)),  # QQP
        ((1 / 3, 1 / 3, 1 / 3), (0.39, 0.51, 0.68, 0.86, 0.92)),  # MNLI
        ((0.296, 0.704), (0.70, 0.71, 0.81, 0.92, 0.95)),  # CoLA
    ],
)
def test_guessing_the_majority_achieves_what_label_shares_predict(shares: tuple[float, ...], expected: tuple[float, ...]) -> None:
    labels = pool(*shares)
    for sorted_fraction, accuracy in zip((0.1, 0.3, 0.6, 0.9, 1.0), expected, strict=True):
        counts = histogram(BySimilarity(sorted_fraction=sorted_fraction)(labels, 8, 0), labels)
        assert (counts.max(axis=1) / counts.sum(axis=1)).mean() == pytest.approx(accuracy, abs=0.0075)  # given to two digits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "iid_fraction=None, sorted_fraction=None: give exactly one"),
        ({"iid_fraction": 0.1, "sorted_fraction": 0.9}, r"iid_fraction=0\.1, sorted_fraction=0\.9: give exactly one"),
        ({"sorted_fraction": 1.5}, r"sorted_fraction=1\.5: give 0 to 1"),
        ({"iid_fraction": -0.1}, r"iid_fraction=-0\.1"),
        ({"iid_fraction": float("nan")}, "iid_fraction=nan"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        BySimilarity(**arguments)
