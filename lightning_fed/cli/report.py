"""The verb ``report``: tables and pictures of finished runs."""

import importlib.util
import sys
from collections.abc import Sequence

from rich.console import Console

from lightning_fed.cli.options import Options, above_zero, say
from lightning_fed.errors import FederationError
from lightning_fed.system.disk import in_one_line, naming
from lightning_fed.system.folders import from_home

WIDEST = 10_000
"""Number of characters per line in a file or a pipe, so that lines are not wrapped."""

TEXT = "Tables and pictures of finished runs, from their files only."


def parser() -> Options:
    """The verb's command line."""
    parser = Options("report", TEXT)
    parser.add_argument(
        "folders", type=from_home, nargs="+", metavar="FOLDER", help="folders of sweeps or runs, or parents of these"
    )
    parser.add_argument("--metric", help="column of metrics.csv; monitor: each method's own (default: the common one)")
    parser.add_argument("--at", metavar="ROUND", help="last (default), selected or best (on validation or test data), mean10")
    parser.add_argument(
        "--equal", choices=("rounds", "bytes", "flops"), help="compare at the largest cost that all runs have reached"
    )
    parser.add_argument(
        "--baseline", metavar="METHOD", help="reference of differences (default: Standalone, else the first method)"
    )
    parser.add_argument("--between", nargs=2, metavar=("LOW", "HIGH"), help="also report the share of their gap that methods close")
    parser.add_argument("--budgets", nargs="+", type=above_zero, metavar="MIB", help="also report the metric after so many MiB")
    parser.add_argument("--target", type=float, help="also report when the metric reached this value, and at what cost")
    parser.add_argument("--pooled", action="store_true", default=None, help="also report the mean weighted by clients' examples")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY", help="a setting in which runs may differ")
    parser.add_argument("--format", choices=("terminal", "md", "tex", "csv"), default="terminal", help="of what is printed")
    parser.add_argument("--output", type=from_home, metavar="DIR", help="write tables, pictures and report.html there")
    return parser


def run(args: Sequence[str]) -> None:
    """Run the verb."""
    given = parser().parse_args(args[1:])
    if missing := [name for name in ("pandas", "scipy", "statsmodels") if importlib.util.find_spec(name) is None]:
        raise FederationError(f"A report needs {' and '.join(missing)}: pip install 'lightning-fed[report]'.")
    from lightning_fed.experiments.report.report import report_on

    keys = ("metric", "baseline", "target", "pooled", "vary", "at", "equal", "between", "budgets")
    asked = {key: getattr(given, key) for key in keys}
    report = report_on(given.folders, **asked)
    if given.output:  # first: who reads what is printed may stop reading
        with in_one_line(lambda: "Give another output.", given.output), naming(given.output):
            report.write(given.output)
    if given.format == "terminal":
        report.show(Console() if sys.stdout.isatty() else Console(width=WIDEST))
    else:
        say([report.text(given.format).removesuffix("\n")])
    if given.output:
        print(f"Written: {given.output / 'report.html'} and the files that it shows.", file=sys.stderr)
