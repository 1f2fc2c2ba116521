"""Steps of several batches, and calls outside of a federation."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from tiny import CLASSES, Net, data_for, new_data, new_federation, new_method, new_trainer, sgd
from tiny_files import write_csv

from lightning_fed.data import CSVFiles
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, FedHM, FedProto, FedProx

WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 3.0])
"""Of the classes."""


def trained(batch_size: int, accumulate: int, method: type[FedAvg] = FedAvg, **options: Any) -> torch.Tensor:
    data = new_data(1, 65, batch_size=batch_size, val_share=0.0, test_share=0.2)  # of 52, the last step of an epoch has 4
    module = method(Net, CLASSES, optimizer=sgd, epochs=2, accumulate=accumulate, **options)
    federation = new_federation(2)
    federation.fit(module, data)
    return torch.cat([tensor.flatten() for tensor in federation.run.server.state_dict().values()])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAvg, {}),
        (FedProx, {"mu": 0.5}),
        (FedHM, {"ratios": [1.0], "layers": ["fc2"], "decay": 0.1}),  # a full network, whose penalty is constant
        (FedHM, {"ratios": [0.5], "layers": ["fc2"], "decay": 0.1}),
        (FedAvg, {"gradient_clip": 0.01}),
        (FedAvg, {"loss": torch.nn.CrossEntropyLoss(ignore_index=0)}),  # a mean over what it does not ignore
        (FedAvg, {"loss": torch.nn.CrossEntropyLoss(WEIGHTS)}),  # a weighted mean
        (FedAvg, {"loss": torch.nn.CrossEntropyLoss(WEIGHTS / 100, ignore_index=0, label_smoothing=0.2)}),
        (FedAvg, {"loss": partial(torch.nn.functional.cross_entropy, weight=WEIGHTS, ignore_index=0)}),
    ],
)
def test_a_step_of_small_batches_is_one_of_a_large_one(method: type[FedAvg], options: dict[str, Any]) -> None:
    whole, parts = trained(24, 1, method, **options), trained(8, 3, method, **options)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert (trained(8, 1, method, **options) - whole).abs().max() > 1e-4


@pytest.mark.parametrize(("steps", "options"), [(5, {}), (4, {"ignore_index": 0}), (4, {"weight": WEIGHTS})])
def test_steps_are_counted_and_logged_as_they_are_taken(steps: int, options: dict[str, Any]) -> None:
    """The loss of an epoch is a mean over what the loss of a step is a mean of."""
    rows, loss = [], torch.nn.CrossEntropyLoss(**options)
    for batch_size, accumulate in ((24, 1), (8, 3)):
        federation = new_federation(1)
        data = new_data(1, 60, batch_size=batch_size, val_share=0.0, test_share=0.2)  # two steps an epoch
        federation.fit(FedAvg(Net, CLASSES, sgd, steps=steps, accumulate=accumulate, loss=loss), data)
        rows += federation.run.history
    assert rows[0]["train/local_loss"] == pytest.approx(rows[1]["train/local_loss"], rel=1e-5)
    assert rows[0]["compute/flops"] == rows[1]["compute/flops"]


def test_prototypes_of_the_last_epoch_are_of_all_its_batches() -> None:
    rows = []
    for batch_size, accumulate in ((24, 1), (8, 3)):
        federation = new_federation(1)
        module = FedProto(Net, CLASSES, optimizer=sgd, prototypes="last_epoch", accumulate=accumulate)
        federation.fit(module, new_data(2, 96, batch_size=batch_size))
        rows.append(federation.run.server.state["prototypes"])
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PF2LoRA", "has a training step of its own"),
        ("PFedMe", "has a loss that is not a mean"),
        ("APFL", "has a loss that is not a mean"),
        ("FedAS", "has a loss that is not a mean"),
        ("FedKD", "has a loss that is not a mean"),
        ("PFedGate", "has a loss that is not a mean"),
        ("FD", "has a loss that is not a mean"),
    ],
)
def test_steps_of_a_kind_of_their_own_take_no_more_batches(name: str, why: str) -> None:
    options: dict[str, Any] = {"average": "taught"} if name == "FD" else {}
    with pytest.raises(FederationError, match=f"accumulate is 2, but {name} {why}"):
        new_method(name, accumulate=2, **options)


def test_a_partial_likelihood_is_no_mean() -> None:
    with pytest.raises(FederationError, match="a partial likelihood"):
        FedAvg(Net, 1, task="survival", accumulate=2)


def test_tokens_weigh_alike_whatever_their_batch() -> None:
    module = FedAvg(Net, CLASSES, accumulate=2)
    module.configure_model()
    targets = torch.tensor([[1, 2, -100], [3, -100, -100]])
    assert module.loss_terms((torch.zeros(2, 3), targets)) == 3


def test_public_examples_weigh_alike_whatever_their_numbers() -> None:
    """Their batches have these in place of targets, which class weights are for."""
    federation = new_federation(1)
    method = new_method("DSFL", loss=torch.nn.CrossEntropyLoss(WEIGHTS), accumulate=2)
    federation.fit(method, data_for("DSFL", num_clients=2, size=60))
    assert len(federation.run.history) == 1


@pytest.mark.parametrize(
    ("option", "remedy"), [({"accumulate_grad_batches": 4}, "accumulate=4"), ({"gradient_clip_val": 1.0}, "gradient_clip=1.0")]
)
def test_what_a_trainer_would_do_to_gradients_is_an_option_of_the_module(option: dict[str, Any], remedy: str) -> None:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1, **option
    )
    with pytest.raises(FederationError, match=rf"FedAvg calls the optimizer itself: pass {remedy} to the module instead"):
        trainer.fit(FedAvg(Net, CLASSES), datamodule=new_data().client(0))

    def built(**others: Any) -> L.Trainer:
        return new_trainer(**option, **others)

    with pytest.raises(FederationError, match=f"pass {remedy} to the module instead"):
        new_federation(1, trainer=built).fit(FedAvg(Net, CLASSES), new_data())


def test_batches_to_overfit_are_refused_with_a_clients_data_and_all_clients() -> None:
    """Lightning's sampler would give single examples for batches."""
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    write_csv(Path("table.csv"))
    read = CSVFiles("table.csv", "kind", client="user", split_column="split")
    read.setup()
    for data in (new_data().client(0), new_data(), read):
        with pytest.raises(FederationError, match=r"overfit_batches=2, .* give it limit_train_batches"):
            new_trainer(max_epochs=1, overfit_batches=2, **options).fit(FedAvg(Net, CLASSES), datamodule=data)


def test_a_module_answers_before_anybody_trains_it() -> None:
    net = Net(CLASSES)
    x = next(iter(new_data().client(0).train_dataloader()))[0].float()
    assert torch.equal(FedAvg(net)(x), net(x))
    assert FedAvg(Net, CLASSES)(x).shape == (len(x), CLASSES)
    with pytest.raises(FederationError, match="give num_classes"):
        FedAvg(Net)(x)


def test_predictions_are_of_inputs_with_or_without_targets() -> None:
    module, batch = FedAvg(Net, CLASSES), next(iter(new_data().client(0).test_dataloader()))
    batch = batch[0].float(), batch[1]
    assert torch.equal(module.predict_step(batch), module(batch[0]))
    assert torch.equal(module.predict_step(batch[0]), module(batch[0]))
    assert torch.equal(module.predict_step([batch[0]]), module(batch[0]))
    pixels = {"pixel_values": batch[0]}
    assert torch.equal(module.predict_step(pixels | {"labels": batch[1]}), module(batch[0]))


def test_an_optimizer_of_parameters_is_refused() -> None:
    with pytest.raises(
        FederationError, match=r"optimizer is an object of Adam, but each client needs its own.*partial\(torch.optim.Adam"
    ):
        FedAvg(Net, CLASSES, torch.optim.Adam(Net(CLASSES).parameters()))


def test_the_search_for_a_learning_rate_says_what_searches_here() -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)
    with pytest.raises(
        FederationError, match="FedAvg has one per phase: compare learning rates on validation data instead, with tune"
    ):
        Tuner(trainer).lr_find(FedAvg(Net, CLASSES), datamodule=new_data().client(0), attr_name="optimizer")
