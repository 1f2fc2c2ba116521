"""What was played: data, settings, versions and dates, for whoever was not there."""

from collections.abc import Sequence
from datetime import UTC, datetime

from lightning_fed.experiments.report.folders import SEEDS, RunFolder
from lightning_fed.experiments.report.layout import BLANK, Entry, Layout
from lightning_fed.experiments.sweep.folder import CellFolder

OF_THE_RUN = {*SEEDS, "federation.run_dir", "federation.progress", "ckpt_path"}
"""Settings that each run has of its own, or that no number depends on."""

UNSET = (None, False, "none")
"""What an option has that is not used."""


def settings_table(runs: Sequence[RunFolder]) -> Layout:
    """What the methods were played with, of the first run of each: a row per option that is used, a column for what all have in
    common and one per method for what they do not; and which versions played them, where and when.

    Args:
        runs: at least one, in the order of their sweep.
    """
    of_methods = {run.method: run.settings for run in reversed(runs)}
    of_methods = dict(reversed(of_methods.items()))
    names = list(dict.fromkeys(name for settings in of_methods.values() for name in settings if name not in OF_THE_RUN))
    rows, groups, group = list[list[Entry]](), dict[int, str](), ""
    for name in names:
        values = [settings.get(name) for settings in of_methods.values()]
        if all(value in UNSET for value in values):
            continue
        block, _, option = name.partition(".")
        if block != group:
            groups[len(rows)] = group = block
        said = [BLANK if value in UNSET else Entry(_said(name, value)) for value in values]
        alike = all(entry == said[0] for entry in said)
        rows.append([Entry(option), said[0], *[BLANK] * len(said)] if alike else [Entry(option), BLANK, *said])
    return Layout("Settings", ["", "all", *of_methods], rows, _circumstances(runs), groups)


def _said(name: str, value: object) -> str:
    return str(value).rpartition(".")[2] if name.endswith("class_path") else str(value)


def _circumstances(runs: Sequence[RunFolder]) -> list[str]:
    """Versions, machines and days; versions and machines are known of runs of a sweep."""
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
