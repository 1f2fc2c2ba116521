"""The verb ``configs``: configurations that come with the package, to run, change and copy."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from lightning_fed.cli.options import Options, say
from lightning_fed.experiments.configs import about, found, shipped

TEXT = "List the configurations that come with the package, or print one: lightning-fed configs quickstart > my.yaml"


def parser() -> Options:
    """The verb's command line."""
    parser = Options("configs", TEXT)
    parser.add_argument("name", nargs="?", help="the one to print, or a folder of them to list (default: list all)")
    return parser


def run(args: Sequence[str]) -> None:
    """Run the verb."""
    name = parser().parse_args(args[1:]).name
    files = shipped()
    within = {known: path for known, path in files.items() if name is None or known.startswith(f"{name.rstrip('/')}/")}
    if name is not None and (name in files or not within):
        say([found(name).read_text(encoding="utf-8").removesuffix("\n")])
    else:
        say(listed(within))


def listed(files: Mapping[str, Path]) -> Iterator[str]:
    """A line per configuration, cut to the width of a terminal."""
    console, width = Console(), max(map(len, files))
    for name, path in files.items():
        line = f"{name:<{width}}  {about(path)}"
        fits = not console.is_terminal or len(line) <= console.width
        yield line if fits else f"{line[: console.width - 1]}…"
