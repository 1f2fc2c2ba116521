"""Help that was printed once is printed again at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fed.cli import help_cache
from lightning_fed.cli.help_cache import asks_for_help, print_help


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning-fed"


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("fit --help", True),
        ("fit -h", True),
        ("fit --help all", True),
        ("fit --model.help FedAvg", True),
        ("completion zsh", True),
        ("fit --model.help my_lab.Method", False),  # which its author changes
        ("fit --config my.yaml --help", False),
        ("fit --config quickstart", False),
        ("completion fish", False),
    ],
)
def test_what_this_installation_alone_decides(line: str, asks: bool) -> None:
    assert asks_for_help(line.split()) is asks


def test_it_is_printed_again_until_something_changes(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["first", "second", "third"])

    def run() -> None:
        print(next(texts))
        raise SystemExit(0)

    for args, expected in ((["fit", "-h"], "first\n"), (["fit", "-h"], "first\n"), (["test", "-h"], "second\n")):
        print_help(args, run)
        assert capsys.readouterr().out == expected
    monkeypatch.setattr(help_cache, "version", lambda name: "another")
    print_help(["fit", "-h"], run)
    assert capsys.readouterr().out == "third\n"
    assert len(list(cache.iterdir())) == 3


def test_a_mistake_is_told_every_time(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        print("no such class")
        raise SystemExit(2)

    for _ in range(2):
        with pytest.raises(SystemExit):
            print_help(["fit", "--model.help", "Nothing"], run)
        assert capsys.readouterr().out == "no such class\n"
    assert not cache.exists()


def test_where_nothing_can_be_kept_it_is_made_anew(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.write_text("no folder")
    for _ in range(2):
        print_help(["fit", "-h"], lambda: print("made"))
        assert capsys.readouterr().out == "made\n"


def test_nothing_heavy_is_imported_for_it() -> None:
    code = """
import sys
from lightning_fed.__main__ import main
from lightning_fed.cli import help_cache
help_cache.print_help = lambda args, run: print(args)
sys.argv[1:] = ["fit", "--help"]
main()
assert not {"torch", "lightning", "jsonargparse"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['fit', '--help']\n"), done.stderr
