"""The verb ``runs``: a list of runs with their sizes on disk, from files any of which may be damaged."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fed.cli.options import Options, say
from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.settings import flat, read_json, read_yaml
from lightning_fed.formatting import counted, sized
from lightning_fed.system.folders import from_home, numbered, walked

TEXT = "List runs: method, seed, rounds, monitor, size on disk, folder. Runs are neither loaded nor changed."
UNKNOWN = "?"


def parser() -> Options:
    """The verb's command line."""
    parser = Options("runs", TEXT)
    text = "folders to search (default: runs)"
    parser.add_argument("folders", type=from_home, nargs="*", default=[Path("runs")], metavar="FOLDER", help=text)
    return parser


def run(args: Sequence[str]) -> None:
    """Run the verb."""
    folders = parser().parse_args(args[1:]).folders
    found = list(map(PlayedRun, run_folders(folders)))
    if not found:
        raise FederationError(f"No run below {', '.join(map(str, folders))}: give folders that have some.")
    say(lines(found))


@dataclass(frozen=True)
class PlayedRun:
    """A folder that a run has written."""

    path: Path

    @property
    def facts(self) -> dict[str, Any]:
        """Method, seed and rounds from ``run.json``, or else from the configuration."""
        try:
            facts = read_json(self.path / "run.json")
        except FederationError:
            facts = {}
        return facts if "method" in facts else facts | self._configured()

    def _configured(self) -> dict[str, Any]:
        try:
            settings = flat(read_yaml(self.path / "config.yaml"))
        except FederationError:
            return {}
        named = {"method": "model.class_path", "seed": "seed_everything", "rounds": "federation.rounds"}
        found = {name: settings.get(key, UNKNOWN) for name, key in named.items()}
        return found | {"method": str(found["method"]).rpartition(".")[2]}

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rounds of ``metrics.csv``."""
        try:
            with (self.path / "metrics.csv").open(newline="") as file:
                return list(csv.DictReader(file))
        except (OSError, ValueError, csv.Error):
            return []

    @property
    def size(self) -> int:
        """Bytes of all its files; a run deletes its earlier checkpoints meanwhile."""
        size = 0
        for folder, names in walked([self.path]):
            for name in names:
                with suppress(FileNotFoundError):
                    size += (folder / name).lstat().st_size
        return size

    @property
    def cells(self) -> tuple[str, ...]:
        """The run's cells of the table."""
        facts, rows = self.facts, self.rows
        played = whole(rows[-1].get("round")) if rows else "0"
        column = str(facts.get("monitor", ""))
        value = next((row[column] for row in reversed(rows) if row.get(column)), None)
        rounds = f"{played}/{whole(facts.get('rounds'))}"
        return printable(facts.get("method")), whole(facts.get("seed")), rounds, measured(column, value), sized(self.size)


def run_folders(folders: Iterable[Path]) -> list[Path]:
    """All folders of runs at or below some folders, in order."""
    written = {"run.json", "metrics.csv", "config.yaml"}
    found = numbered(path for path, files in walked(folders) if written & files)
    return sorted(found, key=lambda path: str(path.parent))


def lines(found: Iterable[PlayedRun]) -> Iterator[str]:
    """The table. Folders come last, because they may be long and are copied."""
    runs = list(found)
    table = [("method", "seed", "round", "monitor", "size"), *(one.cells for one in runs)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row, folder in zip(table, ["folder", *(printable(one.path) for one in runs)], strict=True):
        first, *others = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *others, folder])
    yield f"{counted(len(runs), 'run')}, {sized(sum(one.size for one in runs))}"


def measured(column: str, value: str | None) -> str:
    """A monitor with its name, without ``after/test_`` and ``/mean``."""
    name = re.sub(r"^\w+/test_|/mean$", "", column)
    try:
        number = float(value or "")
    except ValueError:
        return "not measured"
    return f"{printable(name)} {number:.4f}"


def whole(value: Any) -> str:
    """An integer as text, if it is one."""
    try:
        return str(int(float(value)))
    except (TypeError, ValueError, OverflowError):
        return UNKNOWN


def printable(value: Any) -> str:
    """A name without control characters."""
    return "".join(sign if sign.isprintable() else UNKNOWN for sign in str(value)) if value else UNKNOWN
