"""Differential privacy of clients, as runs have it: refusals, the ledger, noise that nobody finds."""

import json
import math
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import save_file
from tiny import (
    CLASSES,
    Net,
    NoisyNet,
    Shuffled,
    assert_same,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    same,
)

from lightning_fed.core.robust import Median
from lightning_fed.core.server import OptimizerUpdate
from lightning_fed.engines import Processes
from lightning_fed.errors import FederationError
from lightning_fed.federation import protection
from lightning_fed.federation.attacks import LabelFlip
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedBN, Floco, PFedLoRA
from lightning_fed.nn.server_optimizers import ServerSGD
from lightning_fed.privacy import AdaptiveClip, ClientDP, client_dp
from lightning_fed.privacy.accounting import epsilon
from lightning_fed.privacy.noise import SeededNoise
from lightning_fed.tensors import count_floats

pytest.importorskip("dp_accounting")

model = partial(FedAvg, Net, CLASSES, momentum)
dp = partial(ClientDP, clip=0.5, delta=0.01, noise_multiplier=1.0)
poisson: dict[str, Any] = {"sampling": "poisson", "participation": 0.6}


def fit(privacy: ClientDP | None, rounds: int = 3, method: Any = None, **options: Any) -> Federation:
    federation = new_federation(rounds, privacy=privacy, **{**poisson, **options})
    go_on = {"ckpt_path": "last"} if options.get("run_dir") else {}
    federation.fit(method or model(), new_data(4, 100), **go_on)
    return federation


def test_without_noise_and_clipping_it_is_the_uniform_mean() -> None:
    """Whatever weights the method has."""
    private, plain = (new_federation(2, privacy=privacy) for privacy in (dp(clip=1e9, noise_multiplier=0.0), None))
    private.fit(model(weighting="examples"), new_data(4, 100))
    plain.fit(model(weighting="uniform"), new_data(4, 100))
    torch.testing.assert_close(private.run.server.state, plain.run.server.state, rtol=1e-6, atol=1e-7)
    assert "privacy/epsilon" not in private.run.history[-1]


def test_where_clients_are_measured_it_is_said_what_has_been_spent_empty_rounds_included(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computed there alone: it takes long."""
    computed: list[int] = []
    monkeypatch.setattr(client_dp, "epsilon", lambda *given: computed.append(given[2]) or epsilon(*given))
    run = fit(dp(), rounds=5, participation=0.05, seed=1, evaluate_every=3, progress=False).run
    assert 0.0 in [row["round/clients"] for row in run.history]
    assert computed == [3, 5]
    for row in run.history:
        assert row.get("privacy/epsilon") == (epsilon(0.05, 1.0, int(row["round"]), 0.01) if row["round"] in (3, 5) else None)
        assert (row["privacy/noise"], row["privacy/clip"]) == (1.0, 0.5)
    assert run.server.privacy.state_dict()["ledger"].tolist() == [0.05, 1.0, 5]


def test_a_round_without_clients_adds_noise_all_the_same() -> None:
    run = fit(dp(noise_multiplier=2.0), rounds=1, participation=0.01).run
    assert run.history[0]["round/clients"] == 0
    assert not same(run.server.state, run.model.update_state())
    assert run.history[0]["privacy/epsilon"] == epsilon(0.01, 2.0, 1, 0.01)


def test_epsilon_is_spent_by_the_last_round() -> None:
    run = fit(ClientDP(clip=0.5, delta=0.01, epsilon=3.0), rounds=5).run
    assert 2.98 < run.history[-1]["privacy/epsilon"] <= 3.0
    everybody = fit(ClientDP(clip=0.5, delta=0.01, epsilon=3.0), rounds=5, sampling="fixed", participation=1.0).run
    assert 2.98 < everybody.history[-1]["privacy/epsilon"] <= 3.0


@pytest.mark.often(1)
@pytest.mark.parametrize("kind", ["seeded", "secret"])
@pytest.mark.parametrize("clip", [0.5, AdaptiveClip(start=0.3)], ids=["fixed", "adaptive"])
def test_the_same_on_all_engines_and_after_each_interruption(
    kind: Any, clip: Any, two_workers: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State and ledger, bit for bit, of runs that have drawn the same stream of the key, which one that goes on draws no more."""
    monkeypatch.setattr(protection, "token_hex", lambda size: "5" * 2 * size)
    key = tmp_path / "key" if kind == "secret" else None
    privacy = ClientDP(clip=clip, delta=0.01, noise_multiplier=0.1, noise=kind, key=key)
    whole = fit(privacy)
    assert_same(fit(privacy, engine=two_workers if clip != 0.5 else Shuffled()), whole)
    for rounds in (1, 2, 3):
        if rounds == 2:
            monkeypatch.undo()
        again = fit(privacy, rounds, run_dir=tmp_path / "runs")
    assert same(again.run.server.state_dict(), whole.run.server.state_dict())
    assert again.run.history[-1]["privacy/epsilon"] == whole.run.history[-1]["privacy/epsilon"]
    with pytest.raises(FederationError, match="was made with privacy"):
        fit(ClientDP(clip=clip, delta=0.01, noise_multiplier=0.2, noise=kind, key=key), 4, run_dir=tmp_path / "runs")
    with pytest.raises(FederationError, match=r"holds 'privacy/|was made with"):
        fit(None, 4, run_dir=tmp_path / "runs")
    reading = new_federation(3, privacy=privacy, run_dir=tmp_path / "runs", **poisson)
    if key is not None:
        key.unlink()
    assert reading.test(model(), new_data(4, 100))
    if key is not None:
        with pytest.raises(FederationError, match=r"cannot be read .*start a new run"):
            fit(privacy, 4, run_dir=tmp_path / "runs")


def test_secret_noise_is_another_one_in_each_new_run(tmp_path: Path) -> None:
    """Whatever differs, pixels, the Trainer or where they begin, or nothing: else the difference of two runs had no noise."""
    privacy = dp(noise="secret", key=tmp_path / "key")
    start = tmp_path / "start.safetensors"
    save_file({name: tensor + 1e-3 for name, tensor in Net(CLASSES).state_dict().items()}, start)
    other = new_data(4, 100)
    other.client(0).data.images.zero_()
    runs: list[tuple[dict[str, Any], Any]] = [
        ({}, new_data(4, 100)),
        ({}, new_data(4, 100)),
        ({}, other),
        ({"trainer": partial(L.Trainer, devices=1, limit_train_batches=1)}, new_data(4, 100)),
        ({"init_from": start}, new_data(4, 100)),
    ]
    states = []
    for options, data in runs:
        federation = new_federation(1, privacy=privacy, **poisson | {"participation": 1.0} | options)
        federation.fit(model(), data)
        states.append(torch.cat([tensor.flatten() for tensor in federation.run.server.state.values()]))
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    for one, another in combinations(states, 2):
        assert (one - another).std() > 0.5 * math.sqrt(2) * 0.5 / 4  # two noises of 0.5 over four clients each


def test_no_file_of_a_run_has_the_key_or_the_noise(tmp_path: Path) -> None:
    key = tmp_path / "key"
    federation = fit(dp(noise="secret", key=key), run_dir=tmp_path / "runs", logger=True)
    secret = key.read_bytes()
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for form in (secret, secret.hex().encode(), json.dumps(list(secret)).encode()):
            assert form not in content, path
        assert b"unclipped" not in content, path
    assert not any("unclipped" in name for row in federation.run.history for name in row)
    with pytest.raises(FederationError, match="inside run_dir"):
        new_federation(1, run_dir=tmp_path, privacy=dp(noise="secret", key=key))


def test_a_new_run_needs_no_key_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"short")
    with pytest.raises(FederationError, match="has 5 bytes, expected 32"):
        fit(dp(noise="secret", key=key), 1)


def test_a_server_optimizer_steps_on_what_is_private() -> None:
    run = fit(dp(), method=model(server_optimizer=ServerSGD(lr=0.5, momentum=0.9))).run
    assert type(run.server.update) is OptimizerUpdate
    assert run.history[-1]["privacy/epsilon"] > 0


def test_fedbn_keeps_its_batch_norm_and_may() -> None:
    assert fit(dp(), method=FedBN(NoisyNet, CLASSES, momentum)).run.history[-1]["privacy/epsilon"] > 0


def test_a_line_says_what_to_expect(capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(dp(), method=PFedLoRA(Net, CLASSES, optimizer=momentum), progress=True).run
    values = count_floats(run.server.state)
    ratio = math.sqrt(values) / (0.6 * 4)
    assert (
        f"the noise on {values} values is {ratio:.3g} × the clip norm in each round: expect no learning" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "fixed", "participation": 0.5}, "of 2 of 4 clients, for which ε is not known: set sampling to poisson"),
        ({"privacy": dp(delta=0.3)}, r"privacy.delta is 0.3 with 4 clients: give less than 1/4"),
        ({"method": FedAvg(NoisyNet, CLASSES, momentum)}, "a statistic with units of its own: .*norm: group"),
        ({"aggregation": Median()}, "its server is more than a mean"),
        ({"method": new_method("Standalone")}, "its clients send nothing: there is nothing to protect"),
        ({"method": new_method("Cyclic"), "sampling": "fixed", "participation": 1.0}, "chooses the participants itself"),
        ({"dropout": 0.2, "quorum": 0.5}, "one client could decide whether a round counts"),
        ({"method": Floco(Net, CLASSES, 2, optimizer=momentum)}, "chooses the participants itself"),
        ({"privacy": dp(clip=AdaptiveClip(0.1)), "dropout": 0.2}, "the norm would miss its quantile: leave dropout out"),
        ({"privacy": dp(clip=AdaptiveClip(0.1))}, "Adaptive clipping got a noise multiplier of 1 with about 2.4 participants"),
    ],
)
def test_what_would_give_a_wrong_epsilon_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        fit(options.pop("privacy", dp()), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privacy": dp()}, "seeded noise and data at sites: .* set noise to secret"),
        ({"attack": LabelFlip()}, "got attack=LabelFlip"),
    ],
)
def test_what_is_a_simulation_is_refused_with_data_at_sites(options: dict[str, Any], message: str) -> None:
    data = new_data(4, 100)
    data.at_hand = False
    with pytest.raises(FederationError, match=f"(?i){message}"):
        new_federation(1, **poisson | options).fit(model(), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta=0.0: give a number above 0"),
        ({"epsilon": 1.0}, "epsilon=1.0 and noise_multiplier=1.0: give one"),
        ({"noise_multiplier": None}, "give one of them"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0: give a number from 0"),
        ({"clip": 0.0}, "clip=0.0: give a number above 0"),
        ({"clip": math.inf}, "clip=inf: give a number above 0"),
        ({"noise": "secret"}, "noise=secret with key=None"),
        ({"key": Path("key")}, "noise=seeded with key=key"),
        ({"noise": "other"}, "give seeded or secret"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        dp(**options)


@pytest.mark.parametrize("options", [{"start": math.inf}, {"quantile": 2.0}, {"lr": -1.0}, {"lr": math.nan}])
def test_a_clip_norm_that_would_follow_nothing_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(FederationError, match=r"Got .*: give a"):
        AdaptiveClip(**{"start": 1.0} | options)


def test_more_rounds_need_more_noise_for_the_same_epsilon(tmp_path: Path) -> None:
    privacy = ClientDP(clip=0.5, delta=0.01, epsilon=3.0)
    fit(privacy, rounds=1, run_dir=tmp_path)
    with pytest.raises(FederationError, match=r"The run had z = .*, and 2 rounds need .* for ε = 3.0: continue with as many"):
        fit(privacy, rounds=2, run_dir=tmp_path)


@pytest.mark.parametrize("options", [{"patience": 1}, {"target": 0.5, "stop_at_target": True}, {"budget": 1.0}], ids=str)
def test_when_a_run_ends_is_no_secret_and_must_not_tell_any(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="the end of the run would reveal something about"):
        fit(dp(noise="secret", key=tmp_path / "key"), evaluate_every=1, **options)


MAY = ["FedAvg", "FedProx", "FedBN", "FedPer", "FedRep", "LGFedAvg", "FedRoD", "PFedLoRA", "Ditto", "FFALoRA", "HOMLoRA"]


@pytest.mark.parametrize("name", MAY)
def test_methods_whose_server_is_a_mean_may(name: str) -> None:
    method = new_method(name)
    method.configure_model()
    server = method.new_server(data_for(name, num_clients=3, size=60).clients)
    mechanism = dp().mechanism(3, 1.0, 1, SeededNoise(0))
    protection.hide_clients(server, method, mechanism)
    server.aggregate([])
    assert mechanism.rounds == 1


def test_the_verb_says_what_rounds_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without a key, and without a folder."""
    privacy = ClientDP(clip=0.5, delta=0.01, epsilon=3.0, noise="secret", key=tmp_path / "key")
    federation = new_federation(20, privacy=privacy, run_dir=tmp_path / "runs", **poisson)
    spent = federation.privacy(model(), new_data(4, 100))
    assert list(spent) == list(range(2, 21, 2))
    assert 2.98 < spent[20] <= 3.0
    assert f"after 20 rounds: ε = {spent[20]:.3f}" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(FederationError, match="The run has no privacy setting"):
        new_federation(1).privacy(model(), new_data(4, 100))
