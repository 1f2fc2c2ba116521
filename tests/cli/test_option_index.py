"""Help and refusals that need no torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_commands import printed, refused

import lightning_fed
from lightning_fed.cli import OF_FEDERATION, SUBCOMMANDS, all_parsers
from lightning_fed.cli.help import option_index
from lightning_fed.cli.help.option_index import OptionIndex, read
from lightning_fed.cli.quick_help import index, quick_help
from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import shipped
from lightning_fed.experiments.sweep.settings import flat, read_yaml


def test_each_verb_has_a_parser() -> None:
    assert {*SUBCOMMANDS} == {*OF_FEDERATION, *all_parsers.PLAIN, "completion"}


@pytest.mark.parametrize(
    "line",
    ["fit --help", "test -h", "fit --help all", "predict --help trainer", "fit --model.help PF2LoRA", "fit --data.help TextFiles"],
)
def test_it_is_what_the_parsers_print(line: str, kept_index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick_help(line.split()) == printed(capsys, *line.split())


@pytest.mark.parametrize(
    "line",
    [
        "fit --help rounds",
        "fit --model.help my_lab.Method",  # which its author changes
        "fit --model.help Digits",
        "fit --nothing.help FedAvg",
        "fit --config my.yaml --help",
        "fit --config quickstart",
        "fit --model.init_args.epocs 3",  # of no known class
        "fit --model my_lab.Method --model.epocs 3",
        "fit --model FedAvg --model.optimizer.init_args.foo 3",
        "fit --config quickstart --trainer.max_epochs 3",  # which is refused with a reason
        "fit --model.init_args.optimizer.init_args.lr=0.1 --trainer.accelerator cpu -c quickstart",
        "fit --config quickstart --model.class_path FedProx --model.init_args.mu 0.3",
        'fit --config quickstart --config {"model":{"class_path":"FedProx"}} --model.init_args.mu 0.3',
        "fit --data.init_args.partition IID --config quickstart --data.init_args.partition.init_args.alpha 1",  # of the latter
    ],
)
def test_what_it_leaves_to_the_parsers(line: str, kept_index: Path) -> None:
    assert quick_help(line.split()) == ""


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("fit --modle FedAvg", "did you mean --model?"),
        ("fit --lr=0.1", "it belongs to the optimizer: --model.init_args.optimizer.init_args.lr"),
        ("predict --config quickstart --federation.round 3", "did you mean --federation.rounds?"),
        ("test --config quickstart --adapt_epochs 1", "it is called fine_tuning.epochs now"),
    ],
)
def test_an_option_that_begins_like_none(line: str, meant: str, kept_index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FederationError) as error:
        quick_help(line.split())
    assert f"({meant}" in str(error.value)
    assert f"({meant}); see lightning-fed {line.split()[0]} --help" in refused(capsys, *line.split())


@pytest.mark.parametrize(
    "line",
    [
        "fit --config quickstart --model.init_args.epocs=3",
        "fit -c quickstart --model FedPer --model.lr 3",
        "test --data Digits --data.num_client 3",
    ],
)
def test_an_option_that_a_class_does_not_have(line: str, kept_index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FederationError) as error:
        quick_help(line.split())
    kept_index.rename(kept_index.with_name("elsewhere"))  # the parser says the same
    assert str(error.value) in refused(capsys, *line.split())


def test_an_option_before_the_verb_has_no_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--modle").endswith("; see lightning-fed fit --help\n")


def test_what_the_shipped_configurations_set_is_known(kept_index: Path) -> None:
    for path in shipped().values():
        if not path.name.endswith(".sweep.yaml"):
            settings = flat(read_yaml(path))
            assert quick_help(["fit", *(f"--{key}={value}" for key, value in settings.items())]) == ""
            assert quick_help(["fit", "--config", str(path), *(f"--{key}={value}" for key, value in settings.items())]) == ""


def test_it_is_made_once_until_something_changes(
    option_index: OptionIndex, kept_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OptionIndex] = []
    monkeypatch.setattr(all_parsers, "index", lambda: made.append(option_index) or option_index)
    assert read() == index() == option_index
    assert not made
    monkeypatch.setattr("lightning_fed.cli.help.option_index.version", lambda name: "another")
    assert read() is None
    assert index() == index() == option_index
    assert len(made) == 1
    assert len(list(kept_index.iterdir())) == 2


def test_where_nothing_can_be_kept_it_is_made_anew(
    option_index: OptionIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightning-fed").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(all_parsers, "index", lambda: option_index)
    assert index() is option_index
    assert index() is option_index


@pytest.mark.parametrize("line", ["fit --help", "fit --model.help FedAvg", "fit --modle FedAvg", "completion"])
def test_nothing_heavy_is_imported_for_it(line: str, kept_index: Path) -> None:
    code = f"""
import sys
from lightning_fed.__main__ import main
sys.argv[1:] = {line.split()}
try:
    main()
except SystemExit:
    pass
assert not {{"torch", "lightning"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"texts": {}, "verbs": 3, "classes": {}}'])
def test_a_damaged_index_is_no_index(content: str, kept_index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = option_index._path()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert read() is None


def test_a_file_of_a_method_that_changed_makes_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    files = set[str]()
    found = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: files.add(str(self)) or found(self, pattern))
    option_index._path()
    assert str(Path(lightning_fed.__file__).parent) in files
