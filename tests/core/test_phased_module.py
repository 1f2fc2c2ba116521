"""Learning in phases, in a plain Trainer with no federation in sight: the program of docs/phases.md."""

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny import new_trainer, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.core.phase import Phase
from lightning_fed.core.phased_module import PhasedModule
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError

PAGE = Path(__file__).parents[2] / "docs" / "phases.md"
EPOCHS = 4
"""Two of each phase."""


@cache
def program() -> dict[str, Any]:
    """What is there after the program of the page was run."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def new_module() -> Any:
    """With batch norm in its body, which could move without a gradient."""
    return program()["ProbeThenTune"](nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU()), 6, 3)


def batches(size: int = 70) -> DataLoader[Any]:
    stream, labels = torch.Generator().manual_seed(1), torch.arange(size) % 3
    x = torch.randn(3, 8, generator=stream)[labels] + torch.randn(size, 8, generator=stream)
    return DataLoader(TensorDataset(x, labels), batch_size=16)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class Watch(L.Callback):
    """Keeps the module's state, from before the first epoch on, and the losses of every epoch's steps with their sizes."""

    def __init__(self, module: Any) -> None:
        self.states = [state_of(module)]
        self.losses: list[list[tuple[float, int]]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.states.append(state_of(pl_module))
        self.losses.append(
            [(loss.item(), size) for loss, size in zip(pl_module.progress.losses, pl_module.progress.sizes, strict=True)]
        )


def fit(module: PhasedModule, epochs: int = EPOCHS) -> tuple[L.Trainer, Watch]:
    """With validation after each epoch, which puts the module into eval mode and back."""
    watch = Watch(module)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = new_trainer(max_epochs=epochs, callbacks=[watch], **options)
    trainer.fit(module, batches(), batches())
    return trainer, watch


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(before[name], tensor)}


def test_the_program_of_the_page_runs() -> None:
    names = program()
    assert names["module"].num_epochs(len(names["train"])) == names["trainer"].current_epoch == EPOCHS
    assert names["trainer"].callback_metrics["test/accuracy"] > 0.5


def test_the_body_stays_bit_for_bit_at_first_and_then_both_learn() -> None:
    module = new_module()
    _, watch = fit(module)
    names, head = module.state_dict().keys(), {"head.weight", "head.bias"}
    assert {"body.0.weight", "body.1.running_mean", "body.1.num_batches_tracked"} <= names - head
    first, second, third, fourth = (changed(one, other) for one, other in zip(watch.states, watch.states[1:], strict=False))
    assert first == second == head
    assert third == fourth == names


def test_each_phase_has_an_optimizer_of_its_own() -> None:
    module = new_module()
    trainer, _ = fit(module)
    head, everything = set(module.head.parameters()), set(module.parameters())
    probe, tune = trainer.optimizers
    for optimizer, parameters, lr in ((probe, head, 0.1), (tune, everything, 0.01)):
        [group] = optimizer.param_groups
        assert set(group["params"]) == set(optimizer.state) == parameters
        assert group["lr"] == lr
    momenta = [optimizer.state[module.head.weight]["momentum_buffer"] for optimizer in (probe, tune)]
    assert not torch.equal(*momenta)


def test_a_phase_that_is_run_again_begins_with_an_empty_optimizer() -> None:
    repeated = new_module()
    apart = copy.deepcopy(repeated)
    fit(repeated, 2 * EPOCHS)
    for _ in range(2):
        fit(apart)
    assert same(repeated.state_dict(), apart.state_dict())


@pytest.mark.parametrize(("fused", "device"), [(False, "cpu"), (True, "meta")])
def test_stored_step_counters_return_to_where_the_optimizer_counts(fused: bool, device: str) -> None:
    """A fused one counts on the parameters' device, which is here said to be another one."""
    module = new_module()
    phase = replace(module.phases()[1], optimizer=partial(torch.optim.AdamW, fused=fused), persistent=True, epochs=1)
    with module.training_on([phase]):
        trainer, _ = fit(module, 1)
    module._device = torch.device("meta")
    module._enter(phase, 1)
    states = trainer.optimizers[0].state.values()
    assert [state["step"].device.type for state in states] == [device] * len(list(module.parameters()))
    assert {state["exp_avg"].device.type for state in states} == {"meta"}


class Counting(torch.optim.SGD):
    """Counts its steps as other libraries' optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        return super().step(closure)


def test_a_stored_step_counter_may_be_a_plain_number() -> None:
    module = new_module()
    with module.training_on([replace(module.phases()[1], optimizer=partial(Counting, lr=0.1), persistent=True, epochs=1)]):
        trainers = [fit(module, 1)[0] for _ in range(2)]
    counts = [{state["step"] for state in trainer.optimizers[0].state.values()} for trainer in trainers]
    assert counts == [{5}, {10}]
    assert all(type(count) is int for of_one in counts for count in of_one)


def test_each_phase_has_a_loss_of_its_own() -> None:
    """The mean over the examples of its last epoch."""
    trainer, watch = fit(new_module())
    assert trainer.callback_metrics.keys() == {"train/probe_loss", "train/tune_loss", "val/accuracy"}
    for name, epoch in (("probe", 1), ("tune", 3)):
        assert [size for _, size in watch.losses[epoch]] == [16, 16, 16, 16, 6]
        mean = sum(loss * size for loss, size in watch.losses[epoch]) / 70
        assert trainer.callback_metrics[f"train/{name}_loss"].item() == pytest.approx(mean)
    first, *_, last = (sum(loss for loss, _ in steps) for steps in watch.losses)
    assert last < first


class InSteps(PhasedModule):
    """Phases that are counted in steps and end within an epoch of 5 batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.validated: list[tuple[int, int]] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y)

    def phases(self) -> list[Phase]:
        optimizer, parameters = partial(torch.optim.SGD, lr=0.1), list(self.parameters())
        return [
            Phase("three", parameters, self.loss, optimizer, steps=3),
            Phase("seven", parameters, self.loss, optimizer, steps=7),
        ]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.validated.append((self.current_epoch, self.global_step))


def test_a_penalty_is_trained_and_logged_apart() -> None:
    class Penalised(InSteps):
        def phases(self) -> list[Phase]:
            return [replace(phase, penalty=lambda: 0.3 * self.layer.weight.square().sum()) for phase in super().phases()]

        def compute_gradients(self, batch: Any) -> Tensor:
            [weight] = [p for p in self.phase.parameters if p is self.layer.weight]
            own = self.phase.loss(batch)
            expected = torch.autograd.grad(own + 0.3 * weight.square().sum(), weight)[0]
            loss = super().compute_gradients(batch)
            assert torch.equal(loss, own.detach())
            torch.testing.assert_close(weight.grad, expected)
            return loss

    trainer, _ = fit(module := Penalised(), 3)
    assert trainer.callback_metrics["train/seven_penalty"].item() == pytest.approx(0.3 * module.layer.weight.square().sum().item())


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1.0, [(0, 3), (1, 8), (2, 10), (3, 13), (4, 18), (5, 20)]),
        (
            0.5,
            [
                (0, 1),
                (0, 2),
                (0, 3),
                (1, 5),
                (1, 7),
                (2, 9),
                (2, 10),
                (3, 11),
                (3, 12),
                (3, 13),
                (4, 15),
                (4, 17),
                (5, 19),
                (5, 20),
            ],
        ),
        (2, [(0, 2), (1, 5), (1, 7), (2, 10), (3, 12), (4, 15), (4, 17), (5, 20)]),
    ],
    ids=["each epoch", "half an epoch", "two batches"],
)
def test_it_is_validated_when_the_trainer_says_also_where_a_phase_ends_an_epoch(interval: Any, expected: Any) -> None:
    module = InSteps()
    assert module.num_epochs(5) == 3
    trainer = new_trainer(max_epochs=6, val_check_interval=interval, **QUIET)
    trainer.fit(module, batches(), batches())
    assert module.validated == expected


def test_early_stopping_stops() -> None:
    module, stop = InSteps(), L.pytorch.callbacks.EarlyStopping("val/loss", patience=1, min_delta=100.0)
    trainer = new_trainer(max_epochs=50, callbacks=[stop], **QUIET)
    trainer.fit(module, batches(), batches())
    assert len(module.validated) == 2


def test_what_was_frozen_stays_frozen() -> None:
    """In a second fit, too, which begins with the first phase."""
    module = new_module()
    module.body[0].requires_grad_(False)
    before = state_of(module)
    frozen = {"body.0.weight"}
    for _ in range(2):
        _, watch = fit(module)
        assert changed(watch.states[0], watch.states[2]) == {"head.weight", "head.bias"}
        assert changed(before, module.state_dict()) == before.keys() - frozen
        assert {name for name, parameter in module.named_parameters() if not parameter.requires_grad} == frozen


def test_after_a_fit_it_is_a_module_like_any_other() -> None:
    module = new_module()
    trainer, _ = fit(module)
    after = state_of(module)
    accuracy = trainer.callback_metrics["val/accuracy"].item()
    assert trainer.validate(module, batches(), verbose=False) == [{"val/accuracy": pytest.approx(accuracy)}]
    assert trainer.test(module, batches(), verbose=False) == [{"test/accuracy": pytest.approx(accuracy)}]
    assert same(module.state_dict(), after)
    assert all(part.training for part in module.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    fresh = new_module()
    fresh.load_state_dict(after)
    x, _ = next(iter(batches()))
    assert torch.equal(fresh.eval()(x), module.eval()(x))


def test_before_a_fit_there_is_no_phase() -> None:
    module = new_module()
    assert new_trainer(logger=False, enable_progress_bar=False).test(module, batches(), verbose=False)[0].keys() == {
        "test/accuracy"
    }
    with pytest.raises(FederationError, match="ProbeThenTune is in no phase"):
        module.compute_gradients(next(iter(batches())))


def test_a_module_without_phases_says_what_it_lacks() -> None:
    with pytest.raises(NotImplementedError, match=r"PhasedModule must override phases\(\)"):
        PhasedModule().num_epochs(1)


@pytest.fixture(autouse=True)
def leave_nothing(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.iterdir())
