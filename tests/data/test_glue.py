"""GLUE: each task's own format, on a few rows and, where they are, the real files."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_fed.data import GLUE, BySimilarity, FederatedDataModule
from lightning_fed.data.glue import TASKS
from lightning_fed.errors import FederationError

real = pytest.mark.skipif("LIGHTNING_FED_DATA" not in os.environ, reason="needs real datasets: set LIGHTNING_FED_DATA")

# One file per task with two good rows: folder, development set, content, texts, labels.
FILES = {
    "cola": ("CoLA", "dev", 'gj04\t1\t\tA "b\ngj04\t0\t*\tC d.\n', [('A "b',), ("C d.",)], [1, 0]),
    "sst2": ("SST-2", "dev", 'sentence\tlabel\n"a" b \t1\nc \t0\n', [('"a" b ',), ("c ",)], [1, 0]),
    "mrpc": (
        "MRPC",
        "dev",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t12\t13\t" A\tB\n0\t2\t3\tC\tD\n',
        [('" A', "B"), ("C", "D")],
        [1, 0],
    ),
    "qqp": (
        "QQP",
        "dev",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tA?\tB?\t0\n4\t5\t6\tcut short\n7\t8\t9\tC?\tD?\t1\n",
        [("A?", "B?"), ("C?", "D?")],
        [0, 1],
    ),
    "mnli": (
        "MNLI",
        "dev_matched",
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\t"
        "sentence1\tsentence2\tlabel1\tgold_label\n"
        "0\t1\t1n\tfiction\t( a )\t( b )\t(ROOT a)\t(ROOT b)\tA\tB\tentailment\tcontradiction\n"
        "1\t2\t2e\tfiction\t( c )\t( d )\t(ROOT c)\t(ROOT d)\tC\tD\tentailment\tneutral\n",
        [("A", "B"), ("C", "D")],
        [2, 1],
    ),
    "qnli": (
        "QNLI",
        "dev",
        'index\tquestion\tsentence\tlabel\n0\tWho?\t"A".\tentailment\n1\tWhat?\tB.\tnot_entailment\n',
        [("Who?", '"A".'), ("What?", "B.")],
        [0, 1],
    ),
    "rte": (
        "RTE",
        "dev",
        "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n",
        [("A", "B"), ("C", "D")],
        [1, 0],
    ),
}


def test_every_task_has_its_format_here() -> None:
    assert FILES.keys() == TASKS.keys()


@pytest.mark.parametrize("task", FILES)
def test_files(task: Any, tmp_path: Path) -> None:
    folder, dev, content, texts, labels = FILES[task]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "train.tsv").write_text(content)
    (tmp_path / folder / f"{dev}.tsv").write_text(content)
    data = GLUE(task, str(tmp_path), tokenizer="unused")
    assert data.num_classes == (3 if task == "mnli" else 2)
    assert data.split == "official"
    assert data.examples() == ((texts, labels), (texts, labels))


@pytest.mark.parametrize("task", FILES)
def test_hub(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"mnli": ("premise", "hypothesis"), "qnli": ("question", "sentence"), "qqp": ("question1", "question2")}
    columns |= {"cola": ("sentence",), "sst2": ("sentence",)}
    texts = [("A",), ("C",)] if task in ("cola", "sst2") else [("A", "B"), ("C", "D")]
    named = dict(zip(columns.get(task, ("sentence1", "sentence2")), zip(*texts, strict=True), strict=True))
    rows = datasets.Dataset.from_dict({**named, "label": [1, 0], "idx": [0, 1]})
    dev = "validation_matched" if task == "mnli" else "validation"
    asked: list[Any] = []
    sets = {"train": rows, dev: rows.select([1]), "test": rows}
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or sets)
    assert GLUE(task, tokenizer="unused").examples() == ((texts, [1, 0]), (texts[1:], [0]))
    assert asked == [("nyu-mll/glue", task)]


def test_an_incomplete_line_is_refused_except_in_qqp(tmp_path: Path) -> None:
    (tmp_path / "SST-2").mkdir()
    for part in ("train", "dev"):
        (tmp_path / "SST-2" / f"{part}.tsv").write_text("sentence\tlabel\na\t1\nb\n")
    with pytest.raises(FederationError, match=r"train\.tsv, line 3, has fewer columns"):
        GLUE("sst2", str(tmp_path), tokenizer="unused").examples()


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "MNLI").mkdir()
    (tmp_path / "MNLI" / "train.tsv").touch()
    message = rf"no file {tmp_path}/MNLI/dev_matched\.tsv: .*root to the folder that has MNLI/train\.tsv and MNLI/dev_matched\.tsv"
    with pytest.raises(FederationError, match=message):
        GLUE("mnli", str(tmp_path), tokenizer="unused").examples()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FederationError, match=r'package datasets.*pip install "lightning-fed\[nlp\]"'):
        GLUE("rte", tokenizer="unused").examples()


def test_other_tasks_are_refused() -> None:
    with pytest.raises(FederationError, match="task='stsb': give one of cola, sst2"):
        GLUE("stsb", tokenizer="unused")  # type: ignore[arg-type]


def test_the_command_line_builds_it() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(FederatedDataModule, "data")
    partition = {"class_path": "BySimilarity", "init_args": {"sorted_fraction": 0.9}}
    init_args = {"task": "mnli", "tokenizer": "roberta-base", "max_length": 64, "partition": partition}
    data = parser.instantiate(parser.parse_object({"data": {"class_path": "GLUE", "init_args": init_args}})).data
    assert (data.num_classes, data.split, data.max_length, data.partition) == (3, "official", 64, BySimilarity(sorted_fraction=0.9))


# -------------------------------------------------------------------------------------------------------- the real files


@real
@pytest.mark.parametrize(
    ("task", "train", "dev", "positive"),
    [
        ("cola", 8551, 1043, (0.704, 0.691)),
        ("sst2", 67349, 872, (0.558, 0.509)),
        ("mrpc", 3667, 408, (0.674, 0.684)),
        ("rte", 2490, 277, (0.498, 0.473)),
    ],
)
def test_real_files(task: Any, train: int, dev: int, positive: tuple[float, float]) -> None:
    sets = GLUE(task, os.environ["LIGHTNING_FED_DATA"] + "/glue", tokenizer="unused").examples()
    assert [len(labels) for _, labels in sets] == [len(texts) for texts, _ in sets] == [train, dev]
    assert [sum(labels) / len(labels) for _, labels in sets] == pytest.approx(positive, abs=0.001)


@real
def test_real_cola(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from test_text import save_tokenizer

    data = GLUE(
        "cola",
        os.environ["LIGHTNING_FED_DATA"] + "/glue",
        tokenizer=save_tokenizer(tmp_path / "tokenizer"),
        num_clients=8,
        partition=BySimilarity(sorted_fraction=0.9),
        val_share=0.0,
    )
    assert sum(client.num_train for client in data.clients) == 8551
    assert sum(client.num_test for client in data.clients) == 1043
    counts = data.label_counts()
    assert float((counts.amax(1) / counts.sum(1)).mean()) == pytest.approx(0.92, abs=0.0075)
