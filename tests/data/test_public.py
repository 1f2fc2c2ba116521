"""Inputs that belong to nobody."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny import new_texts
from tiny_files import write_arrays
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_fed.data import IID, ByColumn, ClassesPerClient, CSVFiles, Digits, FederatedDataModule, InMemory, PublicShare
from lightning_fed.data.batches import INPUT, TARGETS
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError

LABELS = torch.arange(200) % 4


def images(channels: int = 3, size: int = 8, count: int = 200, seed: int = 0) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=stream)


def owned(data: FederatedDataModule) -> set[int]:
    """Rows that any client holds."""
    return {int(row) for client in range(data.num_clients) for part in data.client(client).splits for row in part}


def public_inputs(data: FederatedDataModule) -> Any:
    """All of them, as they are stored."""
    module = data.public_set()
    return module.data[module.splits[0]][0]


@pytest.mark.parametrize("split", ["pooled", "official"])
def test_a_share_is_nobodys(split: Any) -> None:
    data = InMemory(images(), LABELS, 4, images(count=40), LABELS[:40], split=split, num_clients=4, public=PublicShare(0.1))
    module = data.public_set()
    rows = module.splits[0]
    assert len(rows) == module.info.num_train == 20
    assert int(rows.max()) < 200  # of the training set
    assert not owned(data) & set(rows.tolist())
    assert len(owned(data) | set(rows.tolist())) == 240
    assert torch.equal(public_inputs(data), torch.cat([images(), images(count=40)])[rows])


def test_without_public_data_everything_is_as_before() -> None:
    plain, with_other = (
        InMemory(images(), LABELS, 4, num_clients=4, public=public) for public in (None, InMemory(images(seed=1), LABELS, 4))
    )
    for client in range(4):
        for one, other in zip(plain.client(client).splits, with_other.client(client).splits, strict=True):
            assert torch.equal(one, other)
    assert plain.fingerprint() != with_other.fingerprint()
    with pytest.raises(FederationError, match=r"needs public data, and there are none: set data\.init_args\.public"):
        plain.public_set()


def test_what_is_public_is_a_function_of_the_seed() -> None:
    rows = [InMemory(images(), LABELS, 4, seed=seed, public=PublicShare(0.1)).public_set().splits[0] for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_examples_are_numbered_and_have_no_labels() -> None:
    """In whatever order: the number is that of the input. Other labels give the same bits."""
    module = Digits(image_size=8, num_clients=2, public=PublicShare(0.05)).public_set()
    inputs, numbers = module.data[module.splits[0]]
    assert torch.equal(numbers, torch.arange(len(numbers)))
    for batch, of_batch in module.train_dataloader():
        assert torch.equal(batch, inputs[of_batch])
    assert (module.data.labels == -1).sum() == len(module.data.labels) - len(numbers)

    def batches(labels: Tensor) -> list[Any]:
        other = InMemory(images(seed=1), labels, 4)
        return list(InMemory(images(), LABELS, 4, num_clients=2, public=other).public_set().train_dataloader())

    for one, other in zip(batches(LABELS), batches(LABELS.flip(0)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Counted(LazyInputs):
    """Rows of a number, and targets that are not the labels."""

    def __len__(self) -> int:
        return 40

    def read(self, rows: Tensor) -> dict[str, Tensor]:
        return {INPUT: rows[:, None].float(), TARGETS: torch.full_like(rows, 7)}


def test_targets_that_are_read_with_the_inputs_are_left_out() -> None:
    module = InMemory(Counted(), LABELS[:40], 4, num_clients=2, public=PublicShare(0.25)).public_set()
    for inputs, numbers in module.train_dataloader():
        assert torch.equal(inputs[:, 0].long(), module.splits[0][numbers])


def test_the_fingerprint_is_that_of_the_public_inputs_too() -> None:
    prints = {
        InMemory(images(), LABELS, 4, num_clients=2, public=public).fingerprint()
        for public in (
            None,
            PublicShare(0.1),
            PublicShare(0.2),
            InMemory(images(seed=1), LABELS, 4),
            InMemory(images(seed=2), LABELS, 4),
        )
    }
    assert len(prints) == 5
    same = [InMemory(images(), LABELS, 4, num_clients=2, public=InMemory(images(seed=1), y, 4)) for y in (LABELS, LABELS.flip(0))]
    assert same[0].fingerprint() == same[1].fingerprint()


# --------------------------------------------------------------------------------------------------- made like the clients'


def with_public(own: Tensor, public: Any, **options: Any) -> InMemory:
    return InMemory(own, LABELS, 4, num_clients=2, public=InMemory(public, LABELS, 4), **options)


def test_grey_images_become_coloured_and_coloured_ones_grey() -> None:
    grey, coloured = images(1), images(3)
    assert torch.equal(public_inputs(with_public(coloured, grey)), grey.expand(-1, 3, -1, -1))
    found = public_inputs(with_public(grey, coloured))
    assert found.shape == grey.shape
    red, green, blue = coloured.double().unbind(1)
    torch.testing.assert_close(found[:, 0].double(), 0.299 * red + 0.587 * green + 0.114 * blue, rtol=0, atol=0.51)
    white = torch.full_like(coloured, 255)
    assert (public_inputs(with_public(grey, white)) == 255).all()


def test_images_take_the_clients_size_and_normalization() -> None:
    big = images(size=16)
    data = with_public(images(size=8), big)
    found = public_inputs(data)
    assert torch.equal(found, interpolate(big, (8, 8), mode="bilinear", antialias=True))
    module = data.public_set()
    batch = module.on_after_batch_transfer((found, torch.arange(200)), 0)
    assert torch.equal(batch[0], data.client(0).on_after_batch_transfer((found, LABELS), 0)[0])


def test_only_the_training_inputs_of_other_data_are_taken() -> None:
    other = InMemory(images(seed=1), LABELS, 4, images(seed=2), LABELS)
    assert torch.equal(public_inputs(InMemory(images(), LABELS, 4, num_clients=2, public=other)), images(seed=1))


def test_texts_stay_texts_without_their_targets() -> None:
    data = new_texts(2, public=new_texts(size=40))
    inputs = public_inputs(data)
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert len(inputs["input_ids"]) == 40


@pytest.mark.parametrize(
    ("public", "complaint"),
    [
        (torch.rand(200, 3, 8, 8), r"its inputs are torch\.float32 of shape \(3, 8, 8\), theirs torch\.uint8 of \(3, 8, 8\)"),
        (images(2), r"InMemory has images of 2 channels, the clients' have 3: give 1 or 3"),
        ({"input_ids": LABELS[:, None]}, r"it has input_ids, they have images"),
    ],
)
def test_what_cannot_be_made_alike_is_refused(public: Any, complaint: str) -> None:
    with pytest.raises(FederationError, match=complaint):
        with_public(images(), public).setup()


def test_other_rows_of_numbers_have_no_scale_and_no_gaps(tmp_path: Any) -> None:
    for name, numbers in (("own", range(40)), ("other", range(40, 60))):
        (tmp_path / f"{name}.csv").write_text("a,b\n" + "".join(f"{k},{k % 2}\n" for k in numbers))
    paths = str(tmp_path / "own.csv"), str(tmp_path / "other.csv")
    options: dict[str, Any] = {"target": "b", "num_clients": 2}
    plain = CSVFiles(paths[0], **options, public=CSVFiles(paths[1], target="b"))
    assert public_inputs(plain).flatten().tolist() == list(range(40, 60))
    with pytest.raises(FederationError, match=r"CSVFiles cannot be public data for these clients, whose inputs were changed"):
        CSVFiles(paths[0], **options, standardize="client", public=CSVFiles(paths[1], target="b")).setup()
    gap = torch.full((4, 1), torch.nan)
    with pytest.raises(FederationError, match=r"Example 0 of the public InMemory has nan in its input: expected numbers"):
        CSVFiles(paths[0], **options, public=InMemory(gap, LABELS[:4], 4)).setup()


@pytest.mark.parametrize("share", [0.0, 1.0, 1e-9])
def test_a_share_of_nothing_or_everything_is_refused(share: float) -> None:
    with pytest.raises(FederationError, match=r"public.share|public share"):
        InMemory(images(), LABELS, 4, public=PublicShare(share)).setup()


def test_natural_clients_lose_what_is_public() -> None:
    whose = np.array(["a", "b"])[np.arange(200) // 100]
    data = InMemory(images(), LABELS, 4, columns={"who": whose}, partition=ByColumn("who"), public=PublicShare(0.5))
    rows = set(data.public_set().splits[0].tolist())
    assert data.client_names == ["a", "b"]
    assert not owned(data) & rows
    for client, name in enumerate("ab"):
        held = {int(row) for part in data.client(client).splits for row in part}
        assert held == {row for row in range(200) if whose[row] == name} - rows


@pytest.mark.parametrize("partition", [IID(), ClassesPerClient(2)])
def test_partitions_deal_what_is_left(partition: Any) -> None:
    data = InMemory(images(), LABELS, 4, num_clients=4, partition=partition, public=PublicShare(0.3))
    assert (
        sum(sum(client.label_counts) for client in data.clients) + sum(client.num_val + client.num_test for client in data.clients)
        == 140
    )


def test_arrays_in_files_can_be_public(tmp_path: Any) -> None:
    from lightning_fed.data import ArrayFiles

    path = write_arrays(tmp_path / "images.npz")
    own = ArrayFiles(str(path), num_clients=2)
    images = own._loaded().images  # type: ignore[union-attr]
    data = InMemory(torch.zeros(200, *images.shape[1:], dtype=torch.uint8), LABELS, 4, num_clients=2, public=ArrayFiles(str(path)))
    assert torch.equal(public_inputs(data), images)


def test_some_of_the_examples_keep_their_numbers() -> None:
    data = InMemory(images(), LABELS, 4, num_clients=2, public=InMemory(images(seed=1), LABELS, 4))
    wanted = torch.tensor([3, 50, 199], dtype=torch.int32)
    module = data.public_set(2, wanted)
    assert module.info.num_train == 3
    inputs, numbers = module.data[module.splits[0]]
    assert numbers.tolist() == wanted.tolist()
    assert torch.equal(inputs, images(seed=1)[wanted.long()])
    seen = torch.cat([numbers for _, numbers in module.train_dataloader()])
    assert sorted(seen.tolist()) == wanted.tolist()


def test_clients_know_how_many_there_are() -> None:
    assert [client.num_public for client in InMemory(images(), LABELS, 4, num_clients=2).clients] == [0, 0]
    assert [client.num_public for client in InMemory(images(), LABELS, 4, num_clients=2, public=PublicShare(0.1)).clients] == [
        20,
        20,
    ]
