"""Federated data: sizes, sharing, batches, and a client as an ordinary Lightning datamodule."""

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from tiny import Net, new_federation
from torch import Tensor, nn

from lightning_fed.data import (
    IID,
    ClassesPerClient,
    Digits,
    DirichletPerClass,
    DirichletPerClient,
    FederatedDataModule,
    InMemory,
    Partitioner,
    ShuffledBatches,
    checksum,
)
from lightning_fed.data.federated import Pools, pools_of
from lightning_fed.data.partition.pools import Indices
from lightning_fed.data.public import PublicShare
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg


def numbered(count: int = 6000, tests: int = 0, classes: int = 10, **options: Any) -> InMemory:
    """Examples whose first two pixels tell their number."""
    numbers = torch.arange(count + tests)
    images = torch.zeros(count + tests, 3, 4, 4, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = numbers // 256, numbers % 256
    labels = numbers % classes
    return InMemory(images[:count], labels[:count], classes, images[count:], labels[count:], **options)


def numbers_of(images: Tensor) -> Tensor:
    return images[:, 0, 0, 0].long() * 256 + images[:, 0, 0, 1].long()


class Linear(L.LightningModule):
    """The smallest thing Lightning trains; remembers what it saw."""

    def __init__(self, pixels: int = 48) -> None:
        super().__init__()
        self.layer = nn.Linear(pixels, 10)
        self.seen: list[Tensor] = []
        self.orders: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self.seen.append(images)
        self.orders.append(labels)
        return nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.layer(batch[0].flatten(1))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.layer(batch[0].flatten(1)).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", **QUIET, **options)


# ---------------------------------------------------------------------------------------------- splits


def test_pooled_split_is_8_1_1() -> None:
    data = numbered(60_000, partition=ClassesPerClient(2, jitter=False))
    assert {(c.num_train, c.num_val, c.num_test) for c in data.clients} == {(4800, 600, 600)}
    assert [c.id for c in data.clients] == list(range(10))


def test_pooled_split_is_disjoint_and_complete() -> None:
    data = numbered()
    parts = [p for k in range(10) for p in data.client(k).splits]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(6000))


def test_pooled_joins_both_sets() -> None:
    assert numbered(5000, 1000).pooled().info.num_train == pytest.approx(4800, abs=10)


def test_official_split_tests_on_the_official_set_and_validates_on_the_training_set() -> None:
    data = numbered(5000, 1000, split="official", val_share=0.2, partition=ClassesPerClient(2, jitter=False))
    assert {(c.num_train, c.num_val, c.num_test) for c in data.clients} == {(400, 100, 100)}
    for k in range(10):
        train, val, test = data.client(k).splits
        assert max(train.max(), val.max()) < 5000 <= test.min()
        assert set(train.numpy() % 10) == set(test.numpy() % 10)


def test_feddecomp_protocol() -> None:
    data = numbered(20_000, 4000, split="official", val_share=0, partition=DirichletPerClient(0.3), num_clients=30)
    assert {(c.num_train, c.num_val, c.num_test) for c in data.clients} == {(500, 0, 100)}
    assert data.client(0).val_dataloader() == []


def test_nobody_trains_on_what_anyone_is_measured_on() -> None:
    """Also if clients share examples. With validation data, a client has as many examples as without."""
    data = numbered(5000, 1000, split="official", partition=DirichletPerClient(0.3, samples=1000))
    train, val, test = (np.concatenate([data.client(k).splits[part] for k in range(10)]) for part in range(3))
    assert not np.isin(np.concatenate([val, test]), train).any()
    assert {client.num_train + client.num_val for client in data.clients} == {1000}
    assert len(val) == pytest.approx(1000, abs=100)
    pooled = data.pooled()
    parts = [set(p.tolist()) for p in pooled.splits]
    assert not parts[0] & parts[1]
    assert not parts[1] & parts[2]
    assert not parts[0] & parts[2]
    assert parts == [set(train), set(val), set(test)]
    assert pooled.info.id == -1
    assert pooled.info.num_train == len(parts[0]) == sum(pooled.info.label_counts)


def test_label_counts_are_the_training_labels() -> None:
    data = numbered()
    counts = data.label_counts()
    assert counts.shape == (10, 10)
    assert ((counts > 0).sum(1) == 2).all()
    labels = data.client(3).splits[0] % 10
    assert counts[3].tolist() == torch.bincount(labels, minlength=10).tolist() == list(data.clients[3].label_counts)


def test_majority_accuracy_by_hand() -> None:
    class Given(Partitioner):
        def pools(self, *args: Any) -> tuple[list[Indices], list[Indices]]:
            return [np.arange(10), np.arange(10, 20)], [np.arange(4), np.arange(4, 8)]

    # Client 0 trains on 6 twos and 4 ones: it guesses 2, right for 3 of 4.
    # Client 1 trains on 5 zeros and 5 ones: it guesses 0, right for 1 of 4.
    train = torch.tensor([2] * 6 + [1] * 4 + [1, 0] * 5)
    test = torch.tensor([2, 2, 2, 1, 1, 1, 0, 1])
    data = InMemory(
        torch.zeros(20, 1),
        train,
        3,
        torch.zeros(8, 1),
        test,
        num_clients=2,
        partition=Given(),
        split="official",
        val_share=0,
    )
    data.setup()
    assert data.label_counts().tolist() == [[0, 4, 6], [5, 5, 0]]
    assert data.majority_accuracy().tolist() == [0.75, 0.25]


def test_fingerprint_tells_data_and_splits_apart() -> None:
    prints = [
        numbered().fingerprint(),
        numbered(seed=1).fingerprint(),
        numbered(num_clients=5).fingerprint(),
        numbered(val_share=0.2).fingerprint(),
        numbered(classes=5).fingerprint(),
    ]
    assert len(set(prints)) == 5
    assert prints[0] == numbered().fingerprint()
    assert int(prints[0], 16) >= 0


def test_the_fingerprint_is_that_of_the_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(change: tuple[int, int] | None = None, kind: str = "plain") -> str:
        inputs = torch.arange(80.0).reshape(40, 2)
        if change is not None:
            inputs[change] += 1
        given = {
            "named": {"x": torch.zeros(40, 1), "y": inputs},
            "other way": inputs.T.contiguous().T,
            "bytes": inputs.byte()[..., None],
        }
        return InMemory(given.get(kind, inputs), torch.arange(40) % 4, partition=IID(), num_clients=2).fingerprint()

    kinds = ["plain", "named", "bytes"]
    assert len({fingerprint(change, kind) for kind in kinds for change in (None, (0, 0), (39, 1))}) == 9
    assert fingerprint(kind="other way") == fingerprint()
    monkeypatch.setattr(checksum, "PIECE", 16)
    assert fingerprint() == (whole := fingerprint()) != fingerprint((39, 1))
    monkeypatch.setattr(checksum, "MOST", 40 * 2 * 4 // 10)
    assert len({whole, fingerprint(), fingerprint((0, 0)), fingerprint((10, 0))}) == 4
    assert fingerprint((11, 0)) == fingerprint()  # each tenth row counts


def test_all_clients_share_one_tensor_of_bytes() -> None:
    data = numbered()
    data.setup()
    tensors = {data.client(k).data.images.data_ptr() for k in range(10)} | {data.pooled().data.images.data_ptr()}
    assert len(tensors) == 1
    assert data.client(0).data.images.dtype == torch.uint8


class Unnumbered(FederatedDataModule):
    """Does not say how many classes there are."""

    def load(self) -> Pools:
        return pools_of(torch.zeros(40, 4), torch.arange(40) % 2)


def test_data_that_do_not_say_their_number_of_classes_are_told_to() -> None:
    data = Unnumbered(num_clients=2, partition=IID())
    with pytest.raises(FederationError, match="Unnumbered has no num_classes: set it in the class"):
        new_federation(1).fit(FedAvg(Net), data)
    data.num_classes = 2
    data.setup()
    assert data.num_labels == 2


def test_setup_loads_once() -> None:
    calls = []

    class Counting(InMemory):
        def load(self) -> Any:
            calls.append(1)
            return super().load()

    data = Counting(torch.zeros(100, 1), torch.arange(100) % 2, 2)
    data.setup()
    data.setup("fit")
    data.client(0)
    assert calls == [1]


# ---------------------------------------------------------------------------------------------- batches


def test_shuffled_batches_hold_every_example_once() -> None:
    batches = list(ShuffledBatches(torch.arange(100, 203), batch_size=10, seed=0))
    assert [len(b) for b in batches] == [10] * 10 + [3]
    assert torch.cat(batches).sort().values.tolist() == list(range(100, 203))
    assert len(ShuffledBatches(torch.arange(103), 10, 0)) == 11
    assert len(ShuffledBatches(torch.arange(100), 10, 0)) == 10


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        batches = ShuffledBatches(torch.arange(50), 8, seed)
        batches.set_epoch(epoch)
        torch.manual_seed(seed + 7 * epoch)
        return torch.cat(list(batches)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_loaders_give_bytes_and_int64_labels() -> None:
    client = numbered().client(0)
    images, labels = next(iter(client.train_dataloader()))
    assert (images.dtype, labels.dtype, tuple(images.shape)) == (torch.uint8, torch.int64, (64, 3, 4, 4))
    seen = torch.cat([numbers_of(images) for images, _ in client.train_dataloader()])
    assert torch.equal(seen.sort().values, client.splits[0])


def test_evaluation_is_in_order() -> None:
    client = numbered(eval_batch_size=25).client(1)
    batches = list(client.test_dataloader())
    assert torch.equal(torch.cat([numbers_of(images) for images, _ in batches]), client.splits[2])
    assert max(len(labels) for _, labels in batches) == 25


def test_a_client_trains_alone_with_a_new_order_each_epoch() -> None:
    data = numbered(1000, num_clients=2, batch_size=50, partition=IID())
    client, module = data.client(0), Linear()
    client.order_seed = 5
    trainer(max_epochs=2).fit(module, client)
    assert len(module.seen) == 2 * 8
    epochs = [torch.cat(module.orders[:8]), torch.cat(module.orders[8:])]
    assert not torch.equal(*epochs)
    again = Linear()
    trainer(max_epochs=1).fit(again, client)
    assert torch.equal(torch.cat(again.orders), epochs[0])


def test_batches_are_normalized_after_transfer() -> None:
    data = numbered(1000, num_clients=2, batch_size=400, partition=IID())
    data.mean, data.std = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)
    client, module = data.client(0), Linear()
    trainer(max_epochs=1).fit(module, client)
    raw = next(iter(client.train_dataloader()))[0]
    expected = (raw.double() / 255 - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.std).view(3, 1, 1)
    torch.testing.assert_close(module.seen[0].double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
def test_batches_have_the_trainers_precision(precision: Any, dtype: torch.dtype) -> None:
    module = Linear()
    trainer(max_epochs=1, precision=precision).fit(module, numbered(500).client(0))
    assert module.seen[0].dtype == dtype


def test_training_batches_alone_are_augmented() -> None:
    data = numbered(500, num_clients=1, partition=IID(), augment="crop_flip", batch_size=400, eval_batch_size=400)
    module = Linear()
    trainer(max_epochs=1).fit(module, data.client(0))
    plain = next(iter(data.client(0).train_dataloader()))[0] / 255
    assert not torch.equal(module.seen[0], plain)
    seen: list[Tensor] = []
    module.test_step = lambda batch, batch_idx: seen.append(batch[0])  # type: ignore[assignment, method-assign]
    trainer().test(module, data.client(0), verbose=False)
    torch.testing.assert_close(seen[0], next(iter(data.client(0).test_dataloader()))[0] / 255)


def test_the_federation_itself_is_the_pooled_data() -> None:
    data = numbered(1000, batch_size=800)
    module = Linear()
    trainer(max_epochs=1).fit(module, data)
    assert len(torch.cat(module.orders)) == data.pooled().info.num_train
    assert module.seen[0].max() <= 1
    trainer().test(module, data, verbose=False)


def test_floats_reach_the_module_unchanged() -> None:
    features = torch.randn(100, 48)
    data = InMemory(features, torch.arange(100) % 10, 10, num_clients=1, partition=IID(), batch_size=100)
    module = Linear()
    trainer(max_epochs=1).fit(module, data.client(0))
    assert torch.equal(module.seen[0].sort(0).values, features[data.client(0).splits[0]].sort(0).values)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "official", "test_share": 0.1}, "test_share=0.1 with split=official"),
        ({"split": "offical"}, "split='offical': give one of pooled, official"),
        ({"augment": "mixup"}, "augment='mixup'"),
        ({"val_share": 0.9}, "val_share=0.9 and test_share=0.1"),
        ({"test_share": 0.0}, "test_share=0.0"),
        ({"val_share": -0.1}, "val_share=-0.1"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"eval_batch_size": -1}, "eval_batch_size=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"partition_seed": -1}, "partition_seed=-1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        numbered(**options)


def test_a_client_too_small_to_split_is_refused() -> None:
    with pytest.raises(FederationError, match=r"Client 0 has 4 examples \(4 train \+ 0 val \+ 0 test\).*num_clients.*val_share"):
        numbered(40, partition=IID()).setup()


def test_overlapping_clients_cannot_be_pooled() -> None:
    with pytest.raises(FederationError, match=r"DirichletPerClient share examples.*split to official"):
        numbered(partition=DirichletPerClient(0.3)).setup()


def test_a_missing_official_test_set_is_refused() -> None:
    with pytest.raises(FederationError, match="Digits has no official test set: set split to pooled"):
        Digits(split="official").setup()


@pytest.mark.parametrize("partition", [ClassesPerClient(2), DirichletPerClass(1.0), DirichletPerClient(1.0, 20, 2)], ids=repr)
def test_pools_of_different_classes_are_refused(partition: Partitioner) -> None:
    tests = torch.tensor([0, 1, 3]).repeat(3)  # as many classes, but not the same
    data = InMemory(torch.zeros(90, 1), torch.arange(90) % 3, 4, torch.zeros(9, 1), tests, split="official", partition=partition)
    with pytest.raises(FederationError, match="2 classes are in only one of"):
        data.setup()


def test_no_examples_are_refused() -> None:
    with pytest.raises(FederationError, match="InMemory has no images"):
        InMemory(torch.zeros(0, 1), torch.zeros(0), 3).setup()


def test_a_client_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FederationError, match="no client 10: ids go from 0 to 9"):
        numbered().client(10)


def test_a_failed_setup_leaves_nothing_behind() -> None:
    data = numbered(100, partition=DirichletPerClass(1e-8), num_clients=90)
    for _ in range(2):
        with pytest.raises(FederationError, match="alpha"):
            data.setup()


def test_load_must_be_written() -> None:
    with pytest.raises(NotImplementedError, match="override load"):
        FederatedDataModule().setup()


def test_the_partitions_own_seed_says_who_holds_what_whatever_the_runs_seed() -> None:
    def held(**seeds: Any) -> str:
        return numbered(num_clients=3, **seeds).fingerprint()

    assert held(seed=5) == held(seed=5, partition_seed=5) == held(seed=1, partition_seed=5) != held(seed=1)
    assert numbered(seed=1, partition_seed=5).client(0).order_seed == 1


def test_the_partitions_own_seed_says_what_is_public() -> None:
    def public(**seeds: Any) -> list[int]:
        return numbered(public=PublicShare(0.2), **seeds).public_set().splits[0].tolist()

    assert public(seed=5) == public(seed=1, partition_seed=5) != public(seed=1)


@pytest.mark.parametrize("split", ["pooled", "official"])
def test_a_quick_try_draws_some_of_each_clients_examples(split: Any) -> None:
    given = {"tests": 600, "partition": DirichletPerClass(0.5), "split": split, "num_clients": 4, "val_share": 0.01}
    whole, some = numbered(**given), numbered(**given, limit_examples=20)
    whole.setup()
    some.setup()
    for all_of_client, drawn in zip(whole._splits, some._splits, strict=True):
        for everything, part in zip(all_of_client, drawn, strict=True):
            assert len(part) == min(20, len(everything))
            assert set(part) <= set(everything)
        assert not np.array_equal(drawn.train, all_of_client.train[:20])  # not the first ones, which may be of one class
    assert [client.num_train for client in some.clients] == [20] * 4
    again = numbered(**given, limit_examples=20)
    assert again.fingerprint() == some.fingerprint() != whole.fingerprint()
    with pytest.raises(FederationError, match="limit_examples=0: give a whole number from 1"):
        numbered(limit_examples=0)
