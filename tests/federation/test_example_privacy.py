"""Differential privacy of examples, as runs have it: refusals, noise for an ε, the ledger of every client."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from tiny import (
    CLASSES,
    Net,
    NoisyNet,
    Recording,
    Shuffled,
    assert_same,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    new_texts,
    quick_trainer,
    same,
    sgd,
)
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fed.core import FineTuning
from lightning_fed.data import CSVFiles
from lightning_fed.engines import Processes
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedRep, Standalone
from lightning_fed.privacy import ClientDP, ExampleDP
from lightning_fed.privacy.accounting import epsilon

pytest.importorskip("dp_accounting")

model = partial(FedAvg, Net, CLASSES, momentum)
dp = partial(ExampleDP, clip=0.5, delta=1e-3, noise_multiplier=1.0)


def fit(privacy: ClientDP | ExampleDP | None, rounds: int = 3, method: Any = None, data: Any = None, **options: Any) -> Federation:
    federation = new_federation(rounds, privacy=privacy, **options)
    go_on = {"ckpt_path": "last"} if options.get("run_dir") else {}
    federation.fit(method or model(), data or new_data(4, 100), **go_on)
    return federation


def test_without_noise_and_clipping_batches_of_all_examples_train_as_ever() -> None:
    states = []
    for privacy in (dp(clip=1e9, noise_multiplier=0.0), None):
        data = new_data(4, 100, batch_size=100)
        states.append(fit(privacy, 2, data=data).run.server.state)
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-6)


def test_each_clients_steps_are_in_the_ledger_and_the_largest_epsilon_is_told() -> None:
    """Steps of all phases, of those that took part."""
    run = fit(dp(), method=FedRep(Net, CLASSES, optimizer=momentum, head_epochs=2), participation=0.5, seed=2).run
    ledger = run.server.privacy.state_dict()["ledger"].tolist()
    sizes = [client.num_train for client in run.clients]
    for client, (rate, multiplier, steps) in enumerate(ledger):
        per_turn = 3 * -(-sizes[client] // run.data.batch_size)
        assert (rate, multiplier) == (min(1.0, run.data.batch_size / sizes[client]), 1.0)
        assert steps == per_turn * run.merged_turns.get(client, 0)
    largest = max(epsilon(rate, multiplier, int(steps), 1e-3) for rate, multiplier, steps in ledger)
    assert run.history[-1]["privacy/epsilon"] == largest
    assert all("privacy/epsilon" not in row for row in run.history[:-1])


def test_noise_is_chosen_for_every_client_by_its_examples_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(dp(noise_multiplier=None, epsilon=3.0), progress=True).run
    ledger = run.server.privacy.state_dict()["ledger"].tolist()
    assert len({multiplier for _, multiplier, _ in ledger}) > 1
    for rate, multiplier, steps in ledger:
        assert epsilon(rate, multiplier, int(steps), 1e-3) <= 3.0
        assert epsilon(rate, multiplier - 0.02, int(steps), 1e-3) > 3.0
    assert 2.9 < run.history[-1]["privacy/epsilon"] <= 3.0
    assert "Privacy of examples: z = " in capsys.readouterr().out


def test_the_same_on_all_engines_and_after_each_interruption(two_workers: Processes, tmp_path: Path) -> None:
    """State and ledger, bit for bit."""
    whole = fit(dp())
    assert_same(fit(dp(), engine=two_workers), whole)
    assert_same(fit(dp(), engine=Shuffled()), whole)
    for rounds in (1, 2, 3):
        again = fit(dp(), rounds, run_dir=tmp_path / "runs")
    assert same(again.run.server.state_dict(), whole.run.server.state_dict())
    assert again.run.history[-1]["privacy/epsilon"] == whole.run.history[-1]["privacy/epsilon"]
    for other in (dp(noise_multiplier=2.0), dp(clip=0.1), None):
        with pytest.raises(FederationError, match=r"was made with privacy|holds 'privacy/|was made with"):
            fit(other, 4, run_dir=tmp_path / "runs")


@pytest.mark.parametrize("name", ["AdapterTuning", "FedDF", "FedPer", "HETLoRA"])
def test_the_ledger_goes_on_whatever_the_server_keeps(name: str, tmp_path: Path) -> None:
    """Servers may say themselves what a checkpoint has of them."""
    privacy = dp(per_example="loop")
    for rounds in (1, 2):
        resumed = fit(privacy, rounds, new_method(name), data_for(name), run_dir=tmp_path).run
    whole = fit(privacy, 2, new_method(name), data_for(name)).run
    assert sum(resumed.server.privacy.steps.values()) > 0  # type: ignore[attr-defined]
    assert same(resumed.server.privacy.state_dict(), whole.server.privacy.state_dict())


def test_more_rounds_need_more_noise_for_the_same_epsilon(tmp_path: Path) -> None:
    target = dp(noise_multiplier=None, epsilon=3.0)
    fit(target, 2, run_dir=tmp_path)
    with pytest.raises(FederationError, match="chosen for other steps than those of 3 rounds"):
        fit(target, 3, run_dir=tmp_path)


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_with_privacy_of_clients_does_not_continue_with_privacy_of_examples(first: int, tmp_path: Path) -> None:
    kinds = [ClientDP(clip=1.0, delta=0.01, epsilon=5.0), dp(noise_multiplier=None, epsilon=5.0)]
    fit(kinds[first], rounds=1, run_dir=tmp_path)
    with pytest.raises(FederationError, match="was made with privacy = "):
        fit(kinds[1 - first], rounds=1, run_dir=tmp_path)


def test_methods_do_not_learn_which_labels_a_client_has() -> None:
    run = fit(dp(), 1, engine=(engine := Recording())).run
    assert {turn.client.label_counts for turn, _ in engine.fits()} == {()}
    assert all(client.label_counts == () for client in run.clients)
    assert all(client.label_counts for client in run.data.clients)


def test_an_unseen_client_is_personalized_and_fine_tuning_is_its_own_affair() -> None:
    method = model(fine_tuning=FineTuning(epochs=1, optimizer=sgd))
    row = fit(dp(), 1, method=method, unseen=[3]).run.history[-1]
    assert {"unseen/personalized/test_accuracy/mean", "privacy/epsilon"} <= row.keys()


def test_unseen_clients_beside_pooled_training_and_without_training_data() -> None:
    assert "privacy/epsilon" in fit(dp(), 1, method=new_method("Centralized"), unseen=[3]).run.history[-1]
    data = new_data(4, 100)
    data.setup()
    data._splits[3] = data._splits[3]._replace(train=data._splits[3].train[:0])
    data._clients[3] = replace(data._clients[3], num_train=0)
    assert "privacy/epsilon" in fit(dp(), 1, data=data, unseen=[3]).run.history[-1]


def test_a_callback_must_not_end_a_clients_training() -> None:
    """It may go by losses, which have no noise."""

    class Stopping(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.should_stop = True

    with pytest.raises(FederationError, match="a callback ended the training of a client"):
        fit(dp(), 1, method=model(epochs=5), trainer=partial(quick_trainer, callbacks=[Stopping()]))


def test_pooled_training_is_plain_dp_sgd() -> None:
    run = fit(dp(), 2, method=new_method("Centralized")).run
    [(rate, _, steps)] = run.server.privacy.state_dict()["ledger"].tolist()
    count = run.data.pooled().info.num_train
    assert (rate, steps) == (run.data.batch_size / count, 2 * -(-count // run.data.batch_size))


def test_more_steps_than_the_noise_was_chosen_for_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """FedALA's first turns have phases that no round's number tells of."""
    with pytest.raises(
        FederationError, match=r"took \d+ steps in round 2, and its noise was chosen for \d+: .*give noise_multiplier"
    ):
        fit(dp(noise_multiplier=None, epsilon=3.0), method=new_method("FedALA"))
    assert fit(dp(), method=new_method("FedALA"), progress=True).run.history[-1]["privacy/epsilon"] > 0
    assert capsys.readouterr().out.count("ε will be larger than forecast") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privacy": dp(delta=0.1)}, r"privacy.delta is 0.1 with up to \d+ examples per client"),
        ({"method": FedAvg(NoisyNet, CLASSES, momentum)}, "batch norm, which mixes examples"),
        ({"method": Standalone([Net, NoisyNet], CLASSES, momentum)}, "batch norm, which mixes examples"),
        ({"method": model(accumulate=2)}, "leave accumulate out"),
        ({"method": model(gradient_clip=1.0)}, "leave gradient_clip out"),
        ({"method": model(loss=nn.CrossEntropyLoss(weight=torch.ones(CLASSES)))}, "leave class weights out"),
        ({"method": model(loss=partial(cross_entropy, weight=torch.arange(1.0, CLASSES + 1)))}, "leave class weights out"),
        ({"method": model(loss=lambda x, y: cross_entropy(x - x.mean(0), y))}, "its loss is not a plain mean over examples"),
        ({"quorum": 0.5, "dropout": 0.1}, r"Got privacy with quorum=0.5: .*: leave quorum out"),
        ({"method": new_method("SCAFFOLD")}, "do not only send parameters"),
        ({"method": new_method("FD")}, "do not only send parameters"),
        ({"method": new_method("PF2LoRA")}, "its training step is not a plain gradient step"),
        ({"method": new_method("PFedMe"), "privacy": dp(per_example="loop")}, "its loss changes the model"),
        ({"method": new_method("FedRoD")}, "use FedRep"),
        ({"data": new_data(4, 100, continue_epochs=True)}, "leave continue_epochs out"),
    ],
)
def test_what_would_give_a_wrong_epsilon_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        fit(**{"privacy": dp()} | options)


def test_a_loss_of_ones_own_that_is_a_plain_mean_is_none_of_these() -> None:
    run = fit(dp(), 1, method=model(loss=nn.CrossEntropyLoss(label_smoothing=0.1))).run
    assert run.history[-1]["privacy/epsilon"] > 0


def test_scales_of_the_examples_are_refused(tmp_path: Path) -> None:
    rows = ["a,b,sick,site"] + [f"{k % 7},{k % 5},{k % 2},{k % 2}" for k in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    data = CSVFiles(tmp_path / "table.csv", target="sick", task="binary", client="site", standardize="client")
    with pytest.raises(FederationError, match="standardized or imputed by statistics of the examples"):
        fit(dp(), method=FedAvg(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), optimizer=sgd), data=data)


def test_rows_that_are_no_examples_are_refused() -> None:
    data = new_texts()
    data.packing = True  # type: ignore[attr-defined]
    with pytest.raises(FederationError, match="leave packing out"):
        fit(dp(), method=new_method("HOMLoRA"), data=data)
    windows = new_texts()
    windows.setup()
    windows.row_groups = np.arange(1000) // 2
    with pytest.raises(FederationError, match="several rows of one example"):
        fit(dp(), method=new_method("HOMLoRA"), data=windows)


def test_at_sites_it_is_refused() -> None:
    data = new_data(4, 100)
    data.at_hand = False
    with pytest.raises(FederationError, match="example-level privacy with data at sites"):
        new_federation(1, privacy=dp()).fit(model(), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 1.0}, "delta=1.0: give a number above 0 and below 1"),
        ({"epsilon": 1.0}, "give one of them"),
        ({"clip": 0.0}, "clip=0.0: give a number above 0"),
        ({"per_example": "hooks"}, "give vmap or loop"),
        ({"chunk": 0}, "chunk=0: give a whole number from 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        dp(**options)


def test_the_verb_says_what_rounds_cost(capsys: pytest.CaptureFixture[str]) -> None:
    spent = new_federation(10, privacy=dp(), progress=True).privacy(model(), new_data(4, 100))
    assert sorted(spent) == list(range(1, 11))
    assert sorted(spent.values()) == list(spent.values())
    assert "a client that takes part in 10 rounds has ε = " in capsys.readouterr().out
