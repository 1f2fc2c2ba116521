"""Datasets of the Hugging Face library: images, texts and numbers, from disk and from files."""

import json
import pickle
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_files import CLASS_NAMES, COMMIT, USERS, put_into_cache, write_csv, write_dataset
from tiny_texts import save_tokenizer

from lightning_fed.data import IID, HFDataset
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.engines.packing import pack, unpack
from lightning_fed.errors import FederationError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def inputs_of(data: HFDataset) -> Any:
    data.setup()
    assert data._data is not None
    return data._data.images


def test_images_are_decoded_as_needed() -> None:
    data = HFDataset(write_dataset(Path("images")), input="image", target="label", client="user", image_size=8)
    assert (data.num_classes, data.num_clients) == (2, 2)
    assert (data.class_names, data.client_names) == (CLASS_NAMES, list(USERS))
    assert isinstance(inputs_of(data), LazyInputs)
    assert len(pickle.dumps(data)) < 20_000
    images, labels = data._data[torch.tensor([3, 30, 0])]  # type: ignore[index]
    assert images.shape == (3, 3, 8, 8)
    assert images[:, 0, 0, 0].tolist() == [21, 210, 0]
    assert labels.tolist() == [1, 0, 0]
    kept = HFDataset("images", "image", "label", client="user", image_size=8, in_memory=True)
    assert torch.equal(inputs_of(kept), inputs_of(data).read(torch.arange(32)))


def test_the_fingerprint_is_that_of_the_images() -> None:
    def fingerprint(path: str, size: int = 8) -> str:
        return HFDataset(path, "image", "label", client="user", image_size=size).fingerprint()

    before = fingerprint(write_dataset(Path("images")))
    assert fingerprint(write_dataset(Path("again"))) == before != fingerprint("again", 9)
    rows = datasets.load_from_disk("again")
    pixels = np.random.default_rng(0).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    rows.map(lambda row, k: row | ({"image": Image.fromarray(pixels)} if k == 31 else {}), with_indices=True).save_to_disk("other")
    assert fingerprint("other") != before


def test_they_travel_to_other_processes() -> None:
    data = HFDataset(write_dataset(Path("images")), "image", "label", client="user", image_size=8)
    data.setup()
    travelled = unpack(pack(data))
    for (images, labels), (others, their_labels) in zip(
        *(one.client(1).train_dataloader() for one in (data, travelled)), strict=True
    ):
        assert torch.equal(images, others)
        assert torch.equal(labels, their_labels)


def test_sets_by_their_names() -> None:
    path = write_dataset(Path("sets"), "numbers", ("train", "validation", "test", "unsupervised"))
    data = HFDataset(path, "numbers", "label", client="user")
    assert [(c.num_train, c.num_val, c.num_test) for c in data.clients] == [(size, size, size) for size in USERS.values()]
    assert data.split == "official"
    data = HFDataset(path, "numbers", "label", client="user", test="validation", val_share=0)
    assert [(c.num_train, c.num_val, c.num_test) for c in data.clients] == [(size, 0, size) for size in USERS.values()]


def test_texts_are_tokenised() -> None:
    tokenizer = save_tokenizer(Path("tokenizer"))
    path = write_dataset(Path("texts"), "text")
    inputs = inputs_of(HFDataset(path, "text", "label", client="user", tokenizer=tokenizer, max_length=6))
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape
    assert len(inputs["input_ids"]) == 32
    pair = inputs_of(HFDataset(path, ["text", "user"], "label", client="user", tokenizer=tokenizer))
    assert pair["attention_mask"].sum() > inputs["attention_mask"].sum()
    with pytest.raises(FederationError, match=r"is text: set --data.init_args.tokenizer"):
        HFDataset(path, "text", "label").setup()


def test_numbers_in_one_column_or_in_several() -> None:
    expected = [[float(k), k / 2] for k in range(32)]
    path = write_dataset(Path("numbers"), "numbers")
    assert inputs_of(HFDataset(path, "numbers", "label", partition=IID(), num_clients=1)).tolist() == expected
    data = HFDataset(write_csv(Path("table.csv")), ["height", "weight"], "kind", client="user", partition=None)
    assert inputs_of(data)[:12].tolist() == expected[:12]
    assert (data.class_names, data.client_names) == (CLASS_NAMES, list(USERS))


def test_one_column_of_single_numbers_is_a_row_of_one() -> None:
    data = HFDataset(write_csv(Path("table.csv")), "height", "kind", num_clients=1, partition=IID())
    assert inputs_of(data).shape == (32, 1)
    assert data.input_shape == (1,)


def test_digits_that_float32_does_not_keep(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"id": [2**24 + k for k in range(20)], "x": [2.0**24 - k for k in range(20)], "y": [0, 1] * 10}
    datasets.Dataset.from_dict(columns).save_to_disk("ids")
    given = inputs_of(HFDataset("ids", ["x", "id"], "y", num_clients=1, partition=IID()))
    assert (given.dtype, given[1].tolist()) == (torch.float32, [2.0**24 - 1, 2.0**24])
    assert [line.partition(" Subtract")[0] for line in caplog.messages] == [
        "inputs of ids: the column 'id' has numbers above 16777216, which float32 rounds: of 20 different ones 11 are left."
    ]


def test_what_is_missing_is_named() -> None:
    """A class, also if the file knows the classes by number; and an image, before any is needed."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASS_NAMES), "x": datasets.Value("float32")}
    labels = {name: [k % 2 for k in range(20)] for name in ("label", "x")}
    whole = datasets.Dataset.from_dict({"image": [None] * 20} | labels, features=datasets.Features(features))
    whole.save_to_disk("no_images")
    with pytest.raises(FederationError, match=r"Could not read the image in row 0 of no_images"):
        HFDataset("no_images", "image", "label", num_clients=2, partition=IID()).fingerprint()
    gap = datasets.Dataset.from_dict(
        labels | {"label": [0, 1, None, 1] * 5}, features=datasets.Features(dict([*features.items()][1:]))
    )
    gap.save_to_disk("no_labels")
    hidden = datasets.Dataset.from_dict(labels | {"label": [-1] * 20}, features=gap.features)
    datasets.DatasetDict({"train": gap.filter(lambda row: row["label"] is not None), "test": hidden}).save_to_disk("hidden_labels")
    for classes, (folder, row) in product((None, CLASS_NAMES), {"no_labels": 2, "hidden_labels": 15}.items()):
        with pytest.raises(FederationError, match=f"Some examples have no target; the first is in row {row}"):
            HFDataset(folder, "x", "label", classes=classes, num_clients=2).setup()


@pytest.mark.parametrize(("name", "got"), [("None", "'None'"), ("NA", "'NA'"), (None, "nothing")])
def test_a_missing_group_is_refused(name: str | None, got: str) -> None:
    columns = {"x": [*range(24)], "y": [0, 1] * 12, "who": ["a", "b", name, "c"] * 6}
    datasets.Dataset.from_dict(columns).save_to_disk("visits")
    with pytest.raises(FederationError, match=f"visits, row 2, has {got} in the column 'who', which is the group: fill it in"):
        HFDataset("visits", "x", "y", group="who", num_clients=2, partition=IID()).setup()


def test_sets_must_number_their_classes_alike() -> None:
    sets = {
        part: datasets.Dataset.from_dict(
            {"x": [0.0, 1.0], "label": [0, 1]},
            features=datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}),
        )
        for part, names in (("train", CLASS_NAMES), ("test", CLASS_NAMES[::-1]))
    }
    datasets.DatasetDict(sets).save_to_disk("sets")
    with pytest.raises(FederationError, match=r"The sets train, test of sets have different columns .*ClassLabel.*: give them the"):
        HFDataset("sets", "x", "label", num_clients=1).setup()


def test_a_split_column_of_a_file() -> None:
    data = HFDataset(write_csv(Path("table.csv")), ["height", "weight"], "kind", "user", split_column="split")
    assert [(c.num_train, c.num_val, c.num_test) for c in data.clients] == [(6, 3, 3), (10, 5, 5)]


def test_clients_and_sets_of_a_type_with_names_have_them() -> None:
    kinds = {"speaker": datasets.ClassLabel(names=["Zoe", "Ann"]), "part": datasets.ClassLabel(names=["test", "train"])}
    columns = {"x": list(range(20)), "label": [0, 1] * 10, "speaker": [0] * 12 + [1] * 8, "part": [1, 1, 1, 0] * 5}
    rows = datasets.Dataset.from_dict(columns)
    rows.cast(datasets.Features(rows.features | kinds)).save_to_disk("speakers")
    data = HFDataset("speakers", "x", "label", client="speaker", split_column="part", val_share=0)
    data.setup()
    assert data.client_names == ["Ann", "Zoe"]
    assert [(c.num_train, c.num_test) for c in data.clients] == [(6, 2), (9, 3)]


def test_files_of_other_kinds() -> None:
    rows = [{"x": k, "kind": k % 2} for k in range(20)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert inputs_of(HFDataset("rows.jsonl", "x", "kind", partition=IID(), num_clients=1)).flatten().tolist() == list(range(20))
    Path("folder").mkdir()
    for part, size in (("train", 20), ("test", 4)):
        datasets.Dataset.from_list(rows[:size]).to_parquet(f"folder/{part}.parquet")
    data = HFDataset("folder", "x", "kind", partition=IID(), num_clients=1, val_share=0)
    assert [(c.num_train, c.num_test) for c in data.clients] == [(20, 4)]


def test_columns_are_read_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    column = datasets.arrow_dataset.Column
    original = column.__getitem__
    monkeypatch.setattr(column, "__getitem__", lambda self, key: read.append(self.column_name) or original(self, key))
    HFDataset(write_dataset(Path("images")), "image", "label", partition=IID(), num_clients=2).setup()
    assert read == ["label"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": ["image", "label"]}, "Got the column 'label' as input and as target"),
        ({"input": "picture"}, "has the columns image, label, user, but no picture"),
        ({"target": "image", "input": "user"}, "The target 'image' of images is Image.*expected one class per example"),
        ({"test": "holdout", "path": "sets"}, "has the sets train, test, but no 'holdout' to test on"),
        ({"path": "odd"}, "has the sets left, right, of which none is called train"),
        ({"client": "hospital"}, "no column 'hospital', its columns are: label, user"),
        ({"input": ["image", "user"]}, "expected an image, one or two texts, or numbers of one shape"),
        ({"path": "visits.jsonl", "input": "day"}, r"The input day of visits.jsonl is Value\('timestamp\[s\]'\)"),
        ({"path": "notes.txt"}, "notes.txt ends in .txt: expected a folder that save_to_disk wrote"),
        ({"path": "broken.parquet"}, "Could not load a dataset from .*broken.parquet"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    write_dataset(Path("images"))
    write_dataset(Path("sets"), sets=("train", "test"))
    write_dataset(Path("odd"), sets=("left", "right"))
    Path("notes.txt").write_text("")
    Path("visits.jsonl").write_text('{"day": "2026-01-02", "label": 1}\n')
    Path("broken.parquet").write_bytes(b"nothing")
    with pytest.raises(FederationError, match=message):
        HFDataset(**{"path": "images", "input": "image", "target": "label"} | options).setup()


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.load_from_disk(write_dataset(Path("images")))
    for config in ("plain", "default"):
        put_into_cache(monkeypatch, "owner/name", {"train": rows}, config)
    for name, config in (("owner/name", "plain"), (f"owner/name@{COMMIT}", None)):
        assert HFDataset(name, "image", "label", "user", config=config).num_clients == 2

    def fails(*name: object, **options: object) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fails)
    for name in ("owner/other", "owner/name@fedcba", "owner/name@main"):  # the cache has one commit of the first name
        with pytest.raises(FederationError, match=rf"Could not load {name}.*\(no network\).* --data.init_args.path to a folder"):
            HFDataset(name, "image", "label").setup()


def test_a_name_that_is_not_in_the_cache_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*names: str, revision: str | None) -> Any:
        asked.append((*names, revision))
        return datasets.DatasetDict(train=datasets.load_from_disk(write_dataset(Path("images"))))

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda api, name, revision, timeout: asked.append((name, revision)))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert HFDataset("owner/name@v1", "image", "label", "user", config="plain").num_clients == 2
    assert asked == [("owner/name", "v1"), ("owner/name", "plain", "v1")]


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FederationError, match=r'pip install "lightning-fed\[hub\]"'):
        HFDataset("owner/name", "image", "label").setup()
