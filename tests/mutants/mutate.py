"""Fixed mistakes, each made alone in a copy of the package: which tests notice?

    python tests/mutants/mutate.py --check                          # whether each is still found once: seconds, no tests
    python tests/mutants/mutate.py --csv mutants.csv                # all; those that the file has already are passed over
    python tests/mutants/mutate.py --csv mutants.csv --only 'fedamp-*' --room core
    python tests/mutants/mutate.py --csv mutants.csv --survivors    # again, those that survived, against all default tests

What is mutated lies in ``mutants.yaml``. A mutant is ``killed`` by the first test that fails, ``survived`` if none does, ``not
applicable`` if what it replaces is not found exactly once, and an ``error`` if its tests could not be run. A tree is copied once
for each of ``--workers`` and its own tests are run in it. Exit code 1 if any survived or is not applicable.
"""

import argparse
import csv
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COLUMNS = ("id", "room", "place", "verdict", "killer", "seconds")
COPIED = (
    "lightning_fed",
    "tests",
    "configs",
    "docs",
    "bench",
    "examples",
    "*.toml",
    "*.md",
    "*.cff",
    "*.py",
    "LICENSE",
    ".ci",
    ".github",
)


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Args:
        id: its name.
        room: which part of the package it is in.
        find: what is replaced; white space counts as white space.
        replace: by what; its lines are indented as the first one of what they replace.
        tests: names of test files, each with options of pytest.
    """

    id: str
    room: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def places(self, package: Path) -> list[tuple[Path, int, int]]:
        """Where it could be made: file, beginning and end."""
        first, *more = self.find.split()
        pattern = re.compile(r"\s+".join(map(re.escape, (first, *more))))
        likely = [(path, text) for path, text in sources(package).items() if first in text]
        return [(path, match.start(), match.end()) for path, text in likely for match in pattern.finditer(text)]

    def made(self, text: str, start: int, end: int) -> str:
        """A file's text with the mistake."""
        line = text[text.rfind("\n", 0, start) + 1 : start]
        indentation = line[: len(line) - len(line.lstrip())]
        mistake = f"\n{indentation}".join(self.replace.strip("\n").splitlines()).replace(f"\n{indentation}\n", "\n\n")
        return text[:start] + mistake + text[end:]


@cache
def sources(package: Path) -> dict[Path, str]:
    """The files of a package as they were before any mistake."""
    return {path: path.read_text() for path in sorted(package.rglob("*.py"))}


def mutants() -> list[Mutant]:
    """All of them."""
    content = yaml.safe_load((HERE / "mutants.yaml").read_text())
    found = [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in content["mutants"]]
    assert len({mutant.id for mutant in found}) == len(found), "two have one id"
    return found


def copied(tree: Path, to: Path) -> None:
    """What the tests of a tree need of it."""
    for pattern in COPIED:
        for path in tree.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, to / path.name, ignore=shutil.ignore_patterns("__pycache__", "_build"), symlinks=True)
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to / path.name)


def commands(mutant: Mutant, tree: Path) -> list[list[str]]:
    """How to run its tests, one file after the other."""
    runs = []
    for test in mutant.tests:
        name, _, options = test.partition(" -k ")
        paths = sorted(str(path.relative_to(tree)) for path in (tree / "tests").rglob(name))
        if not paths:
            raise FileNotFoundError(name)
        runs.append([*paths, *(["-k", options] if options else [])])
    return runs


def run(mutant: Mutant, tree: Path, timeout: float, everything: bool) -> dict[str, Any]:
    """Make a mistake in a copy, run tests, undo it."""
    begun, row = time.monotonic(), {"id": mutant.id, "room": mutant.room, "place": "", "killer": ""}
    places = mutant.places(tree / "lightning_fed")
    if len(places) != 1:
        return row | {"verdict": "not applicable", "killer": f"found {len(places)} times", "seconds": 0}
    path, start, end = places[0]
    original = path.read_text()
    row["place"] = f"{path.relative_to(tree)}:{original.count(chr(10), 0, start) + 1}"
    mutated = mutant.made(original, start, end)
    try:
        compile(mutated, str(path), "exec")
        runs = [["tests"]] if everything else commands(mutant, tree)
    except (SyntaxError, FileNotFoundError) as error:
        return row | {"verdict": "error", "killer": f"{type(error).__name__}: {error}", "seconds": 0}
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    verdict, killer = "survived", ""
    path.write_text(mutated)
    try:
        for tests in runs:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
            try:
                done = subprocess.run(
                    command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout, check=False
                )
            except subprocess.TimeoutExpired:
                verdict, killer = "killed", f"{' '.join(tests)} took longer than {timeout:g} s"
                break
            if done.returncode == 1:
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                verdict, killer = "killed", failed[0] if failed else done.stdout[-200:]
                break
            if done.returncode != 0:
                verdict, killer = (
                    "error",
                    f"pytest {' '.join(tests)} ended with {done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}",
                )
                break
    finally:
        path.write_text(original)
    return row | {"verdict": verdict, "killer": " ".join(killer.split()), "seconds": round(time.monotonic() - begun)}


def read(path: Path) -> dict[str, dict[str, str]]:
    """Rows of an earlier run, by id."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    aside = path.with_name(f".{path.name}")
    with aside.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows.values())
    aside.replace(path)


def summary(rows: dict[str, dict[str, Any]]) -> None:
    rooms = sorted({row["room"] for row in rows.values()})
    verdicts = ("killed", "survived", "not applicable", "error")
    print(f"{'room':<12}" + "".join(f"{verdict:>16}" for verdict in verdicts))
    for room in [*rooms, "all"]:
        counts = [sum(row["verdict"] == v and room in ("all", row["room"]) for row in rows.values()) for v in verdicts]
        print(f"{room:<12}" + "".join(f"{count:>16}" for count in counts))
    for row in rows.values():
        if row["verdict"] != "killed":
            print(f"{row['verdict']}: {row['id']} in {row['place'] or '?'} {row['killer']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose package and tests; default: this one")
    parser.add_argument("--csv", type=Path, help="where the verdicts go, and which are known")
    parser.add_argument("--only", nargs="+", metavar="ID", help="some, by id or pattern")
    parser.add_argument("--room", help="those of a room")
    parser.add_argument("--check", action="store_true", help="see whether each is found once and is Python, run nothing")
    parser.add_argument("--survivors", action="store_true", help="run all default tests on those that survived")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that the tests of one file may take")
    given = parser.parse_args()
    chosen = [
        mutant
        for mutant in mutants()
        if (not given.only or any(fnmatch.fnmatchcase(mutant.id, pattern) for pattern in given.only))
        and given.room in (None, mutant.room)
    ]
    if given.check:
        obstacles = [f"{mutant.id}: {why}" for mutant in chosen if (why := obstacle(mutant, given.tree))]
        print(*obstacles, f"{len(chosen) - len(obstacles)} of {len(chosen)} can be made.", sep="\n")
        return int(bool(obstacles))
    if given.csv is None:
        parser.error("--csv says where the verdicts go")
    rows: dict[str, dict[str, Any]] = dict(read(given.csv))
    again = {"survived"} if given.survivors else set()
    left = [m for m in chosen if (rows[m.id]["verdict"] in again if m.id in rows else not given.survivors)]
    with tempfile.TemporaryDirectory(prefix="mutants_") as work, ThreadPoolExecutor(given.workers) as pool:
        trees: Queue[Path] = Queue()
        for number in range(given.workers):
            copied(given.tree, Path(work, str(number)))
            trees.put(Path(work, str(number)))

        def one(mutant: Mutant) -> dict[str, Any]:
            tree = trees.get()
            try:
                return run(mutant, tree, given.timeout, given.survivors)
            finally:
                trees.put(tree)

        for done in as_completed([pool.submit(one, mutant) for mutant in left]):
            row = done.result()
            rows[row["id"]] = row
            write(given.csv, rows)
            print(f"{row['verdict']:<14} {row['id']:<36} {row['killer']} ({row['seconds']} s)", flush=True)
    summary(rows)
    return int(any(row["verdict"] != "killed" for row in rows.values()))


def obstacle(mutant: Mutant, tree: Path) -> str:
    """Why a mutant cannot be made and tested; empty if it can."""
    places = mutant.places(tree / "lightning_fed")
    if len(places) != 1:
        return f"found {len(places)} times"
    path, start, end = places[0]
    try:
        compile(mutant.made(path.read_text(), start, end), str(path), "exec")
        commands(mutant, tree)
    except (SyntaxError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
