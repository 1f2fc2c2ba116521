"""What the Gaussian mechanism does: how far one client moves the server, and how well it is hidden."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy.stats import beta

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Server
from lightning_fed.errors import FederationError
from lightning_fed.privacy.client_dp import AdaptiveClip, GaussianMechanism
from lightning_fed.privacy.noise import Noise, SecretNoise, SeededNoise, read_key
from lightning_fed.tensors import State

CLIP, CLIENTS, RATE = 0.7, 50, 0.2


def mechanism(
    multiplier: float = 0.0, clip: float | AdaptiveClip = CLIP, noise: Noise | None = None, **kwargs: float
) -> GaussianMechanism:
    options = {"clients": CLIENTS, "rate": RATE, "delta": 1e-3} | kwargs
    return GaussianMechanism(clip, multiplier, noise=noise or SeededNoise(0), **options)  # type: ignore[arg-type]


def server(state: State, privacy: GaussianMechanism) -> Server:
    return Server({name: tensor.clone() for name, tensor in state.items()}, "uniform", combine=privacy.combine, privacy=privacy)


def played(state: State, updates: Sequence[State], privacy: GaussianMechanism, examples: Sequence[int] | None = None) -> State:
    made = server(state, privacy)
    counts = examples or [1] * len(updates)
    made.aggregate(ClientUpdate(k, count, update) for k, (count, update) in enumerate(zip(counts, updates, strict=True)))
    return made.state


def distance(one: State, other: State) -> float:
    return math.sqrt(sum((one[name] - other[name]).square().sum().item() for name in one))


@pytest.mark.parametrize("seed", range(40))
def test_one_client_moves_the_server_by_its_share_of_the_clip_norm(seed: int) -> None:
    """Any payload of one to forty tensors, any cohort, any number of examples, updates of zero or of 10⁶."""
    rng = np.random.default_rng(seed)
    state = {
        f"t{k}": torch.from_numpy(rng.normal(size=rng.integers(0, 4, size=rng.integers(0, 3)))) for k in range(rng.integers(1, 41))
    }
    state["t"] = torch.zeros(1, dtype=torch.float64)
    cohort = [
        {name: tensor + scale * torch.from_numpy(rng.normal(size=tensor.shape)) for name, tensor in state.items()}
        for scale in rng.choice([0, 1e-6, 1, 1e6], size=rng.integers(1, 12))
    ]
    examples = rng.integers(1, 10**6, size=len(cohort)).tolist()
    without = rng.integers(len(cohort))
    rest = [k for k in range(len(cohort)) if k != without]
    whole = played(state, cohort, mechanism(), examples)
    fewer = played(state, [cohort[k] for k in rest], mechanism(), [examples[k] for k in rest])
    assert distance(whole, fewer) <= CLIP / (CLIENTS * RATE) + 1e-12


def test_noise_is_as_large_as_it_says_and_new_in_each_round_and_tensor() -> None:
    state = {"a": torch.zeros(50_000, dtype=torch.float64), "b": torch.zeros(50_000, dtype=torch.float64)}
    made = server(state, mechanism(2.0))
    rounds = []
    for _ in range(2):
        before = made.state
        made.aggregate([])
        rounds += [(made.state[name] - before[name]).numpy() for name in state]
    std = 2.0 * CLIP / (CLIENTS * RATE)
    for values in rounds:
        assert values.std() == pytest.approx(std, rel=0.02)
        assert abs(values.mean()) < 4 * std / math.sqrt(len(values))
    correlations = np.corrcoef(rounds) - np.eye(4)
    assert abs(correlations).max() < 4 / math.sqrt(50_000)


@pytest.mark.parametrize("make", [lambda: SeededNoise(3), lambda: SecretNoise(bytes(range(32)), "run")], ids=["seeded", "secret"])
def test_noise_is_normal_and_repeats(make: type[Noise]) -> None:
    noise = make()
    values = noise.normals(1, "state/w", 100_000)
    assert np.array_equal(values, make().normals(1, "state/w", 100_000))
    for quantile in (0.01, 0.1, 0.5, 0.9, 0.99):
        share = (values < NormalDist().inv_cdf(quantile)).mean()
        assert abs(share - quantile) < 4 * math.sqrt(quantile * (1 - quantile) / len(values))
    keys = bytes(range(32)), bytes(32)
    sources = [SeededNoise(4), SecretNoise(keys[1], "run"), SecretNoise(keys[0], "other")]
    others = [noise.normals(2, "state/w", 10), noise.normals(1, "state/v", 10), *(one.normals(1, "state/w", 10) for one in sources)]
    assert all(abs(np.corrcoef(values[:10], other)[0, 1]) < 0.95 for other in others)
    assert noise.cohort_stream(1) == make().cohort_stream(1) != noise.cohort_stream(2)


def distinguishability(noise_share: float, runs: int = 2000) -> float:
    """The lower bound of μ that an observer finds who sees one round with or without a client: Φ⁻¹(TPR) − Φ⁻¹(FPR), each by Clopper
    and Pearson.
    """
    state = {"w": torch.zeros(4, dtype=torch.float64)}
    others = [{"w": torch.tensor([0.1, -0.2, 0.3, 0.05 * k], dtype=torch.float64)} for k in range(5)]
    canary = {"w": torch.tensor([1e3, 0, 0, 0], dtype=torch.float64)}
    seen: dict[bool, list[float]] = {True: [], False: []}
    for there, run in ((there, run) for there in seen for run in range(runs)):
        privacy = mechanism(noise_share, noise=SeededNoise(run + runs * there))
        seen[there].append(played(state, [*others, canary] if there else others, privacy)["w"][0].item())
    middle = (np.mean(seen[True]) + np.mean(seen[False])) / 2
    found, wrongly = (sum(value > middle for value in seen[there]) for there in (True, False))
    low, high = beta.ppf(0.025, found, runs - found + 1), beta.ppf(0.975, wrongly + 1, runs - wrongly)
    return NormalDist().inv_cdf(low) - NormalDist().inv_cdf(high)


def test_an_observer_tells_a_client_no_better_than_the_noise_allows() -> None:
    """And would be caught telling it better, were there half as much noise."""
    honest, mutant = distinguishability(1.0), distinguishability(0.5)
    assert 0.8 < honest <= 1
    assert mutant > 1.7


def test_the_clip_norm_follows_the_clients() -> None:
    """All clipped: it grows by e^0.1; none: it shrinks by e^-0.1. The noise is of the norm that was applied."""
    far, near = ({"w": torch.full((3,), value, dtype=torch.float64)} for value in (1e3, 1e-9))
    quiet = {"rate": 1.0, "clients": 10_000}

    class Silent(SeededNoise):
        def normals(self, round: int, name: str, count: int) -> np.ndarray:
            return np.zeros(count) if name == "unclipped" else super().normals(round, name, count)

    for update, factor in ((far, 0.1), (near, -0.1)):
        privacy = mechanism(1.0, AdaptiveClip(start=0.5), Silent(0), **quiet)
        start = {"w": torch.zeros(3, dtype=torch.float64)}
        moved = played(start, [update] * 10_000, privacy)
        assert privacy.clip_norm == pytest.approx(0.5 * math.exp(factor), rel=1e-12)
        same_noise = mechanism(privacy.update_multiplier, 0.5, Silent(0), **quiet)
        assert torch.equal(moved["w"], played(start, [update] * 10_000, same_noise)["w"])


@pytest.mark.parametrize(("expected", "share"), [(100, 1.0050378), (50, 1.0206207)])
def test_what_the_changes_get_of_the_noise(expected: int, share: float) -> None:
    privacy = mechanism(1.0, AdaptiveClip(start=1.0), rate=1.0, clients=expected)
    assert privacy.update_multiplier == pytest.approx(share, abs=1e-7)
    assert mechanism(1.0).update_multiplier == 1.0


def test_the_clip_norm_finds_the_median_norm() -> None:
    rng = np.random.default_rng(1)
    made = server({"w": torch.zeros(3, dtype=torch.float64)}, privacy := mechanism(0.5, AdaptiveClip(0.01), rate=1.0, clients=200))
    for _ in range(60):
        norms = rng.lognormal(mean=0, sigma=0.5, size=200)
        start = made.state["w"]
        made.aggregate(ClientUpdate(k, 1, {"w": start + norm / math.sqrt(3)}) for k, norm in enumerate(norms))
    assert privacy.clip_norm == pytest.approx(1.0, rel=0.2)


def test_a_ledger_of_another_run_is_refused() -> None:
    privacy = mechanism(1.0)
    kept = privacy.state_dict()
    mechanism(1.0).load_state_dict(kept)
    with pytest.raises(FederationError, match=r"ledger has q = 0.2 and z = 1, this run 0.2 and 2"):
        mechanism(2.0).load_state_dict(kept)


def test_what_to_expect_is_said_in_numbers() -> None:
    assert mechanism(0.778, clients=100, rate=0.1).noise_to_clip(30_670) == pytest.approx(13.6, abs=0.05)
    assert mechanism(0.644, clients=1000, rate=0.05).noise_to_clip(30_670) == pytest.approx(2.3, abs=0.05)
    assert "it is smaller than the clip norm" in mechanism(1.0, clients=10_000, rate=0.1).forecast(30_670, 10)


def test_a_key_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "key"
    key = read_key(path, continues=False)
    assert len(key) == 32
    assert read_key(path, continues=True) == key != read_key(tmp_path / "other", continues=False)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FederationError, match="cannot be read"):
        read_key(tmp_path / "lost", continues=True)
    for nowhere in (path / "key", tmp_path):  # in a file, and a folder
        with pytest.raises(FederationError, match=r"cannot be had .*give a file that you can read, or one that can be made"):
            read_key(nowhere, continues=False)
    path.chmod(0o640)
    with pytest.raises(FederationError, match=r"open to other users \(mode 640\)"):
        read_key(path, continues=False)
