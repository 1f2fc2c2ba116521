"""Runs that end before all of their rounds: out of patience, or with the target reached; and arguments that are none."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from tiny import CLASSES, Net, Stop, assert_same_end, momentum, new_data, new_federation, new_trainer, without_seconds

from lightning_fed.core.fine_tuning import FineTuning
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg

GOOD = partial(FedAvg, Net, CLASSES, momentum)


def fit(tmp_path: Path, rounds: int = 12, model: FedAvg | None = None, ckpt_path: str | None = None, **options: Any) -> Federation:
    federation = new_federation(rounds, run_dir=tmp_path, evaluate_every=1, trainer=new_trainer, **options)
    federation.fit(model or GOOD(), new_data(3, 90, val_share=0.2), ckpt_path)
    return federation


def test_a_run_ends_when_patience_does(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole").run
    selected = [row["selected/round"] for row in whole.history]
    best = next(number for number in range(1, 11) if selected[number - 1 : number + 2] == [number] * 3)
    ended = fit(tmp_path / "ended", patience=2).run
    assert ended.round == ended.rounds == best + 2 < 12
    assert without_seconds(ended.history) == without_seconds(whole.history[: best + 2])
    assert f'"rounds": {best + 2}' in (tmp_path / "ended" / "version_0" / "run.json").read_text()


@pytest.mark.slow
def test_one_that_was_killed_ends_there_too(tmp_path: Path) -> None:
    fit(tmp_path / "whole", patience=2)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "killed", patience=2, callbacks=[Stop(3)])
    fit(tmp_path / "killed", patience=2, ckpt_path="last")
    assert_same_end(tmp_path / "whole" / "version_0", tmp_path / "killed" / "version_0")
    again = fit(tmp_path / "killed", patience=2, ckpt_path="last").run  # which has ended
    assert again.completed == 0
    assert fit(tmp_path / "killed", ckpt_path="last").run.round == 12  # without patience there are rounds left


def test_the_target_may_end_a_run(tmp_path: Path) -> None:
    target = fit(tmp_path / "all", rounds=4).run.history[1]["after/test_accuracy/mean"]
    ended = fit(tmp_path / "ended", target=target, stop_at_target=True).run
    assert ended.round == ended.history[-1]["target/round"] <= 2
    again = fit(tmp_path / "ended", ckpt_path="last", target=target + 1e-9, stop_at_target=True).run
    assert again.round > ended.round
    assert not any(key.startswith("target/") for key in again.history[ended.round - 1])  # that of the lower one


def test_a_run_ends_with_its_budget(tmp_path: Path) -> None:
    """With the last round that it has room for, which is measured though none was due; and with the first at the earliest."""
    row = fit(tmp_path / "whole", rounds=1).run.history[0]
    a_round = row["traffic/total_bytes"] / 2**20
    for rounds, budget in ((3, 3.5), (3, 3.0), (1, 0.1)):
        federation = new_federation(12, run_dir=tmp_path / str(budget), budget=budget * a_round)
        federation.fit(GOOD(), new_data(3, 90, val_share=0.2))
        assert federation.run.round == rounds
        assert "after/test_accuracy/mean" in federation.run.history[-1]
        federation.fit(GOOD(), new_data(3, 90, val_share=0.2), "last")
        assert federation.run.completed == 0  # it has ended
    more = new_federation(12, run_dir=tmp_path / "3.5", budget=6 * a_round)
    more.fit(GOOD(), new_data(3, 90, val_share=0.2), "last")
    assert more.run.round == 6


def test_who_is_tuned_at_the_end_is_tuned_at_an_early_one(tmp_path: Path) -> None:
    tuned = FedAvg(Net, CLASSES, momentum, fine_tuning=FineTuning(epochs=1, when="last"))
    run = fit(tmp_path, target=0.0, stop_at_target=True, model=tuned).run
    assert run.round == 1
    assert "fine_tuned/test_accuracy/mean" in run.history[0]
    assert run.history[0]["fine_tune/total_flops"] == run.history[0]["fine_tune/flops"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop_at_target": True}, "there is no target"),
        ({"patience": 3, "evaluate_every": 0}, "evaluate_every is 0: set it to 1 or more"),
        ({"patience": 0}, "patience=0: give a whole number from 1"),
        ({"budget": 0}, "Got budget=0: give a number above 0"),
        ({"callbacks": [L.Callback()]}, r"callbacks has a Callback, which is not a FederationCallback: .*trainer=partial"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        Federation(1, **options)


def test_patience_needs_something_to_go_by() -> None:
    with pytest.raises(FederationError, match="no client has validation data"):
        new_federation(2, patience=1, evaluate_every=1).fit(GOOD(), new_data(2, val_share=0.0))


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (FedAvg, new_data(), "model is the class FedAvg, expected an object of a subclass of FederatedModule"),
        (GOOD(), type(new_data()), "datamodule is the class InMemory, expected"),
        (new_data(), GOOD(), "model is a InMemory"),
        (
            GOOD(),
            L.LightningDataModule(),
            r"is a LightningDataModule, expected an object of a subclass of FederatedDataModule, such as InMemory\(inputs, labels",
        ),
    ],
)
def test_arguments_are_looked_at(model: Any, data: Any, said: str) -> None:
    with pytest.raises(FederationError, match=said):
        new_federation(1).fit(model, data)
