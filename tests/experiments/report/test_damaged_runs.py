"""Files of runs that are damaged, or of something else: said in one line, with the file."""

from pathlib import Path

import pytest
import yaml
from written_runs import write_sweep

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.report import report_on
from lightning_fed.experiments.sweep.folder import CellFolder

RUN = Path("sweep/FedAvg/seed_0/version_0")


@pytest.fixture(autouse=True)
def sweep() -> None:
    write_sweep(Path("sweep"), {"FedAvg": [0.80, 0.82], "Standalone": [0.50, 0.51]})
    assert (RUN / "metrics.csv").is_file()


def refused(*parts: str) -> None:
    with pytest.raises(FederationError) as caught:
        report_on([Path("sweep")]).write(Path("out"))
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message
    assert len(message) < 500


def changed(path: Path, old: str, new: str) -> bytes:
    text = path.read_text()
    assert old in text
    return text.replace(old, new, 1).encode()


@pytest.mark.parametrize("file", ["metrics.csv", "clients.csv"])
@pytest.mark.parametrize(
    "content", [b"", b"\x89PNG\x00\xff\xfe", b"a,b\n1,2\n", b'round,client\n"1'], ids=["empty", "binary", "other", "cut"]
)
def test_tables(file: str, content: bytes) -> None:
    (RUN / file).write_bytes(content)
    refused(f"{RUN / file} ")


def test_rows_that_are_cut_off_or_no_numbers() -> None:
    path = RUN / "metrics.csv"
    header, first, *_ = path.read_text().splitlines()
    path.write_text(f"{header}\n{first}\n{'x' + first}\n")
    refused(f"{path} has 'x1", "in column 'round' of row 2, expected a number")
    path.write_text(f"{header}\n")
    refused(f"{path} has no rows")
    path.write_text(f"{header}\n{first}\n{first},1,2,3\n")
    refused(f"{path} is no table")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000], ids=["empty", "list", "cut", "binary", "deep"])
def test_facts(content: bytes) -> None:
    (RUN / "run.json").write_bytes(content)
    refused(f"{RUN / 'run.json'} does not say what a run writes there")


@pytest.mark.parametrize("key", ["model", "seed_everything", "federation"])
def test_configurations(key: str) -> None:
    content = yaml.safe_load((RUN / "config.yaml").read_text())
    del content[key]
    (RUN / "config.yaml").write_text(yaml.safe_dump(content))
    refused(f"{RUN / 'config.yaml'} has {key}", "expected")
    (RUN / "config.yaml").write_text("model: {}\nmodel: {}\n")
    refused(f"{RUN / 'config.yaml'} is not YAML", "'model' is given twice")


def test_cells() -> None:
    Path("sweep/cells.csv").write_text("")
    refused("sweep/cells.csv is no table")
    Path("sweep/cells.csv").unlink()
    cell = RUN.parent / "cell.json"
    for content in ("", "[]", '{"seconds": 1}'):
        cell.write_text(content)
        with pytest.raises(FederationError, match=r"cell\.json is damaged"):
            _ = CellFolder(cell.parent).result
    cell.write_text('{"status": "finished", "later": 1}')  # what another version writes besides
    result = CellFolder(cell.parent).result
    assert result is not None
    assert result.status == "finished"


def test_foreign_folders_beside_runs_are_passed_over() -> None:
    copy = RUN.parent / "version_old"
    copy.mkdir()
    (RUN.parent / "cell.json").write_text('{"status": "finished"}')
    for path in RUN.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    assert CellFolder(RUN.parent).run == RUN
    assert set(report_on([Path("sweep")]).runs["folder"]) >= {str(RUN)}
