"""Golden runs: what two versions of the library make of the same cases on one machine, held against each other bit for bit.

    python tests/golden/compare.py BASE HEAD                  # two commits, branches, folders of trees, or folders of records
    python tests/golden/compare.py BASE . --quick             # a selection, against the tree as it lies here
    python tests/golden/compare.py BASE . --only FedAvg 'FedHM*'
    python tests/golden/compare.py record BASE /tmp/base      # one side alone, to be compared often:
    python tests/golden/compare.py /tmp/base .                #   a folder of records is not played again

Each side is played in processes of its own with its tree first on the path, by the player and with the cases of this folder
(``play.py``, ``cases.yaml``), in the words of its own ``tests/golden/renames.yaml``. A case that is in a folder of records is not
played again, unless it failed, or ``cases.yaml`` or ``golden_parts.py`` have changed what it is: after a crash ``record`` goes on.
The exit code is 0 if all is equal, 1 if something differs. Numbers that moved are listed with their largest relative difference:
what differs most comes first.
"""

import argparse
import fnmatch
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from play import ALL_WAYS, cases, fingerprint
from safetensors.torch import load_file
from torch import Tensor
from words import Renames

HERE = Path(__file__).parent
TABLE = "renames.yaml"
SHOWN = 12
"""Differences of a case that are printed; all of them are with ``--all``."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same: what, how, and by how much where both are numbers."""

    name: str
    what: str
    relative: float = math.inf

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" + (f" (relative {self.relative:.3g})" if math.isfinite(self.relative) else "")


# ------------------------------------------------------------------------------------------------------------------- comparing


class Side:
    """The records of one side, in original words.

    Args:
        folder: with its records.
        renames: its words; None: those that it was recorded with.
    """

    def __init__(self, folder: Path, renames: Renames | None = None) -> None:
        self.folder = folder
        self.renames = renames or Renames.read(folder / TABLE)

    def names(self) -> set[str]:
        """Cases that were recorded."""
        return {path.stem for path in self.folder.glob("[!.]*.json")}

    def case(self, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All of a case by original names: failures, columns, values, options; and tensors."""
        content, words = json.loads((self.folder / f"{name}.json").read_text()), self.renames
        things: dict[str, Any] = {f"failure/{way}": what for way, what in content["failures"].items()}
        for table, found in content["tables"].items():
            columns = [words.original(column, "metrics") for column in found["columns"]]
            kept = [k for k, column in enumerate(columns) if not words.is_left_out(column)]
            things[f"{table}/columns"] = [columns[k] for k in kept]
            rows = [{f"{table}/{number}/{columns[k]}": row[k] for k in kept} for number, row in enumerate(found["rows"])]
            things |= {key: value for row in rows for key, value in row.items()}
        for key, value in content["values"].items():
            original = words.original(words.original(key, "metrics"), "options")
            text = isinstance(value, str)
            things[original] = words.original_value(original, words.original(value, "metrics")) if text else value
        for config, leaves in content["options"].items():
            for key, value in leaves.items():
                option = words.original(key, "options")
                if not words.is_absent(option, value):
                    things[f"{config}: {option}"] = words.original_value(option, value)
        tensors = {words.original(key, "tensors"): t for key, t in load_file(self.folder / f"{name}.safetensors").items()}
        return without(things, words), without(tensors, words)


def without(things: dict[str, Any], words: Renames) -> dict[str, Any]:
    return {name: value for name, value in things.items() if not words.is_left_out(name)}


def differences(base: Side, head: Side, case: str) -> list[Difference]:
    """All that is not the same in a case, what is largest first."""
    (things, tensors), (other_things, other_tensors) = base.case(case), head.case(case)
    things = {name: value for name, value in things.items() if not head.renames.is_left_out(name)}
    tensors = {name: value for name, value in tensors.items() if not head.renames.is_left_out(name)}
    absent = head.renames.is_absent  # of a base that has not heard of them
    things = {name: value for name, value in things.items() if not (": " in name and absent(name.partition(": ")[2], value))}
    found = [*of_names(things, other_things), *of_names(tensors, other_tensors)]
    found += (d for name in things.keys() & other_things.keys() if (d := of_values(name, things[name], other_things[name])))
    found += (d for name in tensors.keys() & other_tensors.keys() if (d := of_tensors(name, tensors[name], other_tensors[name])))
    failed = {name for name in things.keys() & other_things.keys() if name.startswith("failure/")}
    found += [Difference(name, f"failed on both sides: {things[name]}") for name in failed if things[name] == other_things[name]]
    return sorted(found, key=lambda d: (-d.relative, d.name))


def of_names(base: dict[str, Any], head: dict[str, Any]) -> Iterator[Difference]:
    """What only one side has."""
    for name in base.keys() - head.keys():
        yield Difference(name, f"only in base{said(base[name])}")
    for name in head.keys() - base.keys():
        yield Difference(name, f"only in head{said(head[name])}")


def said(value: Any) -> str:
    return f" (shape {tuple(value.shape)})" if isinstance(value, Tensor) else f" ({value!s:.300})"


def of_values(name: str, base: Any, head: Any) -> Difference | None:
    """Whether two values differ. Lists are columns, whose order counts."""
    if base == head or (isinstance(base, float) and isinstance(head, float) and math.isnan(base) and math.isnan(head)):
        return None
    if isinstance(base, list) and isinstance(head, list):
        if sorted(map(str, base)) == sorted(map(str, head)):
            return Difference(name, f"in another order: {base} in base, {head} in head")
        gone, new = [c for c in base if c not in head], [c for c in head if c not in base]
        return Difference(name, f"only in base {gone}, only in head {new}")
    try:
        numbers = float(base), float(head)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or isinstance(base, bool) or isinstance(head, bool) or ": " in name:  # options are compared as they are
        return Difference(name, f"{base!s:.300} in base, {head!s:.300} in head")
    return Difference(name, f"{base} in base, {head} in head", relative(*torch.tensor(numbers, dtype=torch.float64)))


def of_tensors(name: str, base: Tensor, head: Tensor) -> Difference | None:
    """Whether two tensors differ in a single bit."""
    if base.dtype != head.dtype or base.shape != head.shape:
        kinds = [f"{t.dtype} of shape {tuple(t.shape)}" for t in (base, head)]
        return Difference(name, f"{kinds[0]} in base, {kinds[1]} in head")
    if torch.equal(bits(base), bits(head)):
        return None
    count = int((base != head).sum())
    return Difference(name, f"{count} of {base.numel()} numbers", relative(base, head))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def relative(base: Tensor, head: Tensor) -> float:
    """The largest difference over the largest number in base; infinite where other numbers are finite in both."""
    base, head = base.double(), head.double()
    if not bool(torch.equal(base.isfinite(), head.isfinite())):
        return math.inf
    apart, size = float((base - head).abs().nan_to_num(0.0, 0.0, 0.0).max()), float(base.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return apart / size if size else apart  # of zeros, absolute


def report(base: Side, head: Side, names: Iterable[str], within: float = 0.0, everything: bool = False) -> bool:
    """Print what differs; whether nothing does, or no number by more than ``within``."""
    equal, differing, largest = 0, 0, 0.0
    for name in names:
        missing = [f"{side.folder}" for side in (base, head) if name not in side.names()]
        if missing:
            found = [Difference(name, f"not recorded in {' and '.join(missing)}")]
        elif made_of(base.folder, name) != made_of(head.folder, name):
            found = [Difference(name, "another case, or other parts, in base than in head: record both with the same tests/golden")]
        else:
            found = differences(base, head, name)
        moved = [d for d in found if math.isfinite(d.relative)]
        largest = max([largest, *(d.relative for d in moved)])
        serious = [d for d in found if not (within and d.relative <= within)]
        equal, differing = equal + (not serious), differing + bool(serious)
        if found:
            print(f"{name}: {len(found)} differences, of which {len(moved)} are numbers that moved")
            for difference in found if everything else found[:SHOWN]:
                print(f"    {difference}")
            if len(found) > SHOWN and not everything:
                print(f"    … and {len(found) - SHOWN} more (--all)")
    about = f"the largest relative difference of a number is {largest:.3g}" if largest else "no number moved"
    print(f"{equal} cases are equal, {differing} differ; {about}.")
    return not differing


# ------------------------------------------------------------------------------------------------------------------- recording


def is_record(folder: Path) -> bool:
    return (folder / TABLE).is_file() and not (folder / "lightning_fed").exists()


def tree_of(given: str, work: Path) -> Path:
    """The folder of a tree: itself, or a commit's files, written out."""
    if Path(given, "lightning_fed").is_dir():
        return Path(given).resolve()
    archive = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True)
    done = subprocess.run(["git", "-C", archive.stdout.strip(), "archive", given], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{given} is neither a folder with lightning_fed, nor one of records, nor a commit: {done.stderr.decode()}"
        )
    folder = work / given.replace("/", "_")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def commands(
    tree: Path, folder: Path, names: list[str], slices: int, ways: list[str]
) -> list[tuple[list[str], dict[str, str], Path]]:
    """What plays the cases of one side that were not recorded yet, in so many parts: command, environment, log."""
    folder.mkdir(parents=True, exist_ok=True)
    table = tree / "tests/golden" / TABLE
    if table.is_file():
        shutil.copy(table, folder / TABLE)
    else:
        (folder / TABLE).write_text("{}\n")
    left = [name for name in names if failures(folder, name) != {} or made_of(folder, name) != fingerprint(name)]
    path = os.pathsep.join([str(tree), str(HERE)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    parts = [left[k::slices] for k in range(slices)]
    player = [sys.executable, str(HERE / "play.py"), str(tree), str(folder)]
    return [([*player, *part, "--ways", *ways], environment, folder / f"log_{k}.txt") for k, part in enumerate(parts) if part]


def failures(folder: Path, name: str) -> dict[str, str] | None:
    """What went wrong with a case, by the way in which it was played; None if it was not recorded."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["failures"] if path.exists() else None


def made_of(folder: Path, name: str) -> str:
    """What a recorded case was made of."""
    return str(json.loads((folder / f"{name}.json").read_text())["fingerprint"])


def play(jobs: list[tuple[list[str], dict[str, str], Path]], workers: int) -> None:
    """Run commands, so many at once."""
    waiting, running = list(jobs), list[tuple[subprocess.Popen[bytes], Path]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                command, environment, log = waiting.pop(0)
                print(f"playing, see {log}", flush=True)
                with log.open("ab") as file:
                    process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent)
                running.append((process, log))
            time.sleep(0.2)
            for process, log in [(process, log) for process, log in running if process.poll() is not None]:
                running.remove((process, log))
                if process.returncode:
                    print(f"A player ended with {process.returncode}: {log} says\n{log.read_text(errors='replace')[-1500:]}")
    finally:
        for process, _ in running:
            process.terminate()


def chosen(only: list[str] | None, quick: bool) -> list[str]:
    """Names of the cases that are asked for."""
    known = cases()
    if only:
        names = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in only)]
        if not names:
            raise SystemExit(f"No case is called {', '.join(only)}: there are {', '.join(known)}.")
        return names
    return [name for name, case in known.items() if case["quick"] or not quick]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit, a folder of a tree, or a folder of records; or the word record")
    parser.add_argument("head", help="the same; after the word record: what to play")
    parser.add_argument("folder", nargs="?", type=Path, help="after the word record: where to")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases, by name or pattern")
    parser.add_argument("--quick", action="store_true", help="a selection of cases")
    parser.add_argument("--ways", nargs="+", metavar="WAY", choices=ALL_WAYS, default=ALL_WAYS, help=", ".join(ALL_WAYS))
    parser.add_argument("--workers", type=int, default=2, help="players at once, of both sides together")
    parser.add_argument("--records", type=Path, help="folder to keep the records in, as base and head; default: they are not kept")
    parser.add_argument("--within", type=float, default=0.0, help="relative difference of numbers up to which sides count as equal")
    parser.add_argument("--renames", type=Path, help="a table for head instead of the one that it was recorded with")
    parser.add_argument("--all", action="store_true", help="print all differences")
    given = parser.parse_args(args)
    names = chosen(given.only, given.quick)
    with tempfile.TemporaryDirectory(prefix="golden_") as work:
        if given.base == "record":
            if given.folder is None:
                parser.error("record needs a folder: record TREE FOLDER")
            tree = tree_of(given.head, Path(work))
            play(commands(tree, given.folder.resolve(), names, given.workers, given.ways), given.workers)
            found = {name: failures(given.folder, name) for name in names}
            print(f"{sum(failed == {} for failed in found.values())} of {len(names)} cases are recorded in {given.folder}.")
            for name, failed in found.items():
                for way, what in ({"all": "not played"} if failed is None else failed).items():
                    print(f"    {name}, {way}: {what}")
            return int(any(failed != {} for failed in found.values()))
        sides, jobs = [], []
        records = given.records.resolve() if given.records else Path(work)
        played = [side for side in (given.base, given.head) if not is_record(Path(side))]
        for role, side in (("base", given.base), ("head", given.head)):
            if is_record(Path(side)):
                sides.append(Path(side))
                continue
            sides.append(records / role)
            jobs.append(commands(tree_of(side, Path(work)), sides[-1], names, max(1, given.workers // len(played)), given.ways))
        play([job for jobs_of_sides in zip_longest(jobs) for job in jobs_of_sides], given.workers)
        base, head = Side(sides[0]), Side(sides[1], Renames.read(given.renames) if given.renames else None)
        return int(not report(base, head, names, given.within, given.all))


def zip_longest(lists: list[list[Any]]) -> Iterator[list[Any]]:
    """First of all lists, second of all lists, and so on."""
    for k in range(max(map(len, lists), default=0)):
        yield [items[k] for items in lists if k < len(items)]


if __name__ == "__main__":
    raise SystemExit(main())
