"""Tables in a Markdown page, rendered from files that lie beside it.

A table stands between two comments, of which the first names the runs and, if there is one, their sweep, both seen from the page:

    <!-- runs: results/quickstart.csv, sweep: ../configs/quickstart.sweep.yaml -->
    <!-- end -->

``python -m lightning_fed.experiments.report.document docs/results.md`` renders them again.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.runs import read_runs
from lightning_fed.experiments.report.table import tables
from lightning_fed.experiments.sweep.plan import ReportOptions, Sweep, read_sweep

BLOCK = re.compile(r"(<!-- runs: (?P<runs>[^,\s]+)(?:, sweep: (?P<sweep>\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: Path) -> str:
    """The page with all its tables rendered from their files.

    Raises:
        FederationError: if the runs of a file are not those of its sweep, or of some of its seeds.
    """

    def table(match: re.Match[str]) -> str:
        runs = read_runs(page.parent / match["runs"])
        sweep = read_sweep(page.parent / match["sweep"]) if match["sweep"] else None
        missing = _missing(page.parent / match["runs"], runs, sweep) if sweep else ()
        options, published = (sweep.report, sweep.published) if sweep else (ReportOptions(), ())
        layouts = tables(runs, options.baseline, options.pooled, published, options.at, options.equal, options.room)
        parts = [layout.markdown() for layout in layouts]
        if missing:
            parts.append(f"Seeds of the sweep that have not been played yet: {', '.join(map(str, missing))}.\n")
        return match[1] + "\n" + "\n".join(parts) + "\n" + match[4]

    return BLOCK.sub(table, page.read_text())


def _missing(path: Path, runs: pd.DataFrame, sweep: Sweep) -> Sequence[int]:
    """Seeds of a sweep that were not played yet. The committed runs must be all that the sweep plays with the other seeds."""
    played = {(str(run.method), str(run.setting), int(run.seed)) for run in runs.itertuples()}
    seeds = {seed for *_, seed in played} or set(sweep.seeds)
    planned = {(cell.method, cell.setting, cell.seed) for cell in sweep.cells if cell.seed in seeds}
    if differing := sorted(played ^ planned):
        raise FederationError(f"{path} and its sweep differ in the run {differing[0]}: play the sweep and write the file again.")
    return [seed for seed in sweep.seeds if seed not in seeds]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(rendered(Path(name)))
