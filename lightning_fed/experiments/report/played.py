"""Settings of the runs: data, options, versions and dates."""

from collections.abc import Sequence
from datetime import UTC, datetime

from lightning_fed.experiments.report.folders import SEEDS, RunFolder
from lightning_fed.experiments.report.layout import Entry, Layout
from lightning_fed.experiments.sweep.folder import CellFolder
from lightning_fed.experiments.sweep.settings import Settings, differences

OF_THE_RUN = {*SEEDS, "federation.run_dir", "federation.progress", "ckpt_path"}
"""Settings that differ between runs, or that do not affect results."""


def settings_table(runs: Sequence[RunFolder]) -> Layout:
    """Settings of the first run of each method: a row per option that is used, a column for what all methods have in common and one
    per method for the rest; and the versions, machines and dates of the runs.
    """
    of_methods: dict[str, Settings] = {}
    for run in runs:
        of_methods.setdefault(run.method, run.settings)
    names = list(dict.fromkeys(name for settings in of_methods.values() for name in settings if name not in OF_THE_RUN))
    varied = {key for run in runs for key in differences(of_methods[run.method], run.settings, OF_THE_RUN)}
    rows, groups, group = list[list[Entry]](), dict[int, str](), ""
    for name in names:
        said = [_said(name, settings.get(name)) for settings in of_methods.values()]
        if name in varied:
            said = ["varies"] * len(said)
        if not any(said):
            continue
        block, _, option = name.partition(".")
        if block != group:
            groups[len(rows)] = group = block
        shared, *own = ["", *said] if len(set(said)) > 1 else [said[0], *[""] * len(said)]
        rows.append([Entry(option), Entry(shared), *map(Entry, own)])
    return Layout("Settings", ["", "all", *of_methods], rows, _circumstances(runs), groups)


def _said(name: str, value: object) -> str:
    """A value as text; empty if an option is not used."""
    if value is None or value is False:
        return ""
    return str(value).rpartition(".")[2] if name.endswith("class_path") else str(value)


def _circumstances(runs: Sequence[RunFolder]) -> list[str]:
    """Versions, machines and days; versions and machines are known for runs of a sweep."""
    days = sorted({datetime.fromtimestamp((run.path / "metrics.csv").stat().st_mtime, UTC).date().isoformat() for run in runs})
    records = [record for run in runs if (record := CellFolder(run.path.parent).result) is not None]
    found = {
        "Versions": {record.versions for record in records},
        "Commit": {record.commit for record in records},
        "Machine": {record.machine for record in records},
    }
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    told = (f"{what}: {'; '.join(sorted(filter(None, values)))}." for what, values in found.items() if any(values))
    return [f"Last written: {when}.", *told]
