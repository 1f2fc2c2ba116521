"""Tables of numbers and arrays in files."""

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_files import CLASS_NAMES, USERS, rows, write_arrays, write_csv
from torch import nn

from lightning_fed.data import IID, ArrayFiles, CSVFiles, FederatedDataModule, InMemory, TableData, TextFiles
from lightning_fed.data.batches import INPUT
from lightning_fed.data.checked import as_tensor
from lightning_fed.errors import FederationError
from tests.tiny_texts import save_tokenizer


def everything(data: FederatedDataModule) -> tuple[torch.Tensor, torch.Tensor]:
    data.setup()
    assert data._data is not None
    return data._data[torch.arange(len(data._data))]  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------------------------- CSV


def test_numbers_of_a_csv_file() -> None:
    data = CSVFiles(write_csv(Path("table.csv")), target="kind", client="user", split_column="split", split="pooled")
    inputs, labels = everything(data)
    assert inputs.dtype == torch.float32
    numbers, kinds = [row[1:3] for row in rows()], [CLASS_NAMES.index(row[3]) for row in rows()]
    order = [k for k, row in enumerate(rows()) if row[4] != "test"] + [k for k, row in enumerate(rows()) if row[4] == "test"]
    assert inputs.tolist() == [list(numbers[k]) for k in order]
    assert labels.tolist() == [kinds[k] for k in order]
    assert (data.num_classes, data.class_names, data.client_names) == (2, CLASS_NAMES, list(USERS))


def test_columns_can_be_chosen() -> None:
    path = write_csv(Path("table.csv"))
    assert everything(CSVFiles(path, "kind", "weight", client="user"))[0].flatten().tolist() == [row[2] for row in rows()]
    inputs, _ = everything(CSVFiles(path, "kind", ["weight", "height"], partition=IID(), num_clients=2))
    assert inputs.tolist() == [[row[2], row[1]] for row in rows()]


def test_one_file_per_client_and_a_test_file() -> None:
    for user, size in USERS.items():
        Path("clients").mkdir(exist_ok=True)
        Path(f"clients/{user}.tsv").write_text("a\tb\n" + "".join(f"{k}\t{k % 2}\n" for k in range(size)) + "\n")
        Path("tests").mkdir(exist_ok=True)
        Path(f"tests/{user}.tsv").write_text("a\tb\n7\t1\n")
    data = CSVFiles("clients", target="b", client="file", test_path=str(Path("tests").absolute()), val_share=0)
    assert data.client_names is None
    assert [client.num_train for client in data.clients] == list(USERS.values())
    assert (data.client_names, data.split) == (list(USERS), "official")
    assert data.client(1).data[data.client(1).splits[2]][0].tolist() == [[7.0]]


def write_tables(**contents: str) -> None:
    """Files ``<name>.csv`` of the folder d with a number and a class, and the copies that programs hide beside them."""
    for name, content in contents.items():
        for place in (f"d/{name}.csv", f"d/.{name}.csv", f"d/.ipynb_checkpoints/{name}-checkpoint.csv"):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            Path(place).write_text(content)


def test_a_folder_is_read_without_hidden_files_and_with_compressed_ones() -> None:
    write_tables(a="a,b\n1,0\n2,1\n3,1\n")
    Path("d/b.csv.gz").write_bytes(gzip.compress(b"a,b\n4,0\n5,1\n"))
    Path("d/c.TSV.gz").write_bytes(gzip.compress(b"a\tb\n6\t0\n7\t1\n"))
    data = CSVFiles("d", "b", client="file")
    assert sorted(everything(data)[0].flatten().tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert data.client_names == ["a", "b", "c"]
    Path("d/b.csv").touch()
    with pytest.raises(FederationError, match=r"d/b.csv.gz and the same file uncompressed: take one out"):
        CSVFiles("d", "b").setup()


@pytest.mark.parametrize("path", ["d", "d/test.csv", "link"])
@pytest.mark.parametrize("kind", [CSVFiles, TextFiles, ArrayFiles])
def test_a_file_that_is_trained_on_is_not_tested_on(path: str, kind: Callable[..., FederatedDataModule]) -> None:
    write_tables(train="text,label\n1,0\n2,1\n", test="text,label\n1,0\n2,1\n")
    Path("link").symlink_to("d")
    options: dict[str, Any] = {CSVFiles: {"target": "label"}, TextFiles: {"tokenizer": save_tokenizer(Path("tok"))}}.get(kind, {})
    test = "d/test.csv"
    if kind is ArrayFiles:
        test = write_arrays(Path("d/test.npz"))
        path = path.replace("csv", "npz")
    with pytest.raises(FederationError, match=rf"{test} belongs to path and to test_path, so it would be trained and tested on"):
        kind(path, test_path=test, **options).setup()


def test_semicolons() -> None:
    Path("t.csv").write_text("a;b\n1;0\n2;1\n" * 1 + "3;0\n" * 10)
    assert everything(CSVFiles("t.csv", "b", delimiter=";", partition=IID(), num_clients=1))[0][:3].flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b\n1,0\n", {"input": ["a", "d"]}, "has the columns a, b, but no input d"),
        ("__index_level_0__,a,b\n0,1,0\n", {}, "t.csv has the column '__index_level_0__', as pandas writes the numbers of rows, "),
        (",a,b\n0,1,0\n1,1,1\n", {}, "t.csv has a column without a name, as pandas writes the numbers of rows, .* index=False"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(text: str, options: dict[str, Any], message: str) -> None:
    Path("t.csv").write_text(text)
    with pytest.raises(FederationError, match=message):
        CSVFiles(**{"path": "t.csv", "target": "b"} | options).setup()


def test_files_that_are_missing_or_differ_are_refused() -> None:
    Path("folder").mkdir()
    for path, message in (("none.csv", "Found neither a file nor a folder"), ("folder", r"has no files that end in .csv or .tsv")):
        with pytest.raises(FederationError, match=message):
            CSVFiles(path, target="b").setup()
    Path("folder/1.csv").write_text("a,b\n1,0\n")
    Path("folder/2.csv").write_text("a,c\n1,0\n")
    with pytest.raises(FederationError, match=r"2.csv has the columns a, c, but .*1.csv has a, b"):
        CSVFiles("folder", target="b").setup()


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".arrow"])
def test_files_of_other_kinds_say_what_reads_them(ending: str) -> None:
    Path(f"t{ending}").write_text('{"text": "the dog", "label": "a"}\n')
    texts = TextFiles(f"t{ending}", save_tokenizer(Path("tok")))
    for data in (CSVFiles(f"t{ending}", target="label"), texts):
        with pytest.raises(FederationError, match=rf"t{ending} is not CSV, by its name: HFDataset reads such files"):
            data.setup()


# ---------------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("ending", [".npz", ".pt"])
def test_arrays_by_name(ending: str) -> None:
    """Of files whose names end in any case."""
    upper = Path(write_arrays(Path(f"data{ending}"))).rename(f"DATA{ending.upper()}")
    data = ArrayFiles(str(upper), client="user")
    images, labels = everything(data)
    assert images.shape == (32, 3, 10, 12)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [k % 2 for k in range(32)]
    assert data.client_names == (list(USERS) if ending == ".npz" else ["0", "1"])
    assert everything(ArrayFiles(str(upper), client="user", image_size=8))[0].shape == (32, 3, 8, 8)


def test_names_that_are_bytes_are_text() -> None:
    """As HDF5 and NumPy's fixed strings have them."""
    np.savez("b.npz", images=np.zeros((40, 2)), labels=np.array([b"ill", b"well"] * 20), site=np.array(["é".encode(), b"s"] * 20))
    data = ArrayFiles("b.npz", client="site")
    data.setup()
    assert (data.class_names, data.client_names) == (["ill", "well"], ["s", "é"])


def test_sets_that_are_arrays_of_their_own() -> None:
    """As in MedMNIST's files: grey images, labels of shape (N, 1)."""
    sizes = {"train": 20, "val": 6, "test": 8}
    arrays = {f"{part}_images": np.full((size, 6, 6), size, np.uint8) for part, size in sizes.items()}
    np.savez("m.npz", **arrays, **{f"{part}_labels": np.arange(size)[:, None] % 2 for part, size in sizes.items()})
    data = ArrayFiles("m.npz", partition=IID(), num_clients=2)
    for parts, size in zip(zip(*(data.client(k).splits for k in range(2)), strict=True), sizes.values(), strict=True):
        images, _ = data.client(0).data[torch.cat([*parts])]
        assert images.shape == (size, 1, 6, 6)
        assert set(images.flatten().tolist()) == {size}
    assert data.split == "official"


@pytest.mark.parametrize("other", ["test", "val"])
def test_a_set_beside_arrays_without_a_prefix_is_tested_on(other: str) -> None:
    images, labels, site = np.zeros((20, 2)), np.arange(20) % 2, np.arange(20) % 2
    of_other = {f"{other}_images": images[:6] + 1, f"{other}_labels": labels[:6], f"{other}_site": site[:6]}
    np.savez("m.npz", images=images, labels=labels, site=site, **of_other)
    data = ArrayFiles("m.npz", client="site", val_share=0)
    assert [(client.num_train, client.num_val, client.num_test) for client in data.clients] == [(10, 0, 3)] * 2
    assert data.client(0).data[data.client(0).splits[2]][0].tolist() == [[1.0, 1.0]] * 3
    assert data.split == "official"


@pytest.mark.parametrize("option", ["client", "group", "split_column"])
def test_a_role_is_an_array_of_every_set(option: str) -> None:
    images, labels = np.zeros((20, 2)), np.arange(20) % 2
    np.savez("m.npz", images=images, labels=labels, who=labels, test_images=images, test_labels=labels)
    with pytest.raises(FederationError, match=r"m.npz has no array who in the set test \(in .*\), as it has in others: give one"):
        ArrayFiles("m.npz", **{option: "who"}, **({} if option == "client" else {"num_clients": 2})).setup()


def test_one_file_of_arrays_per_client() -> None:
    for user, size in USERS.items():
        np.savez(f"{user}.npz", x=np.full((size, 5), size / 2), y=np.array(["no", "yes"])[np.arange(size) % 2])
    data = ArrayFiles(".", input="x", target="y", client="file")
    assert [sum(map(len, data.client(k).splits)) for k in range(2)] == list(USERS.values())
    assert data.class_names == ["no", "yes"]
    inputs, _ = everything(data)
    assert inputs.dtype == torch.float32
    assert inputs[:, 0].tolist() == [6.0] * 12 + [10.0] * 20


@pytest.mark.parametrize("kind", [CSVFiles, ArrayFiles])
def test_files_of_one_name_in_two_folders_are_two_clients(kind: Callable[..., TableData]) -> None:
    """And two forms of one file are not: both may hold the same examples."""
    for number, site in enumerate(("east", "west")):
        write_tables(**{f"{site}/data": "x,y\n" + f"{number},0\n{number},1\n" * 4})
        np.savez(f"d/{site}/data.npz", x=np.full((8, 1), number), y=np.arange(8) % 2)
    data = kind("d", input="x", target="y", client="file")
    data.setup()
    assert data.client_names == ["east/data", "west/data"]
    for client in range(2):
        assert {value for part in data.client(client).splits for [value] in data._loaded().images[part].tolist()} == {client}  # type: ignore[index]
    Path("d/east/data.tsv").write_text("x\ty\n0\t0\n")
    torch.save({"x": torch.zeros(8, 1), "y": torch.zeros(8)}, "d/east/data.pt")
    with pytest.raises(
        FederationError, match=r"d/east/data.* and d/east/data.* have the same name east/data: rename one, or take it"
    ):
        kind("d", input="x", target="y").setup()


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"pictures": np.zeros((2, 2)), "labels": np.zeros(2)}, {}, "has the arrays pictures, labels, but no images and labels"),
        (
            {f"{prefix}{name}": np.zeros(2) for prefix in ("", "train_") for name in ("images", "labels")},
            {},
            "a.npz has images and train_images, which are both for training: take one out, or rename it",
        ),
        (
            {f"train_{name}": np.zeros(2) for name in ("images", "labels", "set")},
            {},
            "a.npz has an array train_set, whose name is reserved: rename it",
        ),
        ({"images": np.zeros((2, 2)), "labels": np.zeros(3)}, {}, r"2 images and labels of shape \(3,\): give one per example"),
        ({"images": np.zeros((2, 2)), "labels": np.zeros((2, 3))}, {}, r"labels of shape \(2, 3\)"),
        ({"images": np.zeros((2, 2)), "labels": np.zeros(2)}, {"image_size": 8}, "Got image_size=8, but images is torch.float32"),
        (
            {"images": np.zeros((2, 5, 5, 4), np.uint8), "labels": np.zeros(2)},
            {"image_size": 8},
            "but images have 4 channels",
        ),
        ({"images": np.zeros((2, 2)), "labels": np.array([b"\xff", b"a"])}, {}, "Could not read .*npz .*UnicodeDecodeError"),
        ({"images": np.zeros((2, 2)), "labels": np.array(["a", ""])}, {}, "Some examples have no target; the first is in row 1"),
        ({"images": np.zeros((2, 2)), "labels": np.zeros(2)}, {"std": (0.5,)}, r"Got std=\(0.5,\), but images is torch.float32"),
        ({"images": np.zeros((2, 2)), "labels": np.array([{}, {}])}, {}, "Could not read .*npz"),
        (
            {"images": np.zeros((32, 3, 4, 4), np.uint8), "labels": np.arange(32) % 2},
            {"mean": (0.1, 0.2), "num_clients": 2},
            r"Got mean=\[0.1, 0.2\] for images of shape \(3, 4, 4\): give 1 number or 3, one per channel",
        ),
        (
            {"images": np.zeros((32, 4, 4), np.uint8), "labels": np.arange(32) % 2},
            {"std": (0.1, 0.2), "num_clients": 2},
            r"Got std=\[0.1, 0.2\] for images of shape \(1, 4, 4\): give 1 number\.",
        ),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(arrays: dict[str, Any], options: dict[str, Any], message: str) -> None:
    np.savez("a.npz", **arrays)
    with pytest.raises(FederationError, match=message):
        ArrayFiles("a.npz", **options).setup()


def test_tables_of_bytes_are_refused() -> None:
    """They would be divided by 255, as images are."""
    table, options = (X.numpy() > 0.5).astype("uint8"), {"partition": IID(), "num_clients": 2}
    message = r"torch.uint8 of shape \(40, 3\), but bytes are images, .* convert a table of numbers to float32"
    np.savez("a.npz", images=table, labels=Y.numpy())
    torch.save({"images": torch.from_numpy(table), "labels": Y}, "a.pt")
    given = [InMemory(inputs, Y, **options) for inputs in (table, torch.from_numpy(table), {INPUT: table})]
    for data in (ArrayFiles("a.npz", **options), ArrayFiles("a.pt", **options), *given):
        with pytest.raises(FederationError, match=message):
            data.setup()
    for kind in ("int32", "bool"):  # token ids; a network may convert
        InMemory(table.astype(kind), Y, **options).setup()


def test_only_tensors_are_unpickled() -> None:
    torch.save([torch.zeros(2)], "list.pt")
    with pytest.raises(FederationError, match="has a list: expected a dict of tensors"):
        ArrayFiles("list.pt").setup()
    torch.save({"images": Path()}, "object.pt")
    with pytest.raises(FederationError, match=r"Could not read object.pt \(UnpicklingError"):
        ArrayFiles("object.pt").setup()


X, Y = torch.arange(120.0).reshape(40, 3) / 120, torch.arange(40) % 2


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (X.bfloat16(), Y),
        (X.to(torch.float8_e4m3fn), Y),
        (nn.Parameter(X), Y),
        (torch.complex(X, X).conj().imag, Y),  # whose minus is a bit that says so
        (X, Y.bfloat16()),
    ],
    ids=["bfloat16", "float8", "parameter", "negative", "labels"],
)
def test_tensors_that_numpy_has_in_another_form(images: torch.Tensor, labels: torch.Tensor) -> None:
    torch.save({"images": images, "labels": labels}, "a.pt")
    found, classes = everything(ArrayFiles("a.pt", partition=IID(), num_clients=2))
    assert found.dtype == torch.float32
    assert torch.equal(found, images.detach().float())
    assert torch.equal(classes, Y)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            lambda: {"images": X.to_sparse(), "labels": Y},
            r"a.pt has images, which cannot be converted to an array \(.*to_dense\(\)",
        ),
        (lambda: {"images": torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), "labels": Y}, "a.pt has images, .*QUInt8"),
        (lambda: {"images": X, "labels": Y, "other": X.to_sparse_csr()}, "a.pt has other, which cannot be converted to an array"),
        (lambda: {"images": X.to("meta"), "labels": Y}, r"a.pt has images, .*no data"),
        (lambda: {"images": torch.complex(X, X).conj(), "labels": Y}, "images of a.pt: complex64"),
        (lambda: {"images": X, "labels": Y.to(torch.complex64)}, "a.pt has labels of complex64: give classes"),
        (lambda: {"images": X, "labels": Y, "file": Y}, "a.pt has an array file, whose name is reserved: rename it"),
        (lambda: {0: X, "labels": Y}, "a.pt has a tensor by the name 0, a int: name tensors by strings"),
    ],
    ids=["sparse", "quantised", "unused", "meta", "conjugate", "complex labels", "file", "number"],
)
@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:.*deprecated", "ignore:.*invariants")
def test_tensors_that_are_no_arrays_are_refused(tensors: Callable[[], dict[Any, torch.Tensor]], message: str) -> None:
    torch.save(tensors(), "a.pt")
    with pytest.raises(FederationError, match=message):
        ArrayFiles("a.pt").setup()


def test_a_member_that_is_no_array_is_refused() -> None:
    np.savez("a.npz", images=X.numpy(), labels=Y.numpy())
    with zipfile.ZipFile("a.npz", "a") as archive:
        archive.writestr("README.txt", "hello")
    with pytest.raises(FederationError, match=r"a.npz holds 'README.txt', which is not an array"):
        ArrayFiles("a.npz").setup()


@pytest.mark.parametrize("kind", [np.longdouble, np.float16])
def test_numbers_of_more_or_fewer_bits_than_a_network_takes(kind: type[np.floating]) -> None:
    """More than torch has, and half of them, as files are written to save space."""
    assert as_tensor(X.half().numpy().astype(kind)).dtype == torch.float32
    assert as_tensor(X.half().numpy().astype(kind)).tolist() == X.half().tolist()


# ------------------------------------------------------------------------------------------------------------- in memory


def test_arrays_in_memory() -> None:
    images, labels = np.random.default_rng(0).random((40, 6)), np.arange(40) % 4
    data = InMemory(images, labels, partition=IID(), num_clients=2)
    inputs, targets = everything(data)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, torch.from_numpy(images).float())
    assert (targets.tolist(), data.num_classes, data.class_names) == (labels.tolist(), 4, None)
    named = InMemory(images, labels, class_names=["a", "b", "c", "d", "e"], partition=IID(), num_clients=2)
    assert (named.num_classes, named.class_names) == (5, ["a", "b", "c", "d", "e"])
    with pytest.raises(FederationError, match="2 class_names and num_classes=4"):
        InMemory(images, labels, 4, class_names=["a", "b"])


@pytest.mark.filterwarnings("error")
def test_arrays_however_they_lie_in_memory() -> None:
    """Backwards, in another order of bytes, read-only as those of pandas tables, with gradients, labels of shape (N, 1)."""
    images, labels = np.random.default_rng(0).random((40, 6)).astype(np.float32), np.arange(40) % 4
    backwards = images[::-1].copy()[::-1], labels[::-1].copy()[::-1]
    fixed = images.copy()
    fixed.flags.writeable = False
    learned = torch.from_numpy(images).requires_grad_()
    for other, own in (
        backwards,
        (images.astype(">f8"), labels.astype(">i8")),
        (fixed, labels[:, None]),
    ):
        inputs, targets = everything(InMemory(other, own, partition=IID(), num_clients=2))
        assert (inputs.tolist(), targets.tolist()) == (images.tolist(), labels.tolist())
    inputs, _ = everything(InMemory({"x": learned}, labels, partition=IID(), num_clients=2))
    assert not inputs["x"].requires_grad
    with pytest.raises(FederationError, match="The images: masked numbers in an array"):
        InMemory(np.ma.masked_greater(images, 0.5), labels)


@pytest.mark.parametrize(
    ("shape", "becomes"),
    [
        ((5, 8, 8), (5, 1, 8, 8)),
        ((5, 8, 8, 3), (5, 3, 8, 8)),
        ((5, 8, 8, 4), (5, 4, 8, 8)),
        ((5, 3, 8, 8), (5, 3, 8, 8)),
        ((5, 1, 8, 3), (5, 1, 8, 3)),
        ((5, 8), (5, 8)),
    ],
)
def test_images_in_the_ways_arrays_have_them(shape: tuple[int, ...], becomes: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    tensor = as_tensor(array)
    assert tuple(tensor.shape) == becomes
    assert tensor.is_contiguous()
    expected = array[:, None] if len(shape) == 3 else array.transpose(0, 3, 1, 2) if shape != becomes else array
    assert np.array_equal(tensor.numpy(), expected)
    assert as_tensor(np.zeros((5, 8, 8), np.float32)).shape == (5, 8, 8)  # not bytes: as they are
