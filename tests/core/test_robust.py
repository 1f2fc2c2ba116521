"""Robust rules: known answers, and how far attackers move them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.core.client_state import Vectors, squared_distances
from lightning_fed.core.robust import Aggregation, ClippedMean, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean, krum_scores
from lightning_fed.errors import FederationError
from lightning_fed.storage.client_store import RoundStore
from lightning_fed.tensors import State

RULES: list[Aggregation] = [Median(), TrimmedMean(2), Krum(2), MultiKrum(2), GeometricMedian(), ClippedMean(1.0)]
ROBUST = RULES[:5]


def states(*rows: Any) -> list[State]:
    return [{"w": torch.tensor(row, dtype=torch.float64).reshape(-1)} for row in rows]


def combine(rule: Aggregation, given: list[State], start: State | None = None, limit: int = 10**9, folder: str = "store") -> State:
    start = {name: torch.zeros_like(tensor) for name, tensor in given[0].items()} if start is None else start
    return rule.combine(((state, 1.0) for state in given), start, RoundStore(Path(folder), limit), {"norm", "count"})


@pytest.mark.parametrize(
    ("rule", "rows", "expected"),
    [
        (Median(), [1, 2, 3, 10], [2.5]),
        (TrimmedMean(1), [1, 2, 3, 4, 100], [3]),
        (TrimmedMean(0), [1, 2, 3, 4], [2.5]),
        (Krum(1), [0, 1, 1.9, 3.2, 100], [1]),
        (MultiKrum(1, 2), [0, 1, 1.9, 3.2, 100], [(1 + 1.9) / 2]),
        (GeometricMedian(), [1, 4, 7], [4]),
        (GeometricMedian(), [0, 1, 10], [1]),
        (GeometricMedian(), [[0, 0], [1, 0], [0, 1]], [(3 - 3**0.5) / 6] * 2),
        (GeometricMedian(), [5, 5, 5], [5]),
        (ClippedMean(1.0), [[3, 4], [0, 0.5]], [0.3, 0.65]),
        (ClippedMean(1.0), [[0, 0], [0, 0]], [0, 0]),
    ],
    ids=str,
)
def test_known_answers(rule: Aggregation, rows: list[Any], expected: list[float]) -> None:
    torch.testing.assert_close(combine(rule, states(*rows))["w"], torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-7)


def test_krum_scores_leave_an_update_itself_out_by_its_place() -> None:
    points = torch.tensor([0, 1, 1.9, 3.2, 100], dtype=torch.float64)
    scores = krum_scores((points[:, None] - points).square(), 1)
    assert scores[:4].tolist() == pytest.approx([4.61, 1.81, 2.50, 6.53])
    twins = torch.tensor([1.0, 1.0, 5.0, 9.0, 20.0], dtype=torch.float64)
    assert krum_scores((twins[:, None] - twins).square(), 1).tolist()[:2] == [16.0, 16.0]


def random_states(count: int, seed: int = 0) -> list[State]:
    stream = torch.Generator().manual_seed(seed)
    return [
        {
            "w": torch.randn(3, 4, generator=stream),
            "b": torch.randn(5, generator=stream, dtype=torch.float64),
            "h": torch.randn(2, generator=stream).bfloat16(),
            "norm": torch.rand(4, generator=stream),
            "count": torch.randint(100, (), generator=stream),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_dtypes_stay_and_arrival_and_the_disk_change_nothing(rule: Aggregation) -> None:
    """Bit for bit, on disk; up to the order of sums, in another order."""
    given = random_states(9)
    merged, on_disk, turned = combine(rule, given), combine(rule, given, limit=1, folder="disk"), combine(rule, given[::-1])
    for name, tensor in given[0].items():
        assert (merged[name].dtype, merged[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(merged[name], on_disk[name])
        torch.testing.assert_close(merged[name], turned[name])
    counts = sorted(int(state["count"]) for state in given)
    assert merged["count"] == counts[4]
    assert torch.equal(merged["norm"], torch.stack([state["norm"] for state in given]).median(dim=0).values)


@pytest.mark.parametrize("far", [1e6, -1e6])
@pytest.mark.parametrize("rule", ROBUST, ids=str)
def test_attackers_move_a_robust_rule_by_a_bounded_amount(rule: Aggregation, far: float) -> None:
    """Two of nine, at ±10⁶: what comes stays among the honest ones. The mean goes with them."""
    honest = [{"w": torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)} for seed in range(7)]
    given = [*honest[:3], {"w": torch.full((4,), far, dtype=torch.float64)}, *honest[3:], {"w": torch.full((4,), far).double()}]
    own = torch.stack([state["w"] for state in honest])
    merged = combine(rule, given)["w"]
    assert (merged - own.mean(dim=0)).norm() < 2 * (own - own.mean(dim=0)).norm(dim=1).max()
    assert torch.stack([state["w"] for state in given]).mean(dim=0).norm() > 1e5
    assert combine(ClippedMean(1.0), given)["w"].norm() <= 1 + 1e-12


@pytest.mark.parametrize("places", [(0, 1), (8, 9)], ids=["first", "last"])
def test_attackers_far_off_leave_the_distances_of_honest_clients(places: tuple[int, int]) -> None:
    """Two of ten at 10⁸ of honest norms, wherever they are: scores are those of the honest ones among themselves."""
    stream = torch.Generator().manual_seed(0)
    honest = 0.01 * torch.randn(8, 100, generator=stream, dtype=torch.float64)
    far = 1e7 * torch.ones(100, dtype=torch.float64)
    rows = [far, far, *honest] if places[0] == 0 else [*honest, far, far]
    store, start = RoundStore(Path("store"), 10**9), torch.zeros(100, dtype=torch.float64)
    for place, row in enumerate(rows):
        store.put(place, {"w": row}, 0)
    distances = squared_distances(vectors := Vectors(store, "w", range(10), 100), range(10), about=start)
    apart = [place for place in range(10) if place not in places]
    exact = (honest[:, None] - honest).square().sum(dim=-1)
    torch.testing.assert_close(distances[apart][:, apart], exact, rtol=1e-9, atol=1e-12)
    assert (GeometricMedian().merge(vectors, start) - honest.mean(dim=0)).norm() < 0.1
    best = exact.sort(dim=1).values[:, 1:7].sum(dim=1)
    assert torch.equal(Krum(2).merge(vectors, start), honest[best.argmin()])


def test_the_geometric_median_is_the_one_of_vectors() -> None:
    """By Weiszfeld's steps on the vectors themselves."""
    given = random_states(8, seed=3)
    points = torch.stack([torch.cat([state[name].double().flatten() for name in ("w", "b", "h")]) for state in given])
    center = points.mean(dim=0)
    for _ in range(1000):
        weights = 1 / (points - center).norm(dim=1)
        center = (weights[:, None] * points).sum(dim=0) / weights.sum()
    merged = combine(GeometricMedian(), given)
    found = torch.cat([merged[name].double().flatten() for name in ("w", "b")])
    torch.testing.assert_close(found, center[:17], rtol=1e-6, atol=1e-6)


def test_a_mean_of_all_is_the_mean() -> None:
    given = random_states(6)
    mean: Tensor = torch.stack([state["b"] for state in given]).mean(dim=0)
    for rule in (TrimmedMean(0), MultiKrum(0, 6), ClippedMean(1e9)):
        torch.testing.assert_close(combine(rule, given)["b"], mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rule", "least"), [(TrimmedMean(2), 5), (Krum(1), 5), (MultiKrum(1, 7), 7), (Median(), 1)], ids=str)
def test_too_few_updates_leave_the_server_as_it_was(rule: Aggregation, least: int, caplog: pytest.LogCaptureFixture) -> None:
    assert rule.least == least
    assert combine(rule, random_states(least))
    if least > 1:
        assert combine(rule, random_states(least - 1)) == {}
        assert f"got {least - 1} updates and needs {least}" in caplog.text


def test_options_that_make_no_sense_are_refused() -> None:
    wrong = [
        partial(TrimmedMean, -1),
        partial(Krum, -1),
        partial(MultiKrum, 1, 0),
        partial(GeometricMedian, 0),
        partial(ClippedMean, 0),
        partial(ClippedMean, float("inf")),
    ]
    for make in [*wrong, partial(ClippedMean, 0)]:
        with pytest.raises(FederationError, match=": give a"):
            make()


def test_the_cut_is_a_count() -> None:
    """0.29 · 100 is 28.99… in floats."""
    values = np.arange(100.0)
    assert combine(TrimmedMean(29), states(*values))["w"].item() == pytest.approx(values[29:71].mean())
