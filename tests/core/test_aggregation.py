"""Means of state dicts, what an update must be, and the order in which updates are merged."""

import weakref
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from tiny import same
from tiny_rounds import check_update

from lightning_fed.core.aggregation import EntryMean, WeightedMean, weighted_mean
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.errors import FederationError
from lightning_fed.tensors import State


def random_state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    stream = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(7, 5, generator=stream, dtype=dtype),
        "scalar": torch.randn((), generator=stream, dtype=dtype) * 1e-8,
    }


@pytest.mark.parametrize("weights", [(3, 7, 11), (1,), (0.5,), (400, 1, 399, 77, 13), (1, 1, 1)])
def test_mean_of_equal_states_is_that_state(weights: tuple[float, ...]) -> None:
    state = random_state(0)
    assert same(weighted_mean([state] * len(weights), weights), state)


def test_mean_is_that_of_numpy_in_double_precision() -> None:
    states, weights = [random_state(seed) for seed in range(4)], [3, 10, 1, 7]
    mean = weighted_mean(states, weights)
    for name in ("weight", "scalar"):
        columns = np.stack([state[name].numpy().astype(np.float64) for state in states])
        expected = np.average(columns, axis=0, weights=weights).astype(np.float32)
        assert torch.equal(mean[name], torch.as_tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_stays_and_inputs_are_left_alone(dtype: torch.dtype) -> None:
    states = [random_state(seed, torch.float64) for seed in range(2)]
    states = [{name: tensor.to(dtype) for name, tensor in state.items()} for state in states]
    copies = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    mean = weighted_mean(states, [3, 5])
    assert {tensor.dtype for tensor in mean.values()} == {dtype}
    assert all(same(state, copy) for state, copy in zip(states, copies, strict=True))


def test_integers_and_booleans_take_the_maximum() -> None:
    states = [
        {"count": torch.tensor([5, 2]), "mask": torch.tensor([True, False])},
        {"count": torch.tensor([3, 9]), "mask": torch.tensor([False, False])},
    ]
    mean = weighted_mean(states, [1, 100])
    assert same(mean, {"count": torch.tensor([5, 9]), "mask": torch.tensor([True, False])})
    assert mean["count"].dtype == torch.int64
    assert states[0]["count"].tolist() == [5, 2]


def test_mean_holds_no_state_that_it_was_given() -> None:
    """What makes the server's memory flat: at any time one update is alive, not the cohort's."""
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    def arriving() -> Iterator[State]:
        for seed in range(5):
            alive.append(sum(reference() is not None for reference in references))
            state = {"x": torch.randn(3, generator=torch.Generator().manual_seed(seed))}
            references.append(weakref.ref(state["x"]))
            yield state
            del state

    weighted_mean(arriving(), [1] * 5)
    assert max(alive) <= 1


def test_nothing_added_is_an_empty_mean() -> None:
    assert WeightedMean().result() == {}


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
def test_weight_that_is_not_positive_is_refused(weight: float) -> None:
    with pytest.raises(FederationError, match="positive weights"):
        WeightedMean().add(random_state(0), weight)


EXPECTED = {"a": torch.zeros(2), "b": torch.zeros(3, 4), "n": torch.tensor(1)}


def test_update_that_fits_passes() -> None:
    check_update(ClientUpdate(3, 10, {name: tensor.clone() for name, tensor in EXPECTED.items()}), EXPECTED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, r"update of client 3 lacks 'b'"),
        ({"a": None, "b": None}, r"update of client 3 lacks 'a' and 1 more"),
        ({"extra": torch.zeros(1)}, r"update of client 3 holds 'extra', which does not belong"),
        ({"b": torch.zeros(4, 3)}, r"update of client 3 has 'b' of shape \(4, 3\), expected \(3, 4\)"),
        ({"a": torch.tensor([0.0, torch.nan])}, r"update of client 3 holds NaN or infinity in 'a'"),
        ({"a": torch.tensor([-torch.inf, 0.0])}, r"update of client 3 holds NaN or infinity in 'a'"),
        ({"a": torch.zeros(2).half()}, r"update of client 3 has 'a' of torch.float16, expected torch.float32"),
        ({"a": torch.zeros(2).bfloat16()}, r"update of client 3 has 'a' of torch.bfloat16, expected torch.float32"),
        ({"a": torch.zeros(2).double()}, r"update of client 3 has 'a' of torch.float64, expected torch.float32"),
        ({"a": torch.zeros(2).int()}, r"update of client 3 has 'a' of torch.int32, expected torch.float32"),
        ({"a": torch.zeros(2).bool()}, r"update of client 3 has 'a' of torch.bool, expected torch.float32"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, r"update of client 3 has 'a' of torch.complex64, expected torch.float32"),
        ({"n": torch.tensor(1.0)}, r"update of client 3 has 'n' of torch.float32, expected torch.int64"),
        ({"b": torch.zeros(3, 4).to_sparse()}, r"update of client 3 has 'b' as a torch.sparse_coo tensor"),
        ({"b": torch.zeros(3, 4, device="meta")}, r"update of client 3 has 'b' as a meta tensor, which holds no numbers"),
    ],
)
def test_update_that_does_not_fit_is_refused_with_client_and_name(change: dict[str, torch.Tensor | None], message: str) -> None:
    state = {name: tensor for name, tensor in (EXPECTED | change).items() if tensor is not None}
    with pytest.raises(FederationError, match=message):
        check_update(ClientUpdate(3, 10, state), EXPECTED)


# ------------------------------------------------------------------------------------------------------- parts of a whole


def entry_mean(whole: State, parts: list[State], weights: Iterable[float] | None = None, rows: State | None = None) -> State:
    mean = EntryMean(whole)
    for part, weight in zip(parts, weights or [1] * len(parts), strict=True):
        mean.add(part, weight, rows)
    return mean.result()


@pytest.mark.parametrize("weights", [(1, 1, 1), (3, 10, 7), (400, 1, 399)])
def test_entry_mean_of_parts_that_cover_the_whole_is_the_weighted_mean(weights: tuple[int, ...]) -> None:
    """Scalars included."""
    states = [random_state(seed) for seed in range(4)]
    assert same(entry_mean(states[0], states[1:], weights), weighted_mean(states[1:], weights))


@pytest.mark.parametrize(("weights", "overlap"), [((1, 1), 3.0), ((1, 3), 2.5), ((0.5, 1.5), 2.5)])
def test_of_nested_parts_the_overlap_is_averaged_and_the_rest_is_whose_it_is(weights: tuple[float, float], overlap: float) -> None:
    whole, big, small = torch.full((3, 4), 7.0), torch.full((3, 3), 4.0), torch.full((2, 2), 2.0)
    mean = entry_mean({"w": whole}, [{"w": big}, {"w": small}], weights)["w"]
    assert mean.tolist() == [[overlap, overlap, 4, 7], [overlap, overlap, 4, 7], [4, 4, 4, 7]]


def test_what_no_part_holds_keeps_its_value() -> None:
    whole = random_state(0) | {"untouched": torch.arange(3.0)}
    mean = entry_mean(whole, [{"weight": torch.ones(7, 1)}])
    assert torch.equal(mean["untouched"], whole["untouched"])
    assert torch.equal(mean["scalar"], whole["scalar"])
    assert torch.equal(mean["weight"][:, 1:], whole["weight"][:, 1:])
    assert (mean["weight"][:, 0] == 1).all()
    assert same(entry_mean(whole, []), whole)


def test_a_row_is_averaged_over_its_owners() -> None:
    whole = {"head": torch.full((4, 2), 9.0), "bias": torch.full((4,), 9.0), "body": torch.full((4, 2), 9.0)}
    mean = EntryMean(whole)
    for value, weight, owned in ((2.0, 1.0, [True, True, False, False]), (6.0, 3.0, [False, True, True, False])):
        part = {"head": torch.full((4, 1), value), "bias": torch.full((4,), value), "body": torch.full((4, 1), value)}
        mean.add(part, weight, {"head": torch.tensor(owned), "bias": torch.tensor(owned)})
    result = mean.result()
    assert result["bias"].tolist() == [2, 5, 6, 9]
    assert result["head"].tolist() == [[2, 9], [5, 9], [6, 9], [9, 9]]
    assert result["body"].tolist() == [[5, 9]] * 4


@pytest.mark.parametrize("weights", [(1.0, 0.5), (1.0, 0.3, 0.7), (0.607, 0.417)])
def test_entry_mean_of_equal_integers_is_theirs(weights: tuple[float, ...]) -> None:
    """An index, say, which a cut fraction of 1e-16 would shift by one."""
    whole = {"index": torch.arange(1000), "flag": torch.tensor([True, False])}
    mean = EntryMean(whole)
    for weight in weights:
        mean.add(whole, weight)
    mean.scale(0.7)
    assert same(mean.result(), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entry_mean_keeps_the_dtype_of_the_whole_and_leaves_its_inputs_alone(dtype: torch.dtype) -> None:
    states = [{"weight": random_state(seed)["weight"].to(dtype)} for seed in range(3)]
    parts = [{"weight": states[1]["weight"][:3, :2]}, {"weight": states[2]["weight"][:2, :4]}]
    copies = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    assert entry_mean(states[0], parts, [1, 2])["weight"].dtype == dtype
    assert all(same(state, copy) for state, copy in zip(states, copies, strict=True))
