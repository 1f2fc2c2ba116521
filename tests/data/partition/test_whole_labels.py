"""The partition in which each label is one client's."""

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_fed.data import WholeLabels
from lightning_fed.errors import FederationError

Labels = NDArray[np.int64]


def pool(*sizes: int, seed: int = 0) -> Labels:
    """So many examples of label 0, 1, …, in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def owners(parts: list[Labels], labels: Labels) -> dict[int, set[int]]:
    """Which clients have each label."""
    return {int(label): {client for client, part in enumerate(parts) if label in labels[part]} for label in np.unique(labels)}


def test_the_largest_label_goes_to_the_smallest_client() -> None:
    labels = pool(5, 30, 6, 20, 9)
    parts = WholeLabels()(labels, 2, seed=0)
    # 30 | 20, then 9 to the second, 6 to the second (29 < 30), 5 to the first (30 < 35)
    assert owners(parts, labels) == {1: {0}, 3: {1}, 4: {1}, 2: {1}, 0: {0}}
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(np.array_equal(part, np.sort(part)) for part in parts)


def test_the_seed_does_not_matter() -> None:
    labels = pool(*range(3, 20))
    one, other = (WholeLabels()(labels, 5, seed) for seed in (0, 7))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_clients_are_about_equally_large() -> None:
    labels = pool(*np.random.default_rng(1).integers(5, 60, 34))
    sizes = [len(part) for part in WholeLabels()(labels, 8, seed=0)]
    assert max(sizes) - min(sizes) < 10


def test_labels_that_are_tested_are_dealt_first() -> None:
    train, test = pool(50, 40, 30, 20, 10), np.array([4, 3, 4, 3])
    of_train, of_test = WholeLabels().pools(train, test, 2, seed=0)
    # 20 | 10, then 50 to the second, 40 to the first (20 < 60), 30 to the first of two that have 60
    assert owners(of_train, train) == {3: {0}, 4: {1}, 0: {1}, 1: {0}, 2: {0}}
    assert owners(of_test, test) == {3: {0}, 4: {1}}
    assert [len(part) for part in of_test] == [2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_client_is_tested_on_labels_that_it_trains_on(seed: int) -> None:
    stream = np.random.default_rng(seed)
    train = pool(*stream.integers(1, 100, 34), seed=seed)
    test = stream.choice(34, 18, replace=False)
    of_train, of_test = WholeLabels().pools(train, test, 8, seed)
    held = owners(of_train, train)
    assert all(len(clients) == 1 for clients in held.values())
    assert all(held[label] == clients for label, clients in owners(of_test, test).items())
    assert all(len(part) for part in of_test)
    for parts, labels in ((of_train, train), (of_test, test)):
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(FederationError, match="have 2 labels, too few for 3 clients: set num_clients to at most 2"):
        WholeLabels()(pool(5, 5), 3, seed=0)
    with pytest.raises(FederationError, match=r"The test set has 1 labels, too few for 2 clients.*at most 1"):
        WholeLabels().pools(pool(5, 5), np.array([1, 1]), 2, seed=0)
    with pytest.raises(FederationError, match="1 labels of the test set are not in the training set"):
        WholeLabels().pools(pool(5, 5), np.array([0, 1, 2]), 2, seed=0)
