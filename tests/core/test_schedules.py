"""Learning rates that change: over steps and epochs of a phase, and over rounds."""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from often import mostly_slow
from tiny import Net, Recording, assert_same, assert_same_end, data_for, new_data, new_federation, new_method, new_trainer
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
)

from lightning_fed.core import FineTuning
from lightning_fed.core.schedules import Schedule
from lightning_fed.engines import InProcess, Processes
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, FedRep

halved = partial(ExponentialLR, gamma=0.5)
sgd = partial(SGD, lr=1.0)


class Rates(L.Callback):
    """The learning rate of every step, with the phase's name."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append((pl_module.phase.name, optimizer.param_groups[0]["lr"]))


def rates(module: Any, epochs: int, **options: Any) -> tuple[list[tuple[str, float]], L.Trainer]:
    """In a plain Trainer, with two batches an epoch."""
    seen = Rates()
    trainer = new_trainer(max_epochs=epochs, callbacks=[seen], limit_train_batches=2, limit_val_batches=0, **QUIET | options)
    trainer.fit(module, datamodule=new_data(1, 60).client(0))
    return seen.seen, trainer


def fedrep(interval: str) -> FedRep:
    return FedRep(Net, 4, optimizer=sgd, head_epochs=2, epochs=1, lr_scheduler=halved, lr_interval=interval)  # type: ignore[arg-type]


def test_over_steps_it_begins_anew_with_each_phase() -> None:
    seen, _ = rates(fedrep("step"), 6)
    assert seen == 2 * [*(("head", 0.5**step) for step in range(4)), *(("representation", 0.5**step) for step in range(2))]


def test_over_epochs_it_begins_anew_with_each_phase() -> None:
    seen, _ = rates(fedrep("epoch"), 6)
    assert seen == 2 * [("head", 1.0), ("head", 1.0), ("head", 0.5), ("head", 0.5), *2 * [("representation", 1.0)]]


def test_over_rounds_a_phase_has_one_rate() -> None:
    seen, trainer = rates(fedrep("round"), 9)
    assert seen == [(name, 0.5**run) for run in range(3) for name in 4 * ["head"] + 2 * ["representation"]]
    assert trainer.callback_metrics["lr/head"] == trainer.callback_metrics["lr/representation"] == 0.25


def test_lightnings_monitor_sees_it(tmp_path: Path) -> None:
    logger, monitor = CSVLogger(tmp_path), LearningRateMonitor(logging_interval="step")
    options = {"limit_train_batches": 2, "limit_val_batches": 0, "log_every_n_steps": 1}
    trainer = new_trainer(max_epochs=1, callbacks=[monitor], **QUIET | options | {"logger": logger})
    trainer.fit(FedAvg(Net, 4, sgd, lr_scheduler=halved, lr_interval="step"), datamodule=new_data(1, 60).client(0))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        assert [float(row["lr/local"]) for row in csv.DictReader(file) if row["lr/local"]][:2] == [1.0, 0.5]


@pytest.mark.parametrize(
    "factory",
    [
        halved,
        partial(MultiStepLR, milestones=[2, 4], gamma=0.1),
        partial(LinearLR, start_factor=0.1, total_iters=3),
        partial(LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
        partial(OneCycleLR, max_lr=1.0, total_steps=9),
    ],
    ids=["exponential", "multi step", "linear", "lambda", "one cycle, momentum too"],
)
def test_a_round_is_as_far_as_pytorch_would_be(factory: Any) -> None:
    """Whether it is reached round by round with new optimizers, or at once, as after a stop; and whoever takes part when."""
    reference = SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    scheduler: LRScheduler = factory(reference)
    known: Schedule | None = None
    for round in (0, 1, 2, 5, 3, 6):
        optimizers = [SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9) for _ in range(2)]
        known, alone = Schedule(factory, "round", optimizers[0], known), Schedule(factory, "round", optimizers[1])
        known.begin(round)
        alone.begin(round)
        reference = SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        scheduler = factory(reference)
        for _ in range(round):
            reference.step()
            scheduler.step()
        for optimizer in optimizers:
            [group], [expected] = optimizer.param_groups, reference.param_groups
            assert {key: group[key] for key in group if key != "params"} == {key: expected[key] for key in group if key != "params"}


class OfClientAndRound(FedAvg):
    """Each client has a rate of its own in each round, and notes it in :attr:`seen`."""

    seen: list[tuple[int, int, float]]

    def own_rate(self) -> float:
        return 1.0 if self.client is None else 1.0 + self.client.id + 10 * self.rounds_before

    def phases(self) -> Any:
        return [self.local_phase("local", list(self.parameters()), self.client_loss, optimizer=partial(SGD, lr=self.own_rate()))]

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.client is not None
        self.seen.append((self.rounds_before, self.client.id, optimizer.param_groups[0]["lr"] / self.own_rate()))


@pytest.mark.parametrize("interval", ["round", "epoch", "step"])
def test_a_schedule_starts_from_the_rate_of_a_client_and_a_round(interval: Any) -> None:
    """And not from that of another client, or of the round before, which had another optimizer."""
    OfClientAndRound.seen = []
    model = OfClientAndRound(Net, 4, lr_scheduler=halved, lr_interval=interval, steps=1)
    new_federation(3).fit(model, new_data(2, 40))
    assert OfClientAndRound.seen == [
        (r, k, pytest.approx(0.5**r if interval == "round" else 1)) for r in range(3) for k in range(2)
    ]


def test_a_schedule_starts_from_the_state_of_its_own_scheduler() -> None:
    """The same factory may build others, also such whose states have arrays, which cannot be compared at once."""

    class Listed(LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.listed = np.array(listed)
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            return [float(self.listed[self.last_epoch])]

    known: Schedule | None = None
    for round, listed in ((1, [1.0, 0.5, 0.2]), (2, [1.0, 0.5, 0.2]), (2, [1.0, 0.5, 0.1])):
        known = Schedule(Listed, "round", sgd([nn.Parameter(torch.ones(1))]), known)
        known.begin(round)
        assert known.rate == listed[round]


def test_a_federation_has_the_rate_of_its_round() -> None:
    """Also with few of the clients in a round, whose first turn may be late."""
    federation = new_federation(4, participation=0.5, evaluate_every=0)
    history = federation.fit(FedAvg(Net, 4, sgd, lr_scheduler=halved), new_data())
    assert [row["lr/local"] for row in history] == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("name", mostly_slow(["FedAvg", "PF2LoRA"], often={"FedAvg"}))
def test_a_continued_federation_has_the_same_rates(name: str, tmp_path: Path) -> None:
    def fit(rounds: int, run_dir: str) -> None:
        federation = new_federation(rounds, run_dir=tmp_path / run_dir, evaluate_every=1)
        federation.fit(new_method(name, lr_scheduler=halved), data_for(name, num_clients=3, size=60), ckpt_path="last")

    for rounds, run_dir in ((3, "whole"), (1, "stopped"), (3, "stopped")):
        fit(rounds, run_dir)
    [one], [other] = (list((tmp_path / run_dir).glob("version_*")) for run_dir in ("whole", "stopped"))
    assert_same_end(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg", "PF2LoRA"])
def test_worker_processes_have_the_same_rates(name: str, two_workers: Processes) -> None:
    here, there = (new_federation(3, evaluate_every=1, engine=engine) for engine in (InProcess(threads=1), two_workers))
    for federation in (here, there):
        federation.fit(new_method(name, lr_scheduler=halved), data_for(name, num_clients=3, size=60))
    assert_same(here, there)


@pytest.mark.parametrize(
    ("interval", "said"),
    [("step", "2 steps: give it as many as there are steps in a phase"), ("round", "2 rounds: give it as many")],
)
def test_a_schedule_that_ends_too_early_says_so(interval: Any, said: str) -> None:
    short = partial(OneCycleLR, max_lr=1.0, total_steps=2)
    with pytest.raises(FederationError, match=f"The OneCycleLR of lr_scheduler ends after its total_steps, {said}"):
        new_federation(4).fit(FedAvg(Net, 4, sgd, lr_scheduler=short, lr_interval=interval), new_data(1, 60))


def test_a_plateau_is_refused() -> None:
    with pytest.raises(FederationError, match="ReduceLROnPlateau needs a metric"):
        rates(FedAvg(Net, 4, sgd, lr_scheduler=ReduceLROnPlateau), 1)


def test_a_schedule_that_nobody_would_follow_is_refused() -> None:
    class Returns(FedAvg):
        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            return optimizers, [ExponentialLR(optimizers[0], 0.5)]

    with pytest.raises(
        FederationError, match="configure_optimizers\\(\\) of Returns returned a schedule that no phase would follow"
    ):
        rates(Returns(Net, 4), 1)


def test_the_methods_own_phases_may_have_schedules_of_their_own() -> None:
    class HeadSlows(FedRep):
        def phases(self) -> Any:
            head, body = super().phases()
            return [replace(head, lr_scheduler=halved, lr_interval="step"), body]

    seen, trainer = rates(HeadSlows(Net, 4, optimizer=sgd, head_epochs=1), 2)
    assert seen == [("head", 1.0), ("head", 0.5), ("representation", 1.0), ("representation", 1.0)]
    assert "lr/representation" not in trainer.callback_metrics


def test_what_is_adapted_before_it_is_measured_does_not_set_a_schedule_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes one step of the schedule, however many there were before: adapting has a schedule of its own."""
    taken: list[int] = []
    whole = Schedule._advance
    monkeypatch.setattr(Schedule, "_advance", lambda schedule: (taken.append(1), whole(schedule))[1])
    method = FedAvg(Net, 4, sgd, lr_scheduler=halved, fine_tuning=FineTuning(steps=1))
    engine = Recording()
    history = new_federation(6, engine=engine, evaluate_every=1).fit(method, new_data(1, 60))
    assert [row["lr/local"] for row in history] == [0.5**round for round in range(6)]
    assert len(taken) == 5 + 5  # training and adapting go from 0 to 5


def test_what_is_adapted_after_a_round_has_the_rate_of_that_round() -> None:
    """A schedule that ends at 0 would adapt nothing in the last one."""
    seen = Rates()
    method = FedAvg(Net, 4, sgd, lr_scheduler=partial(CosineAnnealingLR, T_max=2), fine_tuning=FineTuning(steps=1))
    federation = new_federation(2, evaluate_every=1, trainer=partial(new_trainer, callbacks=[seen]))
    history = federation.fit(method, new_data(1, 60))
    assert [rate for phase, rate in seen.seen if phase == "fine_tune"] == [1.0, 0.5] == [row["lr/local"] for row in history]
    federation.client_module(0)
    assert seen.seen[-1] == ("fine_tune", 0.5)
