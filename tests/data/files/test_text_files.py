"""Texts in files of one's own."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.data import IID, CSVFiles, TextFiles
from lightning_fed.errors import FederationError
from tests.tiny_texts import save_tokenizer


@pytest.fixture
def tokenizer() -> str:
    return save_tokenizer(Path("tokenizer"))


def tokens_of(data: TextFiles) -> list[list[str]]:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained("tokenizer")
    rows = data.read().inputs["input_ids"]  # type: ignore[index]
    return [words.convert_ids_to_tokens(row[row != words.pad_token_id].tolist()) for row in rows]


def test_csv_files(tokenizer: str) -> None:
    Path("train.csv").write_text('\ufeffid,label,text\n1,no,"the ""dog"", barks"\n2,yes,"the\ncat"\n')
    Path("test.csv").write_text("id,label,text\n3,yes,\n")
    data = TextFiles("train.csv", tokenizer, test_path="test.csv")
    assert data.num_classes == 2
    assert data.class_names == ["no", "yes"]
    assert tokens_of(data)[0] == ["[CLS]", "the", '"', "dog", '"', ",", "barks", "[SEP]"]
    assert tokens_of(data)[2] == ["[CLS]", "[SEP]"]
    table = data.read()
    assert table.sets is not None
    assert table.sets.tolist() == ["train", "train", "test"]
    assert table.columns["id"].tolist() == ["1", "2", "3"]
    assert table.columns["file"].tolist() == ["train", "train", "test"]


def test_a_warning_counts_empty_texts(tokenizer: str, caplog: pytest.LogCaptureFixture) -> None:
    Path("t.csv").write_text("a,b,label\ndog,cat,0\n , cat,1\ndog,,1\ncat,dog,0\n")
    TextFiles("t.csv", tokenizer, ["a", "b"]).read()
    assert caplog.messages == [
        "t.csv: 2 examples without a text, the first in t.csv, line 3: fill in a and b, or take the lines out."
    ]


def test_tsv_files_have_no_quotation(tokenizer: str) -> None:
    Path("train.tsv").write_text('premise\thypothesis\tgold\n"the dog\t"naps" , no\t2\n')
    data = TextFiles("train.tsv", tokenizer, ["premise", "hypothesis"], "gold", classes=["0", "1", "2"], split="official")
    assert tokens_of(data) == [["[CLS]", '"', "the", "dog", "[SEP]", '"', "naps", '"', ",", "[UNK]", "[SEP]"]]
    assert data.num_classes == 3
    with pytest.raises(FederationError, match="TextFiles has no official test set"):
        data.setup()


def test_clients_and_sets_are_columns_of_the_files(tokenizer: str) -> None:
    lines = [f"the dog {k},{k % 2},{'xy'[k > 7]},{('train', 'val', 'test', 'train')[k % 4]}" for k in range(16)]
    Path("texts.csv").write_text("text,label,author,fold\n" + "\n".join(lines))
    data = TextFiles("texts.csv", tokenizer, client="author", split_column="fold")
    assert data.num_clients == 2
    assert data.client_names == ["x", "y"]
    assert [len(part) for part in data._splits[0]] == [4, 2, 2]
    assert data.class_names is None  # 0 and 1
    with pytest.raises(FederationError, match="has no column 'writer'"):
        data.column("writer")


@pytest.mark.parametrize("kind", ["CSVFiles", "TextFiles"])
def test_classes_that_are_numbers_may_be_named(kind: str, tokenizer: str) -> None:
    Path("t.csv").write_text("text,label\n" + "1,0\n2,2\n" * 10)
    given: dict[str, Any] = {"classes": ["0", "1", "2"], "partition": IID(), "num_clients": 2}
    data = TextFiles("t.csv", tokenizer, **given) if kind == "TextFiles" else CSVFiles("t.csv", target="label", **given)
    assert data.num_classes == 3
    assert data.label_counts()[:, 1].sum() == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("label,sentence\n0,a\n", r"train\.csv has the columns label, sentence, file, but no text: check input and target"),
        ("text,label\na,0\nb,\n", r"train\.csv, line 3, has nothing in the column 'label'"),
    ],
)
def test_files_that_do_not_fit_are_refused(content: str, message: str, tokenizer: str) -> None:
    Path("train.csv").write_text(content)
    with pytest.raises(FederationError, match=message):
        TextFiles("train.csv", tokenizer).setup()


@pytest.mark.parametrize("kind", ["CSVFiles", "TextFiles"])
def test_folders_of_a_partitioned_table_are_columns(kind: str, tokenizer: str) -> None:
    """Below the path alone, and unless the files have the column, too."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": ["1", "2", "3"] * 8, "label": [0, 1] * 12, "year": [1999] * 24})
    for site in ("St%20Mary", "a=b"):
        folder = Path(f"run=7/d/site={site}/year=2000")
        folder.mkdir(parents=True)
        parquet.write_table(table, folder / "part.parquet")

    def data(path: str = "run=7/d", client: str = "site") -> CSVFiles | TextFiles:
        given: dict[str, Any] = {"path": path, "target": "label", "input": "text", "client": client}
        return CSVFiles(**given) if kind == "CSVFiles" else TextFiles(**given, tokenizer=tokenizer)

    found = data()
    assert (found.num_clients, found.client_names) == (2, ["St Mary", "a=b"])
    assert {*found.read().columns} - {"text", "label"} == {"site", "year", "file"}
    assert {*found.read().columns["year"]} == {"1999"}
    assert not isinstance(found, CSVFiles) or found.titles == ["text"]
    assert "site" not in data("run=7/d/site=a=b", "year").read().columns
    Path("run=7/d/site=a=b").rename("run=7/d/site=__HIVE_DEFAULT_PARTITION__")
    with pytest.raises(FederationError, match=r"part.parquet, row 1, has nothing in the column 'site', which is the client"):
        data().setup()


def test_missing_files_and_columns_are_named(tokenizer: str) -> None:
    with pytest.raises(FederationError, match=r"neither a file nor a folder .*nowhere\.csv"):
        TextFiles("nowhere.csv", tokenizer).setup()
    with pytest.raises(FederationError, match="one column or of two"):
        TextFiles("", tokenizer, input=[])
    with pytest.raises(TypeError, match="augment"):
        TextFiles("", tokenizer, augment="crop_flip")  # texts are not cropped


def labels_of(kind: str, labels: list[str], tokenizer: str, **options: Any) -> tuple[Any, Any]:
    Path("t.csv").write_text("text,label\n" + "".join(f"{k},{label}\n" for k, label in enumerate(labels)))
    given = {"partition": IID(), "num_clients": 2} | options
    data = TextFiles("t.csv", tokenizer, **given) if kind == "TextFiles" else CSVFiles("t.csv", target="label", **given)
    return data.num_classes, data.class_names


@pytest.mark.parametrize("kind", ["CSVFiles", "TextFiles"])
@pytest.mark.parametrize("name", ["NA", "null", "?", "<NA>", "NaT"])
def test_a_missing_name_is_refused_unless_it_is_a_class(kind: str, name: str, tokenizer: str) -> None:
    found = re.escape(name)
    with pytest.raises(FederationError, match=rf"t.csv, line 3, has '{found}' in the column 'label', which is a target.*classes"):
        labels_of(kind, ["1", name] * 10, tokenizer)
    assert labels_of(kind, ["1", name] * 10, tokenizer, classes=[name, "1"]) == (2, [name, "1"])
    Path("who.csv").write_text("text,label,who\n" + f"1,0,a\n2,1,{name}\n" * 10)
    given: dict[str, Any] = {"path": "who.csv", "target": "label", "client": "who"}
    data = CSVFiles(**given) if kind == "CSVFiles" else TextFiles(**given, tokenizer=tokenizer)
    with pytest.raises(FederationError, match=rf"who.csv, line 3, has '{found}' in the column 'who', which is the client: fill"):
        data.setup()
    given = {"path": "who.csv", "target": "label", "input": "text", "group": "who", "num_clients": 2}
    grouped = CSVFiles(**given) if kind == "CSVFiles" else TextFiles(**given, tokenizer=tokenizer)
    with pytest.raises(FederationError, match=rf"who.csv, line 3, has '{found}' in the column 'who', which is the group: fill"):
        grouped.setup()


@pytest.mark.parametrize("kind", ["CSVFiles", "TextFiles"])
def test_blanks_around_a_name_do_not_count(kind: str, tokenizer: str) -> None:
    Path("t.csv").write_text("text,label,who\n" + "1,n,a\n2, y,a \n3,y , b\n4,n,b\n" * 10)
    given: dict[str, Any] = {"path": "t.csv", "target": "label", "client": "who"}
    data = CSVFiles(**given) if kind == "CSVFiles" else TextFiles(**given, tokenizer=tokenizer)
    data.setup()
    assert (data.class_names, data.client_names) == (["n", "y"], ["a", "b"])


@pytest.mark.parametrize("kind", ["CSVFiles", "TextFiles"])
def test_clients_and_groups_that_are_numbers_may_be_written_with_a_point(kind: str, tokenizer: str) -> None:
    """As pandas writes whole numbers of a column with gaps."""

    def data(**options: Any) -> CSVFiles | TextFiles:
        given: dict[str, Any] = {"path": "d", "target": "label", "input": "text"} | options
        return CSVFiles(**given) if kind == "CSVFiles" else TextFiles(**given, tokenizer=tokenizer)

    Path("d").mkdir()
    for name, point in (("a", ""), ("b", ".0")):
        Path(f"d/{name}.csv").write_text("text,label,who\n" + f"1,0,1{point}\n2,1,2{point}\n3,1,10{point}\n" * 4)
    clients = data(client="who")
    assert (clients.num_clients, clients.client_names) == (3, ["1", "2", "10"])
    Path("names.csv").write_text("text,label,who\n" + "1,0,01\n2,1,1.0\n3,1,1e3\n4,0,1000\n" * 4)
    names = data(path="names.csv", client="who")
    assert (names.num_clients, sorted(names.client_names or ())) == (4, ["01", "1.0", "1000", "1e3"])
    Path("test.csv").write_text("text,label,who\n2,0,2.0\n")
    with pytest.raises(FederationError, match="Rows whose who is '2' differ in 'set'"):
        data(path="d/a.csv", group="who", test_path="test.csv", num_clients=2).setup()


@pytest.mark.parametrize("kind", ["CSVFiles", "TextFiles"])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["01", "1"], ["01", "1"]),
        (["731000119105000001", "731000119105000002"], ["731000119105000001", "731000119105000002"]),  # float64 has them as one
        (["9" * 31, "8" * 31], ["8" * 31, "9" * 31]),
        (["--5", "5"], ["--5", "5"]),
        (["2.0", "1.0"], ["1", "2"]),
        (["2e20", "1e20"], ["1e20", "2e20"]),
    ],
)
def test_classes_are_as_they_are_written(kind: str, labels: list[str], names: list[str], tokenizer: str) -> None:
    assert labels_of(kind, labels * 10, tokenizer) == (2, names)
    if labels[0] == "01":
        assert labels_of(kind, labels * 10, tokenizer, classes=["1", "01"]) == (2, ["1", "01"])


def test_a_length_that_leaves_nothing_of_a_text_is_refused(tokenizer: str) -> None:
    """The library would not cut at all."""
    Path("a.csv").write_text("text,label\n" + "a b c,x\na b c,y\n" * 10)
    with pytest.raises(FederationError, match="max_length is 2, but the tokenizer adds 2 tokens to each text"):
        TextFiles("a.csv", tokenizer, max_length=2, num_clients=1).setup()
    data = TextFiles("a.csv", tokenizer, max_length=3, num_clients=1)
    assert data._loaded().images["input_ids"].shape == (20, 3)  # type: ignore[index]


def test_files_of_one_name_are_told_apart_by_their_folders(tokenizer: str) -> None:
    for folder in ("a", "b", "tests"):
        Path(folder).mkdir()
        Path(folder, "data.csv").write_text("text,label\n" + "the dog,0\nthe cat,1\n" * 4)
    Path("files").mkdir()
    Path("a").rename("files/a")
    Path("b").rename("files/b")
    data = TextFiles("files", tokenizer, client="file")
    assert data.num_clients == 2
    assert data.client_names == ["a/data", "b/data"]
    table = TextFiles("files/a", tokenizer, test_path="tests").read()
    assert set(table.columns["file"]) == {"data"}  # one client's training set and its test set
    Path("own.csv").write_text("text,label,file\nthe dog,0,x\n")
    with pytest.raises(FederationError, match=r"own\.csv has a column 'file', .*: rename the column"):
        TextFiles("own.csv", tokenizer).setup()


def test_endings_in_capitals(tokenizer: str) -> None:
    Path("T.TSV").write_text('text\tlabel\n"the dog\t0\nthe cat\t1\n')
    assert [words[1] for words in tokens_of(TextFiles("T.TSV", tokenizer))] == ['"', "the"]
