"""The Trainer of a turn does what Lightning's does, and calls all hooks that somebody has; it belongs to itself alone."""

import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny import CLASSES, Net, new_data, new_federation
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_fed.engines.preflight.trainer_options import NOT_NOTHING, REFUSED
from lightning_fed.engines.turn_loop import QUIET, Trainers, take_back
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.nn.norms import StatisticsPass
from lightning_fed.testing.toys import PartlyFrozenNet

new_trainer = partial(L.Trainer, accelerator="cpu", devices=1)

STEPS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
BATCHES = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_start",
    "on_fit_end",
)


class Plain(L.LightningModule):
    """Manual optimisation without a hook of its own."""

    def __init__(self, log_steps: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(4, 2)
        self.called: list[str] = []
        self.log_steps = log_steps

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.called.append(f"step {batch_idx}")
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        loss: Tensor = self.layer(batch[0]).square().mean()
        self.manual_backward(loss)
        optimizer.step()
        if self.log_steps:
            self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        self.log("weight", self.layer.weight.sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def noting(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self if isinstance(self, Plain) else args[1]
        module.called.append(f"{type(self).__name__} {name}")
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return hook


Listens = type("Listens", (Plain,), {name: noting(name) for name in (*STEPS, *BATCHES)})
"""A module that has all these hooks."""

Calls = type("Calls", (L.Callback,), {name: noting(name) for name in (*STEPS, *BATCHES)})
"""A callback that has them."""


class Moves(Plain):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.append("before transfer")
        return tuple(2 * tensor for tensor in batch)


class Skips(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def examples() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(40.0).view(10, 4)), batch_size=4, collate_fn=tuples
    )


def tuples(rows: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def fit(trainer: L.Trainer, module: Plain) -> dict[str, Any]:
    """What there is to see of a fit."""
    trainer.fit(module, examples())
    loop = trainer.fit_loop.epoch_loop
    return {
        "called": module.called,
        "metrics": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "state": {name: tensor.tolist() for name, tensor in module.state_dict().items()},
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": (loop.batch_progress.state_dict(), loop._batches_that_stepped),
        "function": module._current_fx_name,
        "random state": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("kind", [Plain, Listens, Moves, Skips, partial(Plain, log_steps=True)])
@pytest.mark.parametrize("callbacks", [[], [Calls]], ids=["alone", "with a callback"])
def test_a_turn_is_what_lightning_makes_of_it(kind: Callable[[], Plain], callbacks: list[type[L.Callback]]) -> None:
    trainers, found = Trainers(new_trainer), []
    for new in (
        lambda: new_trainer(**QUIET, max_epochs=2, limit_val_batches=0, callbacks=[one() for one in callbacks]),
        lambda: trainers.for_fit(2, [one() for one in callbacks]),
        lambda: trainers.for_fit(2, [one() for one in callbacks]),  # the same Trainer, again
    ):
        torch.manual_seed(0)
        found.append(fit(new(), kind()))
    own, first, second = found
    assert own["called"]
    assert own == first == second


def test_the_trainer_is_built_once_and_trains_again() -> None:
    trainers = Trainers(new_trainer)
    module, first = Plain(), trainers.for_fit(1, [])
    fit(first, module)
    second = trainers.for_fit(3, [Calls()])
    assert second is first
    assert fit(second, Plain())["steps"] == 9
    third = trainers.for_fit(1, [])
    assert third.callbacks == []
    assert fit(third, Plain())["steps"] == 3


class Measures(Plain):
    """Logs a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.metric.update(outputs["loss"])
        self.log("metric", self.metric, on_step=False, on_epoch=True)


def test_what_an_earlier_turn_logged_is_forgotten() -> None:
    trainers, found = Trainers(new_trainer), []
    for kind in (partial(Plain, log_steps=True), Measures, Plain, Measures):
        torch.manual_seed(0)
        found.append(fit(trainers.for_fit(2, []), kind())["metrics"])
    steps, first, plain, second = found
    assert steps.keys() == {"loss", "loss_step", "loss_epoch", "weight"}
    assert plain.keys() == {"weight"}
    assert first == second
    assert first.keys() == {"metric", "weight"}


def test_a_hook_that_comes_later_is_called() -> None:
    """What one turn does without is found out anew in the next one."""
    trainers = Trainers(new_trainer)
    fit(trainers.for_fit(1, []), Plain())
    assert "Calls on_after_backward" in fit(trainers.for_fit(1, [Calls()]), Plain())["called"]
    assert "Listens on_before_optimizer_step" in fit(trainers.for_fit(1, []), Listens())["called"]


@pytest.mark.parametrize(
    "block",
    [{"callbacks": [Calls()]}, {"fast_dev_run": 2}, {"plugins": [type("Own", (Precision,), {})()]}],
    ids=lambda block: next(iter(block)),
)
def test_what_an_earlier_turn_could_leave_something_in_is_built_anew(block: dict[str, Any]) -> None:
    trainers = Trainers(partial(new_trainer, **block))
    first, second = trainers.for_fit(1, []), trainers.for_fit(1, [])
    assert first is not second
    assert fit(second, Plain())["steps"] == (2 if "fast_dev_run" in block else 3)


@pytest.mark.parametrize("around", [lambda module: module, StatisticsPass], ids=["fit", "pass"])
def test_what_is_frozen_stays_on_its_device(around: Callable[[FedAvg], L.LightningModule]) -> None:
    """What the last phase did not train is not frozen: the next turn loads it. A pass over data has a client within it."""
    module = FedAvg(PartlyFrozenNet, CLASSES)
    module.configure_model()
    module.backbone.fc1.to("meta")  # from where nothing can be moved
    module.backbone.fc2.requires_grad_(False)
    module._device = torch.device("meta")
    strategy = SingleDeviceStrategy("meta")
    strategy._lightning_module = around(module)
    take_back(strategy)
    on_meta = {name for name, tensor in module.state_dict().items() if tensor.device.type == "meta"}
    assert on_meta == {"backbone.fc1.weight", "backbone.fc1.bias"}
    assert module.device.type == "cpu"
    module.frozen_names -= {"backbone.fc1.bias"}
    with pytest.raises(NotImplementedError, match="meta"):
        take_back(strategy)


def test_a_module_that_is_elsewhere_is_moved() -> None:
    module = Plain()
    trainers = Trainers(new_trainer)
    fit(trainers.for_fit(1, []), module)
    module.layer.bias = nn.Parameter(module.layer.bias.to("meta"))  # from where nothing can be moved
    for trainer in (trainers.for_fit(1, []), trainers.for_evaluating()):
        trainer.strategy.connect(module)
        with pytest.raises(NotImplementedError, match="meta"):
            trainer.strategy.model_to_device()


def test_anomalies_are_detected() -> None:
    class Looks(Plain):
        def on_train_batch_end(self, *args: Any) -> None:
            self.called.append(f"anomalies {torch.is_anomaly_enabled()}")

    for given in (False, True):
        module = Looks()
        fit(Trainers(partial(new_trainer, detect_anomaly=given)).for_fit(1, []), module)
        assert f"anomalies {given}" in module.called
        assert not torch.is_anomaly_enabled()


def test_a_profiler_profiles() -> None:
    trainer = Trainers(partial(new_trainer, profiler="simple")).for_fit(1, [])
    fit(trainer, Plain())
    assert isinstance(trainer.profiler, SimpleProfiler)
    assert len(trainer.profiler.recorded_durations["run_training_batch"]) == 3


def test_nothing_of_lightning_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Trainer, while those of a worker are there, is Lightning's own; signals are left to whoever has them."""
    monkeypatch.setattr(signal, "signal", lambda *args: pytest.fail("a Trainer of a turn set a signal handler"))
    trainers = Trainers(new_trainer)
    fit(trainers.for_fit(1, []), Plain())
    monkeypatch.undo()
    other = new_trainer(**QUIET, max_epochs=1)
    assert type(other.fit_loop.epoch_loop) is _TrainingEpochLoop
    assert not {"pre_backward", "post_backward", "optimizer_step"} & vars(other.precision_plugin).keys()
    assert "teardown" not in vars(other.strategy)


def test_with_a_release_that_was_not_tried_the_loop_is_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L, "__version__", "2.99.0")
    trainer = Trainers(new_trainer).for_fit(1, [])
    assert type(trainer.fit_loop.epoch_loop) is _TrainingEpochLoop
    assert "_run_stage" not in vars(trainer)
    assert fit(trainer, Plain())["steps"] == 3


def test_a_trainer_starts_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by srun, as one task. A checkpoint that another program has left in the folder when it was preempted is not its own:
    Lightning would start from it.
    """
    trainers = Trainers(new_trainer)
    trainer = trainers.for_fit(1, [])
    torch.manual_seed(0)
    alone = fit(trainer, Plain())
    trainer.save_checkpoint("hpc_ckpt_1.ckpt")
    variables = {"NTASKS": "1", "JOB_NAME": "study", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "NNODES": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for some in (Trainers(new_trainer), trainers):
        torch.manual_seed(0)
        assert fit(some.for_fit(1, []), Plain()) == alone
    module = Plain()
    module.test_step = lambda batch: None  # type: ignore[method-assign]
    before = module.layer.weight.clone()
    trainers.for_evaluating().test(module, examples(), verbose=False)
    assert torch.equal(module.layer.weight, before)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_steps": 2}, "trainer.max_steps is 2, but the method determines the length of a turn"),  # phases would be missing
        ({"max_time": {"hours": 1}}, "trainer.callbacks has Timer, but it would end a client's turn"),
        ({"callbacks": [EMAWeightAveraging()]}, "trainer.callbacks has EMAWeightAveraging, but it would replace the weights"),
        ({"callbacks": [EarlyStopping("loss")]}, "trainer.callbacks has EarlyStopping, but it would end a client's turn"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_would_change_the_course_of_a_turn_is_refused(options: dict[str, Any], why: str) -> None:
    """Of Trainers that a function builds: one callback would average over all clients, or lose patience with them."""

    def built(**others: Any) -> L.Trainer:
        return new_trainer(**options, **others)

    with pytest.raises(FederationError, match=re.escape(why)):
        new_federation(1, trainer=built).fit(FedAvg(Net, CLASSES), new_data(2, 40))


@pytest.mark.parametrize("option", [*REFUSED, *NOT_NOTHING])
def test_options_without_effect_are_refused_in_python_too(option: str) -> None:
    with pytest.raises(FederationError, match=rf"^trainer\.{option} is (set|0), but "):
        new_federation(1, trainer=partial(new_trainer, **{option: 0 if option in NOT_NOTHING else "anything"}))


def test_callbacks_are_refused_before_lightning_refuses_them_for_an_option_that_nobody_has_set() -> None:
    with pytest.raises(FederationError, match=r"trainer\.callbacks has ModelCheckpoint, but the federation writes checkpoints"):
        new_federation(1, trainer=partial(new_trainer, callbacks=[ModelCheckpoint()]))


def test_options_that_every_client_has_are_not_refused() -> None:
    new_federation(1, trainer=partial(new_trainer, **QUIET, max_epochs=None, use_distributed_sampler=True))


def test_a_dry_run_takes_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(FedAvg, "after_step", lambda self, optimizer: steps.append(1))
    new_federation(3).dry_run(FedAvg(Net, CLASSES, epochs=2), new_data(2, 40))
    assert len(steps) == 1
