"""A last batch of one example joins the batch before, is left out or is kept; one that nothing can be learned from is refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from often import FEW, mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    Net,
    NoisyNet,
    Recording,
    assert_same,
    momentum,
    new_data,
    new_federation,
    new_method,
    new_trainer,
)
from torch import Tensor, nn

import lightning_fed.methods
from lightning_fed.core.phase import Phase
from lightning_fed.data import ByColumn, InMemory, Partitioner, ShuffledBatches
from lightning_fed.data.batches import SingleExample, batches_of, num_batches
from lightning_fed.data.partition.pools import Indices
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.federation.cohorts import says_itself_who
from lightning_fed.methods import FedAvg, Standalone
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.models import Adapters

ON_ANY_NETWORK = [name for name in METHODS if not issubclass(getattr(lightning_fed.methods, name), AdapterModule)]
assert {"FedAvg", "PFedLoRA", "SplitMix"} <= {*ON_ANY_NETWORK}

SIZES = [(0, 4), (1, 4), (4, 4), (5, 4), (6, 4), (9, 4), (1, 1), (3, 1), (2, 8)]


class ByHand(Partitioner):
    """Clients of given numbers of training examples, 17, 33 and 20 by default, and 4 for test each."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes or (17, 33, 20)

    def pools(self, train_labels: Any, test_labels: Any, num_clients: int, seed: int) -> tuple[list[Indices], list[Indices]]:
        ends = np.cumsum(self.sizes)
        return np.split(np.arange(ends[-1]), ends[:-1]), np.split(np.arange(4 * len(self.sizes)), len(self.sizes))


def data_of(*sizes: int, **options: Any) -> InMemory:
    """Clients of given numbers of training examples, and batches of 16."""
    whole = new_data(1, 200)
    whole.setup()
    images, labels = whole.client(0).data.images, whole.client(0).data.labels
    partition = ByHand(*sizes)
    own = {"split": "official", "val_share": 0.0, "batch_size": 16, "num_clients": len(partition.sizes), "partition": partition}
    own["public"] = new_data(1, 24)  # for those who need it
    return InMemory(images, labels, CLASSES, images[:40], labels[:40], **own | options)


# ---------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize(("examples", "size"), SIZES)
@pytest.mark.parametrize("single_example", ["join", "drop", "keep"])
def test_as_many_batches_as_the_loader_says(examples: int, size: int, single_example: SingleExample) -> None:
    batches = [batch for batch in batches_of(torch.arange(examples), size, single_example) if len(batch)]
    assert (
        len(batches)
        == num_batches(examples, size, single_example)
        == len(ShuffledBatches(torch.arange(examples), size, 0, single_example))
    )
    alone = examples > size > 1 and examples % size == 1
    assert sum(map(len, batches)) == examples - (alone and single_example == "drop")
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    if alone:
        assert len(batches[-1]) == {"join": size + 1, "drop": size, "keep": 1}[single_example]


def test_the_order_is_that_of_the_batches_that_are_kept() -> None:
    joined, kept, dropped = (list(ShuffledBatches(torch.arange(33), 16, 5, lone)) for lone in ("join", "keep", "drop"))
    assert torch.equal(torch.cat(joined), torch.cat(kept))
    assert torch.equal(torch.cat(dropped), torch.cat(kept)[:32])


def test_another_example_is_left_out_in_each_epoch() -> None:
    batches = ShuffledBatches(torch.arange(33), 16, 5, "drop")
    left_out = set()
    for epoch in range(8):
        batches.set_epoch(epoch)
        left_out |= set(range(33)) - set(torch.cat(list(batches)).tolist())
    assert len(left_out) > 4


# --------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", mostly_slow(ON_ANY_NETWORK, FEW))
def test_every_method_trains_with_batch_norm(name: str) -> None:
    engine = Recording()
    federation = new_federation(1, engine=engine)
    federation.fit(new_method(name, backbone=NoisyNet), data_of())
    trained = {update.client for update in engine.trained}
    alone = says_itself_who(federation.run.model) and len(trained) == 1  # who has everybody's examples, or whose round it is
    assert alone or trained >= {0, 1}


class Counting(L.Callback):
    """The sizes of the batches that were trained on."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sizes.append(len(batch[1]))


@pytest.mark.parametrize(("single_example", "sizes"), [("join", [16, 17]), ("drop", [16, 16]), ("keep", [16, 16, 1])])
def test_steps_and_epochs_are_counted_as_they_are_done(single_example: SingleExample, sizes: list[int]) -> None:
    client, counting = data_of(single_example=single_example).client(1), Counting()
    module = new_method("FedAvg")
    assert module.for_client(client.info).num_epochs(len(client.train_dataloader())) == 1
    trainer = new_trainer(**QUIET, max_epochs=2, limit_val_batches=0, callbacks=[counting])
    trainer.fit(module, datamodule=client)
    assert counting.sizes == 2 * sizes
    assert trainer.global_step == 2 * len(sizes) == 2 * len(client.train_dataloader())


def test_flops_are_those_of_the_examples() -> None:
    """A linear network's are proportional to them."""

    def flops(single_example: SingleExample, *sizes: int) -> float:
        federation = new_federation(1)
        return federation.fit(new_method("FedAvg"), data_of(*sizes, single_example=single_example))[-1]["compute/flops"]

    assert flops("join", 17) == flops("keep", 17)
    assert flops("drop", 17) == flops("join", 16)
    assert flops("join", 17) * 16 == flops("join", 16) * 17


def test_limits_count_batches_that_are_joined() -> None:
    counting = Counting()
    trainer = new_trainer(**QUIET, max_epochs=1, limit_train_batches=1, limit_val_batches=0, callbacks=[counting])
    trainer.fit(new_method("FedAvg", backbone=NoisyNet), datamodule=data_of().client(0))
    assert counting.sizes == [17]


def test_statistics_are_of_all_examples_whatever_is_dropped() -> None:
    client = data_of(single_example="drop").client(0)
    assert [len(labels) for _, labels in client.predict_dataloader()] == [17]


# ----------------------------------------------------------------------------------------------------------------- errors


class NeverFits(L.Trainer):
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a turn began")


def refused(model: Any, data: InMemory, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        new_federation(3, trainer=partial(NeverFits, accelerator="cpu", devices=1)).fit(model, data)


@pytest.mark.parametrize("name", [name for name in ON_ANY_NETWORK if name != "Centralized"])  # who has everybody's
def test_one_training_example_is_refused_with_batch_norm_before_the_run(name: str) -> None:
    refused(
        new_method(name, backbone=NoisyNet),
        data_of(20, 1, 20),
        r"^Client 1 has one training example, which is too few for .*BatchNorm1d '(.*norm|gate.importance.2)'",
    )


def test_one_training_example_is_enough_without_batch_norm() -> None:
    history = new_federation(1).fit(new_method("FedAvg"), data_of(20, 1, 20))
    assert history[-1]["after/test_accuracy/mean"] >= 0


class Convolutional(NoisyNet):
    """With a batch norm that sees 4 × 4 values of a channel in one image."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes)
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.first = nn.BatchNorm2d(3)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return super().encode(self.first(x), cut)


def test_one_image_is_enough_where_batch_norm_sees_many_values_of_it() -> None:
    new_federation(1).fit(FedAvg(Convolutional, CLASSES, momentum), data_of(20, 1, 20))


def test_only_the_networks_of_such_clients_matter() -> None:
    for first in (Convolutional, Net):  # the second has no batch norm
        refused(Standalone([first, NoisyNet], CLASSES, momentum), data_of(1, 1, 20), "^Client 1 has one training example")
    new_federation(1).fit(Standalone([NoisyNet, Convolutional], CLASSES, momentum), data_of(20, 1, 20))


class Still(FedAvg):
    """Whose batch norm stays in eval mode."""

    def phases(self) -> list[Phase]:
        return [replace(phase, eval_modules=[self.backbone.norm]) for phase in super().phases()]  # type: ignore[list-item]


def test_a_batch_norm_that_is_in_eval_mode_does_not_matter() -> None:
    new_federation(1).fit(Still(NoisyNet, CLASSES, momentum), data_of(1, 20))


def test_a_frozen_batch_norm_does_not_matter() -> None:
    adapters = Adapters(2, target_modules=["fc1"])
    new_federation(1).fit(FedAvg(NoisyNet, CLASSES, momentum, adapters=adapters), data_of(1, 20))


def test_what_is_refused_would_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.federation.run.refuse_single_examples", lambda *args: None)
    for data in (data_of(20, 1), data_of(17, single_example="keep"), data_of(4, batch_size=1)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            new_federation(1).fit(new_method("FedAvg", backbone=NoisyNet), data)


def test_remedies() -> None:
    model = FedAvg(NoisyNet, CLASSES, momentum)
    refused(
        model,
        data_of(20, 33, single_example="keep"),
        "^Client 1 trains in batches, the last of .* set the data's single_example to join",
    )
    refused(model, data_of(20, 20, batch_size=1), "^Client 0 trains in batches, of which each .* set batch_size to at least 2")
    whole = new_data(1, 60).client(0).data
    users = ["a"] * 30 + ["b"] * 2 + ["c"] * (len(whole) - 32)
    named = InMemory(whole.images, whole.labels, CLASSES, columns={"user": users}, partition=ByColumn("user"))
    refused(model, named, r"^Client 1 has one training example.* ByColumn\(column='user', min_examples=3\), to leave")


def test_looking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [new_federation(1) for _ in range(2)]
    for federation in runs:
        federation.fit(FedAvg(Convolutional, CLASSES, momentum), data_of(20, 1, 20))
        monkeypatch.setattr("lightning_fed.federation.run.refuse_single_examples", lambda *args: None)
    assert_same(*runs)
