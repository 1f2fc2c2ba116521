"""Pages whose tables are rendered from files: those of the documentation are what their files say."""

import shutil
from pathlib import Path

import pytest
import yaml
from written_runs import write_sweep

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report import load_runs
from lightning_fed.experiments.report.document import BLOCK, rendered
from lightning_fed.experiments.report.report import as_csv, report_on

DOCS = Path(__file__).parents[3] / "docs"
README = DOCS.parent / "README.md"
PAGES = [page for page in (README, *sorted(DOCS.rglob("*.md"))) if BLOCK.search(page.read_text())]
assert {README, DOCS / "results" / "digits.md"} <= set(PAGES)


@pytest.mark.often(1)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_documentation_are_those_of_their_files(page: Path) -> None:
    assert page.read_text() == rendered(page), (
        f"python -m lightning_fed.experiments.report.document {page.relative_to(DOCS.parent)}"
    )


def test_every_file_of_runs_is_shown() -> None:
    shown = {page.parent / match["runs"] for page in PAGES for match in BLOCK.finditer(page.read_text())}
    assert shown == set((DOCS / "results").glob("*.csv"))


@pytest.fixture
def page() -> Path:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8, 0.9], "Standalone": [0.5, 0.5]})
    Path("runs.csv").write_text(as_csv(load_runs(sweep)))
    Path("page.md").write_text("Before.\n\n<!-- runs: runs.csv, sweep: sweep/sweep.yaml -->\n<!-- end -->\n\nAfter.\n")
    return Path("page.md")


def test_a_table_is_put_between_its_comments_and_stays(page: Path) -> None:
    page.write_text(rendered(page))
    text = page.read_text()
    assert "| FedAvg | **85.00 ± 7.07** |" in text
    assert (text.startswith("Before.\n\n<!-- runs"), text.endswith("<!-- end -->\n\nAfter.\n")) == (True, True)
    assert rendered(page) == text
    shutil.copy("runs.csv", "before.csv")
    Path("runs.csv").write_text(Path("before.csv").read_text().replace(",0.9,", ",0.7,"))
    assert rendered(page) != text


def test_a_file_without_a_run_of_its_sweep_is_refused(page: Path) -> None:
    *others, last = Path("runs.csv").read_text().splitlines()
    assert last.startswith("Standalone,,1,")
    Path("runs.csv").write_text("\n".join([*others, ""]))
    with pytest.raises(FederationError, match=r"runs.csv and its sweep differ in the run \('Standalone', '', 1\)"):
        rendered(page)
    Path("runs.csv").write_text(f"{others[0]}\n")
    with pytest.raises(FederationError, match=r"differ in the run \('FedAvg', '', 0\)"):
        rendered(page)


def test_seeds_that_were_not_played_yet_are_named(page: Path) -> None:
    assert "not been run yet" not in rendered(page)
    sweep = yaml.safe_load(Path("sweep/sweep.yaml").read_text())
    Path("sweep/sweep.yaml").write_text(yaml.safe_dump(sweep | {"seeds": [0, 1, 2, 3]}))
    assert "\n\nSeeds of the sweep that have not been run yet: 2, 3.\n\n<!-- end -->" in rendered(page)


def test_settings_that_were_not_played_yet_are_named(page: Path) -> None:
    sweep = yaml.safe_load(Path("sweep/sweep.yaml").read_text())
    Path("runs.csv").write_text("".join(line.replace(",,", ",CoLA,", 1) for line in Path("runs.csv").read_text().splitlines(True)))
    rates = {"CoLA": {"model.init_args.lr": 0.1}, "RTE": {"model.init_args.lr": 1}}
    Path("sweep/sweep.yaml").write_text(yaml.safe_dump(sweep | {"grid": {"task": rates}}))
    assert "\n\nSettings of the sweep that have not been run yet: RTE.\n\n<!-- end -->" in rendered(page)
    Path("sweep/sweep.yaml").write_text(yaml.safe_dump(sweep | {"grid": {"task": {"CoLA": rates["CoLA"]}}}))
    assert "not been run yet" not in rendered(page)


def test_a_table_shows_what_its_sweep_asks_for(page: Path) -> None:
    sweep = yaml.safe_load(Path("sweep/sweep.yaml").read_text())
    asked = {"report": {"at": "best", "baseline": "FedAvg", "equal": "flops"}}
    Path("sweep/sweep.yaml").write_text(yaml.safe_dump(sweep | asked))
    with pytest.raises(FederationError, match="has no column equal_flops"):
        rendered(page)
    Path("runs.csv").write_text(report_on([Path("sweep")]).text("csv"))
    assert "chosen on test data" in rendered(page)
    assert "equal flops, minus FedAvg" in rendered(page)
