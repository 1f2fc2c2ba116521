"""The overhead of a cell of a sweep: forked from a process that has imported everything, and in a process of its own.

    python bench/sweep.py                                    # pairs of short sweeps, then all of the quickstart's
    python bench/sweep.py --rounds 2 --pairs 1 --no-whole

A pair is the quickstart's three methods with a few seeds and rounds, with ``--workers`` runs at a time, once as forks and
once with ``--isolate``, one after the other. The overhead of a cell is its seconds (``cells.csv``) minus those of its rounds (the
columns ``seconds/…`` of its ``metrics.csv``); the first cell of each worker is left out, and the median of the others is printed.
The goal is at most 0.5 s. Then follows the whole sweep of the quickstart; the goal for all 15 runs is at most 45 s on two idle
cores.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import yaml

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.sweep.yaml"
WAYS: dict[str, list[str]] = {"forks": [], "processes of their own": ["--isolate"]}


def play(content: dict[str, object], folder: Path, *options: str) -> float:
    """Play a sweep; returns its seconds.

    Args:
        content: of its file.
        folder: where its runs go.
        *options: of ``lightning-fed sweep``.
    """
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(content | {"folder": str(folder)}, sort_keys=False))
    start = perf_counter()
    command = [sys.executable, "-m", "lightning_fed", "sweep", "--config", str(file), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout)
    return perf_counter() - start


def overheads(folder: Path, workers: int) -> list[float]:
    """Seconds of each cell but the first ones, less those of its rounds."""
    found = []
    for cell in rows(folder / "cells.csv")[workers:]:
        measured = rows(Path(cell["folder"]) / "version_0" / "metrics.csv")
        of_rounds = [float(v) for row in measured for name, v in row.items() if name.startswith("seconds/") and v]
        found.append(float(cell["seconds"]) - sum(of_rounds))
    return found


def rows(path: Path) -> list[dict[str, str]]:
    """Of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Print both ways' overhead per cell, and the seconds of the whole sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of the runs of a pair")
    parser.add_argument("--seeds", type=int, default=3, help="of a pair")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--whole", action=argparse.BooleanOptionalAction, default=True, help="also play the quickstart's sweep")
    options = parser.parse_args()
    content = yaml.safe_load(QUICKSTART.read_text()) | {"base": str(QUICKSTART.with_name("quickstart.yaml"))}
    methods = {name: given | {"federation.rounds": options.rounds} for name, given in content["methods"].items()}
    short = content | {"methods": methods, "seeds": list(range(options.seeds))}
    workers = f"--workers={options.workers}"
    with tempfile.TemporaryDirectory() as place:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for pair in range(options.pairs):
            for number, (way, given) in enumerate(WAYS.items()):
                folder = Path(place, f"{pair}-{number}")
                seconds = play(short, folder, workers, *given)
                found[way] += (new := overheads(folder, options.workers))
                print(
                    f"pair {pair + 1}, {way}: {seconds:.1f} s, a cell {statistics.median(new):.2f} s besides its rounds", flush=True
                )
        for way, values in found.items():
            print(f"{way}: a cell takes {statistics.median(values):.2f} s besides its rounds (median of {len(values)})", flush=True)
        if options.whole:
            print(f"the quickstart's sweep: {play(content, Path(place, 'whole'), workers):.1f} s")


if __name__ == "__main__":
    main()
