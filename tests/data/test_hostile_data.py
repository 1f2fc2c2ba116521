"""Data that nobody meant to give: refused before anything is trained, with file, row, column and what was expected."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, new_federation, sgd
from tiny_texts import save_tokenizer

from lightning_fed.data import (
    CIFAR10,
    IID,
    AGNews,
    ArrayFiles,
    CSVFiles,
    FederatedDataModule,
    HFDataset,
    ImageFolder,
    InMemory,
    TextFiles,
)
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.models import TextTransformer


def look_at_all(make: Callable[[], FederatedDataModule]) -> None:
    data = make()
    for client in range(data.num_clients):
        _ = [*data.client(client).train_dataloader(), *data.client(client).test_dataloader()]


def refused(make: Callable[[], FederatedDataModule], *parts: str) -> None:
    """One line, with all these parts, and soon."""
    with pytest.raises(FederationError) as caught:
        look_at_all(make)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message
    assert len(message) < 600


# ------------------------------------------------------------------------------------------------------------------- CSV

GOOD = b"a,b,kind\n" + b"1,2,x\n3,4,y\n" * 20


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (GOOD.replace(b"3,4,y", "3,4,é".encode("latin1"), 1), ["t.csv, line 3", "is not text in UTF-8 (byte 0xe9)"]),
        (GOOD.decode().encode("utf-16"), ["t.csv, line 1", "not text in UTF-8"]),
        (gzip.compress(GOOD, mtime=0)[:-20], ["t.csv cannot be read"]),
        (GOOD + b"1,2,x,4\n", ["t.csv, line 42, has 4 columns, expected 3"]),
        (GOOD.replace(b"a,b,kind", b"a,a,kind", 1), ["header of", "t.csv", "the name 'a' twice"]),
        (GOOD + b"nan,2,x\n", ["t.csv, line 42, has 'nan' in the column 'a'", "not a number"]),
        (GOOD + b"1,inf,x\n", ["t.csv, line 42, has 'inf' in the column 'b'"]),
        (GOOD + b"\n\n1,,x\n", ["t.csv, line 44, has '' in the column 'b'"]),
        (
            GOOD + b"1,2,\n",
            ["t.csv, line 42, has nothing in the column 'kind', which is a target: fill it in, or take the line out."],
        ),
        (
            GOOD + b"1,2, None\n",
            ["t.csv, line 42, has 'None' in the column 'kind', which is a target", "init_args.classes with all"],
        ),
        (GOOD + b'1,2,"x\n' + b"3,4,y\n" * 9, ["t.csv, line 42, cannot be read (unexpected end of data): close every quotation"]),
        (GOOD + b'1,2,"x\n3,4,y\n1,2,"x\n3,4,y\n', ["t.csv, line 42, cannot be read", "double those within"]),
        (b"a,kind\n" + b"1,0.5\n2,1\n" * 20, ["t.csv, line 2, has '0.5' in the column 'kind'", "not whole"]),
        (b"a,kind\n" + b"1,nan\n2,1\n" * 20, ["t.csv, line 2, has 'nan' in the column 'kind'"]),
        (b"kind\n" + b"1\n0\n" * 20, ["t.csv has no column besides kind"]),
        (b"1,2,x\n" * 20, ["t.csv has the columns 1, 2, x, but no target 'kind'."]),
        (b"a;kind\n" + b"1,5;x\n" * 20, ["t.csv has the single column a;kind: set --data.init_args.delimiter"]),
        (b"\x00\xff\xfe" * 50, ["t.csv"]),
        (b"", ["t.csv has no line below its header"]),
    ],
)
def test_tables(content: bytes, parts: list[str]) -> None:
    Path("t.csv").write_bytes(content)
    refused(lambda: CSVFiles("t.csv", target="kind", partition=IID(), num_clients=2), *parts)


def test_long_fields_and_compressed_files_are_read() -> None:
    Path("t.csv").write_bytes(gzip.compress(GOOD, mtime=0))
    assert CSVFiles("t.csv", target="kind", partition=IID(), num_clients=2).num_classes == 2
    Path("long.csv").write_text("note,a,kind\n" + f"{'x' * 200_000},1,p\n,2,q\n" * 5)
    data = CSVFiles("long.csv", target="kind", input="a", partition=IID(), num_clients=1, val_share=0)
    assert {len(note) for note in data.column("note")} == {0, 200_000}


TEXTS = b"text,label\n" + b"the dog,a\nthe cat,b\n" * 10


@pytest.mark.parametrize(
    ("content", "options", "parts"),
    [
        (TEXTS + b"the dog\n", {}, ["t.csv, line 22,", "has 1 column, expected 2", "quotation marks"]),
        (TEXTS + b"the dog,c\n", {}, ["found 'c' among the targets", "classes are 'a', 'b'"]),
        (TEXTS, {"classes": ["a", "b", "a"]}, ["name each class once"]),
        (b"text,label\n", {}, ["t.csv has no line below its header"]),
    ],
)
def test_texts(content: bytes, options: dict[str, Any], parts: list[str]) -> None:
    Path("t.csv").write_bytes(content)
    given = {"classes": ["a", "b"], "tokenizer": save_tokenizer(Path("tok")), "partition": IID(), "num_clients": 2} | options
    refused(lambda: TextFiles("t.csv", **given), *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("class,title,text\n1,a,b\n", ["train.csv, line 1", "the label 'class'", "no header"]),
        ("1,a,b\n5,a,b\n", ["train.csv, line 2", "the label '5', expected one of 1, 2, 3, 4"]),
        ("1,a\n", ["train.csv, line 1", "2 columns, expected 3"]),
    ],
)
def test_news(content: str, parts: list[str]) -> None:
    Path("train.csv").write_text(content)
    Path("test.csv").write_text("1,a,b\n")
    refused(lambda: AGNews("."), *parts)


# --------------------------------------------------------------------------------------------------------------- parquet


def png(size: int = 8, format: str = "PNG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)).save(file, format)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG that says that it has 10^10 pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\x00")) + chunk(b"IEND", b"")


def write_parquet(images: list[bytes | None], labels: list[Any], **columns: Any) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"img": [{"bytes": image, "path": None} for image in images], "label": labels} | columns)
    pq.write_table(table, "train.parquet")
    pq.write_table(table.slice(0, 4), "test.parquet")


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        (lambda: None, ["train.parquet, row 5, has no image"]),
        (lambda: b"", ["train.parquet, row 5, has no image"]),
        (lambda: png()[:60], ["Could not read", "train.parquet, row 5"]),
        (lambda: b"no image at all", ["train.parquet, row 5, as WEBP or PNG or JPEG"]),
        (lambda: png(format="GIF"), ["train.parquet, row 5, as WEBP or PNG or JPEG"]),
        (bomb, ["train.parquet, row 5", "make it smaller"]),
        (lambda: png(9), ["2 sizes"]),
    ],
    ids=["null", "empty", "truncated", "text", "gif", "bomb", "other size"],
)
def test_images_in_parquet_files(image: Callable[[], bytes | None], parts: list[str]) -> None:
    write_parquet([png()] * 5 + [image()] + [png()] * 6, [0, 1] * 6)
    refused(lambda: CIFAR10(".", partition=IID(), num_clients=2), *parts)


@pytest.mark.parametrize("labels", [["a", "b"] * 6, [0.0, 0.5] * 6, [None, 1] * 6, [True, False] * 6, [[0, 1], [1, 0]] * 6])
def test_labels_in_parquet_files(labels: list[Any]) -> None:
    write_parquet([png()] * 12, labels)
    refused(lambda: CIFAR10("."), "train.parquet, row 0, has", "in the column 'label': expected the number of a class")


def test_labels_of_another_data_set() -> None:
    write_parquet([png()] * 12, [0, 1, 2, 3, 4, 5, 6, 77, 8, 9, -1, 11])
    refused(lambda: CIFAR10("."), "labels go from 0 to 9, but got -1 to 77, first in example 7")


def test_images_of_another_type() -> None:
    write_parquet([png()] * 12, [0] * 12, image=["a path"] * 12)
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in ("train", "test"):
        pq.write_table(pa.table({"img": ["a path"] * 4, "label": [0] * 4}), f"{part}.parquet")
    refused(lambda: CIFAR10("."), "train.parquet has the column 'img' of", "expected images, as bytes and path")


@pytest.mark.parametrize("content", [b"", b"PAR1 what is this PAR1"])
def test_damaged_parquet_files(content: bytes) -> None:
    write_parquet([png()] * 12, [0] * 12)
    Path("train.parquet").write_bytes(content)
    refused(lambda: CIFAR10("."), "train.parquet is not a complete parquet file")


# -------------------------------------------------------------------------------------------------- Hugging Face, folders


def test_texts_and_targets_that_are_missing_in_a_dataset() -> None:
    pytest.importorskip("datasets")
    rows = [{"text": "the dog", "label": "a"}, {"text": "the cat", "label": "b"}] * 5
    options = {"tokenizer": save_tokenizer(Path("tok")), "partition": IID(), "num_clients": 2}
    Path("t.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": None, "label": "a"}])))
    refused(lambda: HFDataset("t.jsonl", "text", "label", **options), "t.jsonl, row 10, has no text in text")
    Path("u.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": "the dog", "label": None}])))
    refused(lambda: HFDataset("u.jsonl", "text", "label", **options), "no target", "row 10")
    Path("v.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{broken")
    refused(lambda: HFDataset("v.jsonl", "text", "label", **options), "Could not load a dataset from", "v.jsonl")


@pytest.mark.parametrize("content", [b"", png()[:80], b"GIF89a nonsense", bomb()], ids=["empty", "truncated", "gif", "bomb"])
def test_images_in_folders(content: bytes) -> None:
    for kind in ("a", "b"):
        Path(f"images/{kind}").mkdir(parents=True)
        for k in range(6):
            Path(f"images/{kind}/{k}.png").write_bytes(png())
    Path("images/a/3.png").write_bytes(content)
    refused(lambda: ImageFolder("images", partition=IID(), num_clients=1), "Could not read the image /", "images/a/3.png (")


# ------------------------------------------------------------------------------------------------------ arrays and tensors

X, Y = np.random.default_rng(0).random((40, 3)), np.arange(40) % 2


def with_(array: np.ndarray, row: int, value: float) -> np.ndarray:
    changed = array.astype(float)
    changed[row] = value
    return changed


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"labels": np.eye(2)[Y]}, ["labels have the shape (40, 2)", "argmax(1)"]),
        ({"labels": with_(Y, 7, 0.5)}, ["labels have 0.5 in row 7", "whole numbers"]),
        ({"labels": with_(Y, 7, np.nan)}, ["labels have nan in row 7"]),
        ({"labels": with_(Y, 7, np.inf)}, ["labels have inf"]),
        ({"labels": ["a", "b"] * 20}, ["labels are a list of 40", "whole numbers"]),
        ({"labels": torch.zeros(40, dtype=torch.complex64)}, ["labels are complex"]),
        ({"labels": 3}, ["labels have the shape ()"]),
        ({"labels": Y[:-1]}, ["40 images and 39 labels"]),
        ({"images": with_(X, 11, np.nan)}, ["Example 11 of the data has nan in its input"]),
        ({"images": torch.from_numpy(with_(X, 11, -np.inf)).float()}, ["Example 11 of the data has -inf"]),
        ({"images": {"x": with_(X, 4, np.nan)}}, ["Example 4 of the data has nan in its x"]),
        ({"images": [[1.0, 2.0]] * 39 + [[1.0]]}, ["images: rows of different shapes"]),
        ({"images": np.array([["a", "b"]] * 40)}, ["images: <U1", "expected numbers"]),
        ({"images": {}}, ["empty dict"]),
        ({"test_images": X[:4, :2], "test_labels": Y[:4]}, ["of shape (3,)", "of shape (2,)", "one kind and size"]),
        ({"test_images": X[:4].astype(np.uint8), "test_labels": Y[:4]}, ["torch.float32", "torch.uint8"]),
        ({"test_images": {"x": X[:4]}, "test_labels": Y[:4]}, ["give the same kind"]),
        ({"class_names": ["a", "a"]}, ["class_names has the name 'a' twice"]),
    ],
)
def test_arrays(given: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: InMemory(**{"images": X, "labels": Y, "partition": IID(), "num_clients": 2} | given), *parts)


def test_lists_are_taken() -> None:
    data = InMemory(
        X.tolist(), Y.tolist(), partition=IID(), num_clients=2, test_images=X[:4].tolist(), test_labels=Y[:4].astype(float)
    )
    data.setup()
    assert data.client(0).data.labels.tolist() == [*Y.tolist(), *Y[:4].tolist()]
    assert data.client(0).data.images.dtype == torch.float32  # type: ignore[union-attr]


class Loaded(FederatedDataModule):
    num_classes = 2

    def __init__(self, given: Any) -> None:
        super().__init__(partition=IID(), num_clients=2)
        self.given = given

    def load(self) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (None, ["load() of Loaded returned a NoneType", "four things"]),
        ((X, Y), ["a tuple of 2"]),
        ((X, Y, X[:0], np.eye(2)), ["test labels of Loaded have the shape (2, 2)"]),
        (("train", Y, X[:0], Y[:0]), ["training inputs of Loaded", "expected numbers"]),
    ],
)
def test_what_load_returns(given: Any, parts: list[str]) -> None:
    refused(lambda: Loaded(given), *parts)


def test_load_may_return_arrays() -> None:
    data = Loaded((X, Y, X[:0], Y[:0]))
    assert data.client(0).data.images.dtype == torch.float32  # type: ignore[union-attr]


def test_array_files() -> None:
    Path("d").mkdir()
    for name, shape in (("a", (6, 4)), ("b", (6, 5))):
        np.savez(f"d/{name}.npz", images=np.zeros(shape), labels=np.arange(6) % 2)
    refused(lambda: ArrayFiles("d"), "d has images of float64 of shape (4,) and of float64 of shape (5,), in a and b")
    for images, part in ((np.array(3.0), "a single number"), (np.array(["a"] * 6), "expected numbers")):
        np.savez("e.npz", images=images, labels=np.arange(6) % 2)
        refused(lambda: ArrayFiles("e.npz"), "e.npz", part)
    np.savez("e.npz", images=np.zeros((6, 4)), labels=np.array([0, 1, 0.5, 1, 0, 1]))
    refused(lambda: ArrayFiles("e.npz"), "0.5, in row 2, which are not whole")
    np.savez("e.npz", images=np.zeros((6, 4, 4), np.uint8), labels=np.arange(6) % 2)
    refused(lambda: ArrayFiles("e.npz", std=(0.0,), partition=IID(), num_clients=1), "std=[0.0]", "above 0")


# ----------------------------------------------------------------------------------------------- data and network together


def run_on(data: FederatedDataModule, backbone: Any) -> str:
    with pytest.raises(FederationError) as caught:
        new_federation(rounds=1, run_dir="runs").fit(FedAvg(backbone, data.num_classes, optimizer=sgd), data)
    assert not list(Path("runs").glob("*"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def words(classes: int) -> TextTransformer:
    return TextTransformer(classes, vocab_size=30, max_length=8, width=8, heads=2, layers=1)


def test_tokens_beyond_the_vocabulary_and_texts_beyond_the_positions() -> None:
    tokens = torch.randint(1, 30, (40, 8))
    tokens[33, 2] = 30
    said = run_on(InMemory(tokens, Y, partition=IID(), num_clients=2), words)
    assert "Example 33 of the data has the token 30, but the network knows 0 to 29" in said
    said = run_on(InMemory(torch.ones(40, 9, dtype=torch.long), Y, partition=IID(), num_clients=2), words)
    assert "The longest text has 9 tokens, but the network has positions for 8" in said


def test_a_first_step_that_fails_says_what_the_network_was_given() -> None:
    said = run_on(InMemory(torch.zeros(40, 1, 5, 5), Y, partition=IID(), num_clients=2), Net)
    assert "the first step failed: Net, given inputs float32 (1, 5, 5), targets int64 (), raised" in said
