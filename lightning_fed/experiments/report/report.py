"""A complete report: the runs, their tables, and the output folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import pandas as pd
from rich.console import Console

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.budgets_table import budget_tables
from lightning_fed.experiments.report.clients_table import clients_tables, cross_tables
from lightning_fed.experiments.report.comparison import Comparison, comparisons, unfinished
from lightning_fed.experiments.report.files import read_commands
from lightning_fed.experiments.report.folders import RunFolder, run_folders
from lightning_fed.experiments.report.layout import Layout
from lightning_fed.experiments.report.methods_table import finding, methods_table
from lightning_fed.experiments.report.played import settings_table
from lightning_fed.experiments.report.runs import KEY, READ, stacked, table_of
from lightning_fed.experiments.report.seeds_table import seed_tables
from lightning_fed.experiments.report.tuning_table import tuning_tables
from lightning_fed.experiments.report.views import View, kind_of, measure_of
from lightning_fed.experiments.report.writers import in_latex, in_markdown, latex, markdown, page, terminal
from lightning_fed.experiments.sweep.folder import CellFolder
from lightning_fed.experiments.sweep.plan import ReportOptions, Sweep, file_name
from lightning_fed.experiments.sweep.tuning import Trial, chosen, grouped, inequality, trials
from lightning_fed.formatting import counted

Format = Literal["md", "tex", "csv"]


@dataclass(frozen=True)
class Report:
    """The report of a comparison.

    Args:
        folders: folders of the runs.
        runs: a row per run, see :func:`lightning_fed.experiments.report.load_runs`.
        rounds: a row per run and round, see :func:`lightning_fed.experiments.report.load_rounds`.
        clients: a row per run and client, see :func:`lightning_fed.experiments.report.load_clients`.
        compared: the comparison of each setting.
        tables: all tables, in order.
        notes: further notes, such as runs that were left out.
        commands: commands of the runs.
        tried: trials of tuned methods.
        view: the reported round.
    """

    folders: Sequence[RunFolder]
    runs: pd.DataFrame
    rounds: pd.DataFrame
    clients: pd.DataFrame
    compared: list[Comparison]
    tables: list[Layout]
    notes: list[str]
    commands: list[str]
    tried: list[Trial]
    view: View

    def show(self, console: Console) -> None:
        for table in self.tables:
            console.print(terminal(table, console.width))
        for note in self.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)

    def text(self, format: Format) -> str:
        """All tables and notes in Markdown or LaTeX, or the runs as CSV."""
        if format == "csv":
            return as_csv(self.runs)
        table, text = (markdown, in_markdown) if format == "md" else (latex, in_latex)
        return "\n".join([*map(table, self.tables), *(f"{text(note)}\n" for note in self.notes)])

    def write(self, output: Path) -> None:
        """Write tables, pictures and ``report.html`` into a folder."""
        from lightning_fed.experiments.report.pictures import dots, pictures, save, values_tried  # loads matplotlib

        output.mkdir(parents=True, exist_ok=True)
        rounds, clients = map(self._finished, (self.rounds, self.clients))
        for name, table in (("rounds", rounds), ("clients", clients)):
            (output / f"{name}.csv").write_text(as_csv(table), encoding="utf-8")
        for name, format in (("runs", "csv"), ("table", "md"), ("table", "tex")):
            (output / f"{name}.{format}").write_text(self.text(format), encoding="utf-8")  # type: ignore[arg-type]
        rounds, clients, metric = self._of_one_metric(rounds, clients)
        apart = [one for one in self.compared if one.differences(one.compared)]
        differences = ((f"differences{f'-{one.setting}' if one.setting else ''}", dots(one)) for one in apart)
        tuned = [("tuning", values_tried(grouped(self.tried)))] if self.tried else []
        figures = (*differences, *pictures(rounds, clients, metric, self.ends), *tuned)
        drawn = {name.replace("_", " "): save(figure, output / _short(file_name(name))) for name, figure in figures}
        title = f"Comparison of {', '.join(dict.fromkeys(self.runs['method']))}"
        findings = list(map(finding, self.compared))
        text = page(title, findings, self.tables, drawn, settings_table(self.folders), self.commands, self.notes)
        (output / "report.html").write_text(text, encoding="utf-8")

    @property
    def ends(self) -> dict[tuple[str, str], float]:
        """The reported value of each setting and method, if there is one: the mean of its finished runs."""
        return self._finished(self.runs).groupby(["setting", "method"])[self.view.at].mean().dropna().to_dict()

    def _of_one_metric(self, rounds: pd.DataFrame, clients: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, str]:
        """The data to draw and their column; if methods have different metrics, a column with each method's own, which has the name
        of a measure only if that is the same.
        """
        metrics = self.runs.set_index(list(KEY))["metric"]
        usual, kinds = str(metrics.mode().iloc[0]), {kind_of(metric) for metric in metrics}
        of_all = measure_of(usual) if len({measure for _, measure in kinds}) == 1 else "monitored_metric"
        column = usual if len(kinds) == 1 else f"monitor/test_{of_all}"
        if metrics.nunique() == 1:
            return rounds, clients, column
        if len(kinds) == 1:  # else clients are not drawn
            measured = metrics.map(lambda metric: f"test/{measure_of(metric)}")
            clients = _gathered(clients, measured, f"test/{measure_of(usual)}")
        return _gathered(rounds, metrics, column), clients, column

    def _finished(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of runs that are in the tables."""
        finished = self.runs.loc[self.runs["rounds"] >= self.runs["planned"], list(KEY)]
        return table.merge(finished, on=list(KEY))


def _short(name: str) -> str:
    """A name that leaves room for its extension: of a long one the beginning, and a checksum of the whole."""
    return name if len(name.encode()) < 200 else f"{name[:40]}-{crc32(name.encode()):08x}"


def report_on(folders: Sequence[Path], vary: Collection[str] = (), **given: Any) -> Report:
    """Read the runs below some folders and compare them, by default as their sweep's ``report`` says.

    Args:
        folders: folders of runs, of sweeps, or parents of these.
        vary: see :func:`lightning_fed.experiments.report.folders.run_folders`.
        **given: options of :class:`.ReportOptions`. None: as the sweeps say.
    """
    found = run_folders(folders, vary)
    sweeps = dict(run.sweep for run in found if run.sweep)
    options = report_options(sweeps, {key: value for key, value in given.items() if value is not None})
    runs = table_of(found, options.metric, options.target, options.at, options.equal)
    asked = [sweep for sweep in sweeps.values() if (sweep.report.metric, sweep.report.at) == (options.metric, options.at)]
    published, notes = [entry for sweep in asked for entry in sweep.published], unfinished(runs)
    if any(sweep.published for sweep in sweeps.values() if sweep not in asked):
        notes.append("Published numbers are not shown: they are of the metric and the round that the sweep itself reports.")
    commands = [command for root in sweeps for command in read_commands(root)]
    compared = comparisons(runs, options, [method for sweep in sweeps.values() for method in sweep.methods])
    rounds, clients, crossed = (stacked(found, file) for file in READ)
    tables = list[Layout]()
    for one in compared:
        tables += [methods_table(one, published), *budget_tables(one, rounds, options.budgets), *seed_tables(one)]
        tables += [*clients_tables(one, clients), *cross_tables(one, crossed)]
    tried = list[Trial]()
    for root, sweep in sweeps.items():
        of_sweep = trials(sweep, root)
        notes += [*without_a_round(sweep, root, of_sweep, folders), *not_of_the_sweep(sweep, root, of_sweep, folders)]
        tables += tuning_tables(sweep, of_sweep)
        tried += of_sweep
    if len(sweeps) > 1 and (unequal := inequality(*sweeps.values())):
        notes.append(unequal)
    return Report(found, runs, rounds, clients, compared, tables, notes, commands, tried, View(options.at))


def without_a_round(sweep: Sweep, root: Path, tried: Sequence[Trial], folders: Sequence[Path]) -> list[str]:
    """Lines about those runs of a sweep that have not finished a round and are therefore in no table.

    Args:
        sweep: the sweep.
        root: its folder.
        tried: its trials.
        folders: the folders of the report; runs elsewhere are not wanted.
    """
    places = [root / cell.name for cell in sweep.cells_with(chosen(tried))]
    wanted = [place for place in places if _is_below(place, folders)]
    left_out = [cell for cell in map(CellFolder, wanted) if cell.run is None]
    failed = [(cell.path, result.error) for cell in left_out if (result := cell.result) and cell.status == "failed"]
    lines = [f"Left out: {path} has failed before it finished a round: {error.rstrip('.')}." for path, error in failed]
    if others := len(left_out) - len(failed):
        lines.append(f"Left out: {others} of {len(wanted)} runs in {root}, which have not finished a round.")
    return lines


def not_of_the_sweep(sweep: Sweep, root: Path, tried: Sequence[Trial], folders: Sequence[Path]) -> list[str]:
    """A line about runs in a sweep's folder that it does not have, such as those of another one. Arguments are those of
    :func:`without_a_round`.
    """
    own = {root / cell.name for cell in (*sweep.cells_with(chosen(tried)), *sweep.trials)}
    others = sorted({path.parent for path in root.rglob("cell.json") if _is_below(path, folders)} - own)
    runs = counted(len(others), "run")
    return [f"Left out: {runs} below {root} that are not, or no longer, of its sweep, such as {others[0]}."] if others else []


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder.absolute()) for folder in folders)


def report_options(sweeps: Mapping[Path, Sweep], given: Mapping[str, Any]) -> ReportOptions:
    """The options that were given, else those of the sweeps. Raises :class:`FederationError` if sweeps have different ones."""
    found: dict[str, Any] = {}
    for root, sweep in sweeps.items():
        for key, value in vars(sweep.report).items():
            if key not in given and found.setdefault(key, value) != value:
                raise FederationError(
                    f"The sweep of {root} reports {key} {value!r}, another one {found[key]!r}: say which, as an option, or "
                    "report them apart."
                )
    return ReportOptions(**(found | dict(given)))


def _gathered(table: pd.DataFrame, columns: pd.Series, name: str) -> pd.DataFrame:
    """A table with a column that holds, for each run, the column that is named for it."""
    parts = table.groupby(list(columns.index.names), sort=False, dropna=False)
    return pd.concat([group.assign(**{name: group[columns[key]]}) for key, group in parts])


def as_csv(table: pd.DataFrame) -> str:
    """A table as CSV, with numbers in the precision of float32."""
    return table.to_csv(index=False, float_format="%.9g", lineterminator="\n")
