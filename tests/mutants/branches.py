"""Which lines and branches of the package the default tests see, by folder. It needs pytest-cov.

    python tests/mutants/branches.py --csv branches.csv             # runs the default tests, in two processes
    python tests/mutants/branches.py --csv branches.csv -k fedavg   # with options of pytest
    python tests/mutants/branches.py --csv branches.csv --json coverage.json    # of what was measured before

Tests look into processes that they start themselves, too, where those are told so by their environment.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_fed"
SETTINGS = """[run]
branch = true
parallel = true
source = {package}
data_file = {data}
patch = subprocess

[report]
exclude_also =
    if TYPE_CHECKING:
    \\.\\.\\.$
"""
COLUMNS = ("folder", "files", "lines", "lines seen", "branches", "branches seen")
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def measured(tree: Path, options: list[str], work: Path) -> Path:
    """Run the tests of a tree; the file that says what they saw."""
    settings = work / "coveragerc"
    settings.write_text(SETTINGS.format(package=tree / PACKAGE, data=work / ".coverage"))
    report = work / "coverage.json"
    cover = [f"--cov={tree / PACKAGE}", "--cov-branch", f"--cov-config={settings}", f"--cov-report=json:{report}"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *cover, *options]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, check=False)
    if not report.is_file():
        raise SystemExit(f"pytest ended with {done.returncode} and has measured nothing.")
    if done.returncode:
        print(f"Some tests failed (exit code {done.returncode}): what they would have seen is missing.")
    return report


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each folder, and for all."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * 5)
    for name, found in report["files"].items():
        inside = Path(name).parts[Path(name).parts.index(PACKAGE) + 1 :]
        folder = inside[0] if len(inside) > 1 else "(files at the root)"
        counts = [1, *(found["summary"][count] for count in COUNTS)]
        for key in (folder, "all"):
            sums[key] = [a + b for a, b in zip(sums[key], counts, strict=True)]
    last = sums.pop("all")
    return [dict(zip(COLUMNS, (key, *values), strict=True)) for key, values in [*sorted(sums.items()), ("all", last)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose package and tests; default: this one")
    parser.add_argument("--csv", type=Path, required=True, help="where the table goes")
    parser.add_argument("--json", type=Path, help="a report of coverage.py; None: the tests are run")
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="branches_") as work:
        report = json.loads((given.json or measured(given.tree.resolve(), options, Path(work))).read_text())
    table = rows(report)
    with given.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    print(f"{'folder':<22}{'files':>6}{'lines':>9}{'seen':>8}{'branches':>10}{'seen':>8}")
    for row in table:
        lines, branches = (row[f"{what} seen"] / max(1, row[what]) for what in ("lines", "branches"))
        print(f"{row['folder']:<22}{row['files']:>6}{row['lines']:>9}{lines:>8.1%}{row['branches']:>10}{branches:>8.1%}")


if __name__ == "__main__":
    main()
