"""The verb ``sweep``: what it checks before the first run, and real runs, each in its process."""

import csv
import json
import logging
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from tiny import TINY_BERT
from tiny_files import write_idx

from lightning_fed.__main__ import main
from lightning_fed.cli.rehearsal import read, told_of
from lightning_fed.data import IID, InMemory
from lightning_fed.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.models import SoftmaxMLP, TransformerClassifier
from lightning_fed.report import load_clients, load_runs
from lightning_fed.sweep import player
from lightning_fed.sweep.plan import Cell, arguments, read_sweep

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs").rglob("*.sweep.yaml"))
assert SWEEPS

BASE = """
data:
  class_path: Digits
  init_args: {num_clients: 3, batch_size: 256, partition: {class_path: DirichletPerClass, init_args: {alpha: 1.0}}}
model: {class_path: FedAvg, init_args: {backbone: CNN5}}
federation: {rounds: 1, logger: false}
trainer: {accelerator: cpu}
"""
SWEEP = {
    "base": "base.yaml",
    "folder": "compared",
    "seeds": [3],
    "methods": {"FedAvg": {}, "local only": {"model": "Standalone"}},
}


@pytest.fixture(autouse=True)
def base() -> None:
    Path("base.yaml").write_text(BASE)


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would leave a file."""
    monkeypatch.setattr(player, "PROGRAM", (sys.executable, "-S", "-c", "open('played', 'w')"))


def sweep(*args: str, **changes: object) -> None:
    Path("my.sweep.yaml").write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    main(["sweep", "--config", "my.sweep.yaml", *args])


@pytest.mark.slow
def test_runs_in_their_processes_become_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    sweep("--workers", "2")
    said = capfd.readouterr().out
    assert "2 of 2 runs are finished." in said
    assert "lightning-fed report compared --output report" in said
    with Path("compared/cells.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(row["method"], row["status"]) for row in cells] == [("FedAvg", "finished"), ("local only", "finished")]
    assert cells[1]["command"] == (
        "OMP_NUM_THREADS=1 lightning-fed fit --config base.yaml --model=Standalone --seed_everything=3 "
        "--federation.run_dir=compared/local_only/seed_3"
    )
    assert all("torch " in row["versions"] and float(row["seconds"]) > 0 for row in cells)
    runs = load_runs("compared")
    assert runs[["method", "model", "seed", "rounds"]].to_numpy().tolist() == [
        *(["FedAvg", "FedAvg", 3, 1], ["local only", "Standalone", 3, 1]),
    ]
    log = Path("compared/FedAvg/seed_3/log.txt").read_text()
    assert log.startswith("Starting compared/FedAvg/seed_3/version_0: FedAvg with CNN5 on Digits, 3 clients, 1 rounds, InProcess.")

    # One seed, one partition.
    [one, other] = [group for _, group in load_clients("compared").groupby("method")]
    assert one[["train", "test"]].to_numpy().tolist() == other[["train", "test"]].to_numpy().tolist()
    manifests = [json.loads(path.read_text())["body"] for path in Path("compared").rglob("manifest.json")]
    data = {json.loads(body)["identity"]["data"] for body in manifests}
    assert (len(manifests), len(data)) == (2, 1)

    # What is finished is not played again; another configuration is not taken for it.
    before = Path("compared/FedAvg/seed_3/cell.json").read_text()
    sweep()
    assert Path("compared/FedAvg/seed_3/cell.json").read_text() == before
    with pytest.raises(SystemExit):
        sweep(methods={"FedAvg": {"federation.participation": 0.5}})
    assert "was played with federation.participation = 1.0, the sweep has 0.5" in capfd.readouterr().err


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"A": {}, "B": {"model": "FedProxx"}}}, "B/seed_3: model: there is no 'FedProxx' (did you mean FedProx?)"),
        ({"methods": {"A": {}, "B": {"federation.round": 1}}}, "B/seed_3: unrecognized arguments: --federation.round=1"),
        ({"methods": {"A": {}, "B": {"data.init_args.num_clients": 9999}}}, "B/seed_3: 9999 clients cannot share 1797 examples"),
        ({"methods": {"A": {}, "B": {"model.init_args.backbone": ["CNN1", "CNN5"]}}}, "B/seed_3: FedAvg got 2 different backbones"),
        ({"methods": {"A": {}, "B": {"trainer.max_epochs": 3}}}, "B/seed_3: trainer.max_epochs is set"),
        ({"methods": {"A": {}, "B": {"trainer.accelerator": "gpus"}}}, "B/seed_3: trainer.accelerator is 'gpus', of which"),
        (
            {"methods": {"A": {}, "B": {"trainer.precision": "64-true", "trainer.devices": 0}}},
            "B/seed_3: trainer.devices is '0', of which",
        ),
        ({"base": "nowhere.yaml"}, "my.sweep.yaml: there is no base nowhere.yaml"),
        ({"sedes": [0]}, "'sedes' is no key of a sweep"),
    ],
)
def test_what_is_wrong_in_one_run_stops_all_before_the_first(
    changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        sweep(**changes)
    said = capsys.readouterr().err
    assert error.value.code == 2
    assert message in said
    assert said.count("\n") == 1
    assert not Path("played").exists()
    assert not Path("compared").exists()


@pytest.mark.usefixtures("no_run")
def test_all_that_is_wrong_is_told_at_once_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = {"trainer.accelerator": "gpus"}
    wrong = {"A": nobody, "B": {}, "C": {"model": "FedProxx"}, "D": {"trainer.limit_train_batches": -1}, "E": nobody}
    with pytest.raises(SystemExit):
        sweep(methods=wrong, seeds=[0, 1])
    lines = capsys.readouterr().err.splitlines()
    assert [re.match(r"lightning-fed: error: (./seed_0[^:]*: [\w.]+)", line)[1] for line in lines] == [  # type: ignore[index]
        *("A/seed_0 and 1 more: trainer.accelerator", "C/seed_0: model", "D/seed_0: trainer.limit_train_batches"),
    ]


@pytest.mark.usefixtures("no_run")
def test_a_dry_run_prints_commands_and_plays_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    sweep("--dry_run", grid={"data.init_args.partition.init_args.alpha": [0.1, 5]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# alpha=0.1/FedAvg/seed_3: waiting"
    assert re.fullmatch(r"OMP_NUM_THREADS=1 lightning-fed fit --config base.yaml .*alpha=0\.1 .*run_dir=\S+", lines[1])
    assert len(lines) == 8
    assert not Path("played").exists()


def test_a_run_that_fails_is_named_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(player, "PROGRAM", (sys.executable, "-S", "-c", "raise SystemExit('lightning-fed: error: no luck')"))
    with pytest.raises(SystemExit) as error:
        sweep()
    assert error.value.code == 1
    said = capsys.readouterr()
    assert "0 of 2 runs are finished." in said.out
    assert "FedAvg/seed_3 failed: no luck; all it said is in compared/FedAvg/seed_3/log.txt." in said.err
    assert "Try the rest again with: lightning-fed sweep --config my.sweep.yaml" in said.err


def write_grey(root: Path, name: str) -> None:
    """Black images in torchvision's folder, of all classes alike and enough for every shipped partition."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 24_000), ("t10k", 10_000)):
        write_idx(raw / f"{part}-images-idx3-ubyte", np.zeros((count, 28, 28)))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)


def train_what_others_begin_with() -> None:
    """The run of FedAvg from which LG-FedAvg goes on, where its sweep puts it."""
    of_fedavg = read_sweep(Path("configs/peers/lg_fedavg_mnist.sweep.yaml"))
    [folder] = {of_fedavg.folder / cell.name for cell in of_fedavg.cells if cell.method == "FedAvg, 300 rounds" and cell.seed == 0}
    network = partial(SoftmaxMLP, inputs=784, hidden=[512, 256, 256, 128])
    data = InMemory(torch.zeros(20, 784), torch.arange(20) % 10, num_clients=1, partition=IID())
    Federation(rounds=1, run_dir=folder, logger=False, progress=False).fit(FedAvg(network, epochs=0), data)


def kinds_of_runs() -> dict[Path, list[Cell]]:
    """Of each sweep those runs of the first seed that set an option of a method, or of data, that none before them set."""
    known, found = set[tuple[object, ...]](), dict[Path, list[Cell]]()
    for path in SWEEPS:
        plan = read_sweep(path)
        base = yaml.safe_load((ROOT / plan.base).read_text())
        for cell in plan.cells:
            whose = {"model": cell.overrides.get("model", base["model"]["class_path"]), "data": base["data"]["class_path"]}
            options = {(whose.get(option.split(".")[0]), option) for option in cell.overrides}
            if cell.seed == plan.seeds[0] and not options <= known:
                found.setdefault(path, []).append(cell)
            known |= options
    return found


KINDS = kinds_of_runs()
each_sweep = pytest.mark.parametrize("path", SWEEPS, ids=lambda path: str(path.relative_to(ROOT / "configs")))


class TestSweep:
    @each_sweep
    def test_begins_with_the_command_that_plays_it(self, path: Path) -> None:
        assert path.read_text().splitlines()[0] == f"# lightning-fed sweep --config {path.relative_to(ROOT)}"
        assert (ROOT / read_sweep(path).base).is_file()

    @pytest.mark.parametrize("path", KINDS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
    def test_its_kinds_of_runs_are_understood(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        plan = read_sweep(path)
        for cell in KINDS[path]:
            read(cell.name, arguments(plan, cell, Path("runs")))

    @pytest.mark.slow
    @each_sweep
    def test_its_runs_are_understood(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        plan = read_sweep(path)
        first, *_ = cells = [cell for cell in plan.cells if cell.seed == plan.seeds[0]]
        for cell in cells:  # each method and each point of the grid; not each of their pairs
            if cell.method == first.method or cell.setting == first.setting:
                read(cell.name, arguments(plan, cell, Path("runs")))


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in SWEEPS if path.parent.name == "peers"], ids=lambda path: path.stem)
def test_all_runs_of_a_seed_can_begin(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").symlink_to(ROOT / "configs")
    write_grey(Path("data/mnist"), "MNIST")
    write_grey(Path("data/fashion-mnist"), "FashionMNIST")
    if "_from_" in path.name:
        train_what_others_begin_with()
    content = yaml.safe_load(path.read_text())
    Path("one_seed.sweep.yaml").write_text(yaml.safe_dump(content | {"seeds": content["seeds"][:1]}, sort_keys=False))
    main(["sweep", "--config", "one_seed.sweep.yaml", "--dry_run"])
    assert capsys.readouterr().out.count("lightning-fed fit") == len(read_sweep(path).cells) / len(content["seeds"])


def test_what_pretrained_files_lack_is_said_by_a_run_and_not_by_the_check_before_it(tmp_path: Path) -> None:
    """Else a comparison of many runs begins with as many reports of transformers, each of ten lines."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    transformers.BertForMaskedLM(transformers.BertConfig(**TINY_BERT)).save_pretrained(tmp_path / "bert")
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    try:
        with told_of("a run"):
            TransformerClassifier(2, str(tmp_path / "bert"))
        assert not said
        TransformerClassifier(2, str(tmp_path / "bert"))
        assert "classifier.weight" in "".join(said)
    finally:
        logger.removeHandler(handler)


@pytest.mark.slow
def test_all_runs_of_the_first_comparison_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    main(["sweep", "--config", "configs/quickstart.sweep.yaml", "--dry_run"])


@pytest.mark.slow
def test_the_example_of_the_documentation(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "comparisons.md").read_text()
    [content] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    Path("my.sweep.yaml").write_text(content)
    Path("configs").symlink_to(ROOT / "configs")
    commands = [line.split() for line in re.findall(r"^lightning-fed ((?:sweep|report) .*)$", page, re.MULTILINE)]
    for command in commands:
        main(command)
    assert Path("report/report.html").is_file()
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "comparisons.md", "exec"), {})
    assert "Standalone" in capfd.readouterr().out
