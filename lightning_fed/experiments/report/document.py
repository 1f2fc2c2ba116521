"""Tables in a Markdown page, rendered from files beside it.

A table stands between two comments. The first names the runs and, if there is one, their sweep, both relative to the page:

    <!-- runs: quickstart.csv, sweep: ../../configs/quickstart.sweep.yaml -->
    <!-- end -->

``python -m lightning_fed.experiments.report.document docs/results/digits.md`` renders them again.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.methods_table import tables
from lightning_fed.experiments.report.runs import read_runs
from lightning_fed.experiments.report.writers import markdown
from lightning_fed.experiments.sweep.plan import ReportOptions, Sweep
from lightning_fed.experiments.sweep.sweep_file import read_sweep
from lightning_fed.experiments.sweep.tuning import inequality

BLOCK = re.compile(r"(<!-- runs: (?P<runs>[^,\s]+)(?:, sweep: (?P<sweep>\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: Path) -> str:
    """The page with all its tables rendered from their files.

    Raises:
        FederationError: if the runs of a file are not those of its sweep, or of some of its settings and seeds.
    """

    def table(match: re.Match[str]) -> str:
        runs = read_runs(page.parent / match["runs"])
        sweep = read_sweep(page.parent / match["sweep"]) if match["sweep"] else None
        missing = _missing(page.parent / match["runs"], runs, sweep) if sweep else {}
        options, published = (sweep.report, sweep.published) if sweep else (ReportOptions(), ())
        parts = [markdown(table) for table in tables(runs, options, published)]
        if sweep and (unequal := inequality(sweep)):
            parts.append(f"{unequal}\n")
        for kind, names in missing.items():
            parts.append(f"{kind} of the sweep that have not been run yet: {', '.join(names)}.\n")
        return match[1] + "\n" + "\n".join(parts) + "\n" + match[4]

    return BLOCK.sub(table, page.read_text(encoding="utf-8"))


def _missing(path: Path, runs: pd.DataFrame, sweep: Sweep) -> dict[str, list[str]]:
    """Settings and seeds of a sweep without runs, by kind. Of the others the file must have all runs."""
    crossed = isinstance(sweep.seeds, dict)  # otherwise the base may have one partition for all
    seeds: list[Any] = [int(run.seed) if not crossed else (int(run.partition), int(run.seed)) for run in runs.itertuples()]
    played = set(zip(runs["method"].astype(str), runs["setting"].astype(str), seeds, strict=True))
    cells = [(cell.method, cell.setting, cell.draw if crossed else cell.seed) for cell in sweep.cells]
    all_settings = list(dict.fromkeys(cell.setting for cell in sweep.cells))
    all_seeds: list[Any] = [draw if crossed else draw[1] for draw in sweep.draws]
    settings = {setting for _, setting, _ in played} or set(all_settings)
    begun = set(seeds) or set(all_seeds)
    if differing := sorted(played ^ {cell for cell in cells if cell[1] in settings and cell[2] in begun}):
        raise FederationError(f"{path} and its sweep differ in the run {differing[0]}: run the sweep and write the file again.")
    missing = {
        "Settings": [setting for setting in all_settings if setting not in settings],
        "Seeds": [f"{seed[0]} × {seed[1]}" if crossed else str(seed) for seed in all_seeds if seed not in begun],
    }
    return {kind: names for kind, names in missing.items() if names}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(rendered(Path(name)), encoding="utf-8")
