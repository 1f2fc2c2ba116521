"""Partitions: who holds what, how evenly, and what they refuse."""

import time
from typing import Any

import numpy as np
import pytest
from tiny_partitions import histogram

from lightning_fed.cli.refusals import known
from lightning_fed.data import (
    IID,
    BySimilarity,
    ClassesPerClient,
    DirichletPerClass,
    DirichletPerClient,
    NWayKShot,
    Partitioner,
)
from lightning_fed.data.partition.pools import Indices
from lightning_fed.errors import FederationError

RNG = np.random.default_rng(1)
TRAIN10 = RNG.permutation(np.repeat(np.arange(10), 5000))
TEST10 = RNG.permutation(np.repeat(np.arange(10), 1000))
TRAIN100 = RNG.permutation(np.repeat(np.arange(100), 500))

EVERY = [
    IID(),
    ClassesPerClient(2),
    DirichletPerClient(0.3),
    DirichletPerClass(0.5),
    BySimilarity(0.5),
    NWayKShot((2, 4)),
]
DISJOINT = [
    IID(),
    ClassesPerClient(2),
    ClassesPerClient(3, jitter=False),
    DirichletPerClass(0.5),
    DirichletPerClass(0.5, balanced=True),
]


def test_every_partition_is_tried() -> None:
    elsewhere = {"ByColumn", "GivenShares", "WholeLabels"}  # in files of their own
    assert {type(partition).__name__ for partition in EVERY} == {*known("partition")} - elsewhere


@pytest.mark.parametrize("partition", EVERY, ids=repr)
def test_is_a_function_of_its_arguments(partition: Partitioner) -> None:
    first, again, other = (partition(TRAIN10, 10, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("partition", DISJOINT, ids=repr)
@pytest.mark.parametrize("num_clients", [1, 7, 10, 100])
def test_disjoint_partitions_cover_the_pool(partition: Partitioner, num_clients: int) -> None:
    labels = TRAIN10[:5000] if num_clients == 1 else TRAIN10
    if isinstance(partition, ClassesPerClient) and num_clients == 1:
        labels = labels % partition.classes
    parts = partition(labels, num_clients, 0)
    assert len(parts) == num_clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


def test_iid_sizes_differ_by_at_most_one() -> None:
    sizes = [len(part) for part in IID()(TRAIN10[:103], 10, 0)]
    assert sorted(sizes) == [10] * 7 + [11] * 3


def test_iid_mixes_classes() -> None:
    assert (histogram(IID()(TRAIN10, 10, 0), TRAIN10) > 400).all()


@pytest.mark.parametrize(
    ("labels", "classes", "num_clients"),
    [(TRAIN10, k, n) for k in (2, 4, 6, 8, 10) for n in (10, 50, 100)]
    + [(TRAIN100, k, n) for k in (10, 30, 50) for n in (10, 50, 100)]
    + [(TRAIN10, 3, 7), (TRAIN10, 7, 13)],
)
def test_classes_per_client_holds_exactly_that_many(labels: np.ndarray, classes: int, num_clients: int) -> None:
    for seed in range(5):
        counts = histogram(ClassesPerClient(classes)(labels, num_clients, seed), labels)
        assert ((counts > 0).sum(axis=1) == classes).all()
        holders = (counts > 0).sum(axis=0)
        assert holders.max() - holders.min() <= 1
        assert counts.sum() == len(labels)


def test_classes_per_client_shares_are_jittered_around_equal() -> None:
    equal = histogram(ClassesPerClient(2, jitter=False)(TRAIN10, 50, 0), TRAIN10)
    jittered = histogram(ClassesPerClient(2)(TRAIN10, 50, 0), TRAIN10)
    assert set(equal[equal > 0]) == {500}
    # A share is at most 0.6 / (0.6 + 9 * 0.4) = 1/7 and at least 0.4 / (0.4 + 9 * 0.6) = 2/29 of 5,000.
    assert jittered[jittered > 0].min() >= 344
    assert jittered[jittered > 0].max() <= 715
    assert len(set(jittered[jittered > 0])) > 20
    assert ((equal > 0) == (jittered > 0)).all()


@pytest.mark.parametrize(("classes", "num_clients"), [(1, 4), (2, 10), (3, 10), (2, 25), (10, 3)])
def test_classes_dealt_at_random_are_a_clients_own_number_and_others(classes: int, num_clients: int) -> None:
    held = []
    for seed in range(5):
        counts = histogram(ClassesPerClient(classes, jitter=False, deal="random")(TRAIN10, num_clients, seed), TRAIN10)
        assert ((counts > 0).sum(axis=1) == classes).all()
        assert (counts[range(num_clients), np.arange(num_clients) % 10] > 0).all()
        holders = (counts > 0).sum(axis=0)
        for label in np.flatnonzero(holders):  # cut evenly among its holders, whole
            shares = counts[:, label][counts[:, label] > 0]
            assert shares.max() - shares.min() <= 1
            assert shares.sum() == 5000
        held.append(holders)
    assert classes in (1, 10) or max(holders.max() - holders.min() for holders in held) > 1  # drawn for each client alone


def test_classes_per_client_leaves_classes_unused_when_there_are_fewer_picks() -> None:
    counts = histogram(ClassesPerClient(2)(TRAIN10, 3, 0), TRAIN10)
    assert sorted(counts.sum(axis=0)) == [0] * 4 + [5000] * 6
    assert ((counts > 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize("num_clients", [10, 100])
@pytest.mark.parametrize(
    "partition",
    [ClassesPerClient(4), ClassesPerClient(4, deal="random"), DirichletPerClass(0.5), DirichletPerClient(0.3)],
    ids=repr,
)
def test_train_and_test_pool_get_the_same_table(partition: Partitioner, num_clients: int) -> None:
    train, test = partition.pools(TRAIN10, TEST10, num_clients, 5)
    train_counts, test_counts = histogram(train, TRAIN10), histogram(test, TEST10)
    ratio = 100 / 500 if isinstance(partition, DirichletPerClient) else 1000 / 5000
    # Rounding moves a few examples; DirichletPerClient moves what is left of its rounding to one class.
    assert np.abs(train_counts * ratio - test_counts).max() <= 5
    if isinstance(partition, ClassesPerClient):
        assert ((train_counts > 0) == (test_counts > 0)).all()


def test_one_draw_serves_both_pools_even_if_only_one_needs_another() -> None:
    # The large pool would be content with a draw that leaves a client of the small pool empty.
    small = np.tile(np.arange(10), 12)
    for seed in range(20):
        partition = DirichletPerClass(0.5)
        train, test = partition.pools(TRAIN10, small, 8, seed)
        assert np.abs(histogram(train, TRAIN10) * 12 / 5000 - histogram(test, small)).max() <= 1.01


def test_dirichlet_per_client_sizes_are_exact_and_clients_overlap() -> None:
    parts = DirichletPerClient(0.3)(TRAIN10, 200, 0)
    assert all(len(part) == 500 == len(np.unique(part)) for part in parts)
    assert len(np.unique(np.concatenate(parts))) < 200 * 500
    assert all(len(part) == 100 for part in DirichletPerClient(0.3).for_test_pool()(TEST10, 200, 0))


def test_dirichlet_per_client_follows_alpha() -> None:
    uniform = histogram(DirichletPerClient(1e6)(TRAIN10, 20, 0), TRAIN10)
    assert np.abs(uniform - 50).max() <= 5
    skewed = histogram(DirichletPerClient(0.01)(TRAIN10, 20, 0), TRAIN10)
    assert np.median(skewed.max(axis=1)) == 500


def test_dirichlet_per_client_draws_fresh_examples_for_each_client() -> None:
    first, second = DirichletPerClient(1e6)(TRAIN10, 2, 0)
    assert len(np.intersect1d(first, second)) < 50


def test_dirichlet_per_client_moves_overflow_to_other_classes() -> None:
    labels = np.repeat(np.arange(10), 60)
    parts = DirichletPerClient(0.01, samples=100)(labels, 50, 0)
    assert all(len(np.unique(part)) == 100 for part in parts)
    assert histogram(parts, labels).max() == 60
    everything = DirichletPerClient(0.01, samples=600)(labels, 2, 0)
    assert all(np.array_equal(part, np.arange(600)) for part in everything)


def test_dirichlet_per_class_follows_alpha() -> None:
    even = histogram(DirichletPerClass(1e6)(TRAIN10, 20, 0), TRAIN10)
    assert np.abs(even - 250).max() <= 10
    skewed = histogram(DirichletPerClass(0.1)(TRAIN10, 10, 0), TRAIN10)
    assert ((skewed > 100).sum(axis=1) < 6).mean() > 0.5


@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.5])
def test_balanced_dirichlet_gives_nothing_more_to_who_has_its_even_share(alpha: float) -> None:
    even, closed = 5000, 0
    for seed in range(5):
        counts = histogram(DirichletPerClass(alpha, balanced=True)(TRAIN10, 10, seed), TRAIN10)
        assert counts.sum() == len(TRAIN10)
        before = np.cumsum(counts, axis=1) - counts  # what a client had when a class was divided
        assert (counts[before >= even] == 0).all()
        closed += (before >= even).sum()
    assert closed > 0


def test_balanced_dirichlet_divides_as_the_plain_one_until_somebody_is_full() -> None:
    plain, balanced = (histogram(DirichletPerClass(0.5, balanced=b)(TRAIN10, 10, 2), TRAIN10) for b in (False, True))
    full = (np.cumsum(plain, axis=1) >= 5000).any(axis=0).argmax()  # the class that fills the first client
    assert np.array_equal(plain[:, : full + 1], balanced[:, : full + 1])
    assert balanced.sum(axis=1).std() < plain.sum(axis=1).std()


def test_balanced_dirichlet_divides_both_pools_by_the_training_pools_shares() -> None:
    fewer = TEST10[TEST10 != 0][:3000]  # by its own sizes, other clients would be full
    labels = np.concatenate([fewer, np.zeros(50, dtype=np.int64)])
    train, test = DirichletPerClass(0.5, balanced=True).pools(TRAIN10, labels, 10, 0)
    share = histogram(train, TRAIN10) / 5000
    assert np.abs(share * np.bincount(labels) - histogram(test, labels)).max() <= 1


def test_dirichlet_per_class_keeps_its_minimum() -> None:
    assert min(len(part) for part in DirichletPerClass(0.3, min_samples=50)(TRAIN10, 50, 0)) >= 50


@pytest.mark.parametrize(
    "partition",
    [
        IID(),
        ClassesPerClient(2),
        ClassesPerClient(10),
        DirichletPerClient(0.01),
        DirichletPerClass(0.01),
        DirichletPerClass(1.0),
    ],
    ids=repr,
)
def test_a_thousand_clients_take_less_than_a_second(partition: Partitioner) -> None:
    start = time.process_time()
    try:
        parts = partition(TRAIN10, 1000, 0)
    except FederationError as refusal:
        assert "alpha=0.01" in str(refusal)  # noqa: PT017
    else:
        assert len(parts) == 1000
    assert time.process_time() - start < 1


@pytest.mark.parametrize("kind", [DirichletPerClient, DirichletPerClass])
@pytest.mark.parametrize("alpha", [1e-300, 1e-8])
def test_the_smallest_alphas_do_not_underflow(kind: type[DirichletPerClient | DirichletPerClass], alpha: float) -> None:
    labels = np.repeat(np.arange(40), 50)
    parts = kind(alpha)(labels, 2, 0)
    assert all(len(part) for part in parts)


@pytest.mark.parametrize("partition", EVERY, ids=repr)
def test_more_clients_than_examples_are_refused(partition: Partitioner) -> None:
    with pytest.raises(FederationError, match="11 clients cannot share 10 examples"):
        partition(TRAIN10[:10], 11, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClassesPerClient(11)(TRAIN10, 10, 0), "classes=11, but the data have 10: set `classes`"),
        (lambda: ClassesPerClient(0), "classes=0"),
        (lambda: ClassesPerClient(2)(np.arange(10).repeat(2), 15, 0), r"2 examples cannot be shared by the 3 clients"),
        (lambda: DirichletPerClient(0), "alpha=0"),
        (lambda: DirichletPerClient(float("nan")), "alpha=nan"),
        (lambda: DirichletPerClient(1, samples=0), "samples=0"),
        (lambda: DirichletPerClient(1, test_samples=-1), "test_samples=-1"),
        (
            lambda: DirichletPerClient(1)(TRAIN10[:400], 3, 0),
            "500 examples per client from a pool of 400: lower `samples`",
        ),
        (lambda: DirichletPerClient(1e308)(TRAIN10, 3, 0), r"overflow with alpha=1e\+308"),
        (lambda: DirichletPerClass(-1), "alpha=-1"),
        (lambda: DirichletPerClass(1, min_samples=0), "min_samples=0"),
        (lambda: IID()(TRAIN10, 0, 0), "num_clients=0"),
        (lambda: IID()(TRAIN10, 3, -1), "seed=-1"),
    ],
)
def test_what_cannot_be_done_is_refused(build: object, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        build()  # type: ignore[operator]


def test_dirichlet_per_class_gives_up_after_ten_draws() -> None:
    with pytest.raises(FederationError, match=r"left at least \d+ of 300 .* min_samples=7 .* 10 draws with alpha=0\.01"):
        DirichletPerClass(0.01, min_samples=7)(TRAIN10, 300, 0)


def test_a_partition_that_leaves_a_client_without_examples_is_refused() -> None:
    class OneTakesAll(Partitioner):
        def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
            return [np.concatenate(members)] + [np.array([], dtype=np.int64)] * (num_clients - 1)

    with pytest.raises(FederationError, match="leaves 3 of 4 clients without examples"):
        OneTakesAll()(TRAIN10, 4, 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "returned a NoneType for 2 clients: let it return a list with an array for each client"),
        ([np.arange(5)], "returned 1 parts for 2 clients"),
        ([np.arange(5), np.arange(5) - 100], "gave client 1 something else than a list of indices from 0 to 99"),
        ([np.arange(5), np.array([100])], "gave client 1 something else"),
        ([np.arange(5.0), np.arange(5)], "gave client 0 something else"),
    ],
)
def test_a_partition_of_ones_own_is_checked(parts: Any, message: str) -> None:
    class Own(Partitioner):
        def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
            return parts

    with pytest.raises(FederationError, match=rf"split\(\) of Own {message}"):
        Own()(np.arange(100) % 10, 2, 0)


@pytest.mark.parametrize("form", [np.array, tuple, lambda parts: dict(enumerate(parts)).values()])
def test_parts_may_be_in_any_container(form: Any) -> None:
    class Own(Partitioner):
        def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
            return form([np.arange(5), np.arange(5, 10)])

    assert [part.tolist() for part in Own()(np.arange(100) % 10, 2, 0)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_classes_without_examples_do_not_count() -> None:
    labels = np.array([0, 7, 0, 7])
    parts = ClassesPerClient(2)(labels, 2, 0)
    assert all(sorted(labels[part]) == [0, 7] for part in parts)
