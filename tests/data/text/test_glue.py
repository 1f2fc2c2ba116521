"""GLUE: each task's own format, on a few rows and, where they are, the real files."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_files import REAL, put_into_cache, real
from tiny_texts import FILES

from lightning_fed.data import GLUE, BySimilarity
from lightning_fed.data.text.glue import GLUE_TASKS
from lightning_fed.errors import FederationError


def test_every_task_has_its_format_here() -> None:
    assert FILES.keys() == GLUE_TASKS.keys()


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
    put_into_cache(monkeypatch, "nyu-mll/glue", {"train": rows, dev: rows.select([1]), "test": rows}, task)
    assert GLUE(task, tokenizer="unused").examples() == ((texts, [1, 0]), (texts[1:], [0]))


def test_an_incomplete_line_is_refused_except_in_qqp(tmp_path: Path) -> None:
    (tmp_path / "SST-2").mkdir()
    for part in ("train", "dev"):
        (tmp_path / "SST-2" / f"{part}.tsv").write_text("sentence\tlabel\na\t1\nb\n")
    with pytest.raises(FederationError, match=r"train\.tsv, line 3, has 1 column, expected 2"):
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
    sets = GLUE(task, f"{REAL}/glue", tokenizer="unused").examples()
    assert [len(labels) for _, labels in sets] == [len(texts) for texts, _ in sets] == [train, dev]
    assert [sum(labels) / len(labels) for _, labels in sets] == pytest.approx(positive, abs=0.001)


@real
def test_real_cola(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tiny_texts import save_tokenizer

    data = GLUE(
        "cola",
        f"{REAL}/glue",
        tokenizer=save_tokenizer(tmp_path / "tokenizer"),
        num_clients=8,
        partition=BySimilarity(sorted_fraction=0.9),
        val_share=0.0,
    )
    assert sum(client.num_train for client in data.clients) == 8551
    assert sum(client.num_test for client in data.clients) == 1043
    counts = data.label_counts()
    assert float((counts.amax(1) / counts.sum(1)).mean()) == pytest.approx(0.92, abs=0.0075)
