"""Values that are tried, and which one is played."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from written_runs import add_facts, write_run, write_sweep_file

from lightning_fed.cli.sweep import as_config
from lightning_fed.errors import FederationError
from lightning_fed.experiments.report import load_runs
from lightning_fed.experiments.report.pictures import values_tried
from lightning_fed.experiments.report.report import report_on
from lightning_fed.experiments.report.tuning_table import tuning_tables
from lightning_fed.experiments.sweep.plan import Sweep
from lightning_fed.experiments.sweep.sweep_file import read_sweep
from lightning_fed.experiments.sweep.tuning import at_edges, chosen, grouped, inequality, trials

LR = "model.init_args.optimizer.init_args.lr"
SEEDS = {"partition": [5, 6], "training": [0, 1]}


def sweep(tune: Any, **content: Any) -> Sweep:
    write_sweep_file(Path("sweep"), ["FedAvg", "Standalone"], tune=tune, seeds=SEEDS, **content)
    return read_sweep(Path("sweep/sweep.yaml"))


def played(name: str, accuracies: list[float], status: str = "finished", seed: int = 0, partition: int = 5) -> None:
    cell = Path("sweep", name)
    write_run(cell / "version_0", accuracies, name.partition("/")[0], seed, partition)
    (cell / "cell.json").write_text(json.dumps({"status": status}))


def test_every_value_is_tried_on_the_first_seeds_of_all_methods_or_of_one() -> None:
    plan = sweep({LR: [0.01, 0.1], "FedAvg": {"model.init_args.mu": [1, 2]}})
    assert [cell.name for cell in plan.trials] == [
        *(f"FedAvg/lr={lr}_mu={mu}/partition_5_seed_0" for lr in (0.01, 0.1) for mu in (1, 2)),
        *(f"Standalone/lr={lr}/partition_5_seed_0" for lr in (0.01, 0.1)),
    ]
    assert plan.trials[3].overrides == {"model": "FedAvg", LR: 0.1, "model.init_args.mu": 2}
    assert {"model.optimizer.lr", "model.mu"} <= plan.varied
    assert inequality(plan) == "Methods were tuned unequally; values tried: FedAvg 4, Standalone 2."
    [table] = tuning_tables(plan, trials(plan, plan.folder))
    assert [row[1].text.replace(" (waiting)", "") for row in table.rows] == [
        "lr=0.01, mu=1; lr=0.01, mu=2; lr=0.1, mu=1; lr=0.1, mu=2",
        "lr=0.01, lr=0.1",
    ]
    Path("again.yaml").write_text(yaml.safe_dump(as_config(plan), sort_keys=False))
    assert read_sweep(Path("again.yaml")) == plan


def test_a_trial_that_was_cut_is_not_taken_for_a_worse_one() -> None:
    plan = sweep({LR: [0.01, 0.03]})
    for lr in (0.01, 0.03):
        played(f"FedAvg/lr={lr}/partition_5_seed_0", [0.5, 0.7])
    run = Path("sweep/FedAvg/lr=0.03/partition_5_seed_0/version_0")
    add_facts(run, rounds=2)
    trials(plan, plan.folder)
    metrics = (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text("".join(metrics.splitlines(keepends=True)[:2]))
    with pytest.raises(FederationError, match="has 1 rounds of a run that finished 2: it was cut"):
        trials(plan, plan.folder)
    (run / "metrics.csv").unlink()
    assert ("", "FedAvg") not in chosen(trials(plan, plan.folder))  # it is run again


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{}", "does not say what a run writes there"),
        ("metrics.csv", "round,after/val_accuracy/mean\n1,high\n", r"is damaged \(could not convert string to float: 'high'\)"),
    ],
)
def test_a_trial_whose_files_are_damaged_is_refused(name: str, content: str, message: str) -> None:
    plan = sweep({"FedAvg": {LR: [0.01]}})
    played("FedAvg/lr=0.01/partition_5_seed_0", [0.5])
    Path("sweep/FedAvg/lr=0.01/partition_5_seed_0/version_0", name).write_text(content)
    with pytest.raises(FederationError, match=message + ".* Remove sweep/FedAvg/lr=0.01/partition_5_seed_0 to run it again"):
        trials(plan, plan.folder)


def test_all_seeds_are_played_with_the_value_that_is_best_on_validation_data() -> None:
    plan = sweep({LR: [0.01, 0.03, 0.1]})
    assert inequality(plan) == ""
    for lr, accuracy in ((0.01, 0.5), (0.03, 0.7), (0.1, 0.6)):
        played(f"FedAvg/lr={lr}/partition_5_seed_0", [0.9, accuracy])  # of the last round
    played("Standalone/lr=0.01/partition_5_seed_0", [0.4])
    played("Standalone/lr=0.03/partition_5_seed_0", [0.9], "failed")
    assert chosen(trials(plan, plan.folder)) == {("", "FedAvg"): "lr=0.03"}  # one is still missing
    played("Standalone/lr=0.1/partition_5_seed_0", [0.3], "interrupted")
    assert ("", "Standalone") not in chosen(trials(plan, plan.folder))
    Path("sweep/Standalone/lr=0.1/partition_5_seed_0/cell.json").write_text('{"status": "finished"}')
    best = chosen(trials(plan, plan.folder))
    assert best == {("", "FedAvg"): "lr=0.03", ("", "Standalone"): "lr=0.01"}
    names = [cell.name for cell in plan.cells_with(best)]
    assert names[:2] == ["FedAvg/lr=0.03/partition_5_seed_0", "Standalone/lr=0.01/partition_5_seed_0"]
    assert len(names) == 2 * 4
    assert (at_edges(plan, "FedAvg", "lr=0.03"), at_edges(plan, "Standalone", "lr=0.01")) == ([], ["lr"])


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        (["1e-3", "1e-2", "1e-1"], ["1e-3", "1e-1"]),  # text for YAML 1.1
        ([0.1, 1, "1e-3"], [1, "1e-3"]),
        ([True, False], []),
        (["adam", 0.1], []),
    ],
)
def test_an_edge_is_the_smallest_or_largest_number(values: list[Any], edges: list[Any]) -> None:
    plan = sweep({"FedAvg": {LR: values}})
    names = dict(zip(plan.values("FedAvg"), values, strict=True))
    assert [value for name, value in names.items() if at_edges(plan, "FedAvg", name)] == edges


@pytest.mark.parametrize(("at", "best"), [("last", "lr=0.1"), ("selected", "lr=0.01"), ("best", "lr=0.01"), ("mean2", "lr=0.03")])
def test_the_round_is_the_one_that_is_reported(at: str, best: str) -> None:
    plan = sweep({"FedAvg": {LR: [0.01, 0.03, 0.1]}}, report={"at": at})
    for lr, accuracies in ((0.01, [0.9, 0.1, 0.1]), (0.03, [0.1, 0.8, 0.6]), (0.1, [0.1, 0.1, 0.7])):
        played(f"FedAvg/lr={lr}/partition_5_seed_0", accuracies)
    assert chosen(trials(plan, plan.folder)) == {("", "FedAvg"): best}


def test_a_round_that_came_to_no_number_is_not_the_best() -> None:
    plan = sweep({"FedAvg": {LR: [0.01, 0.1]}}, report={"at": "selected"})
    for lr, accuracies in ((0.01, [math.nan, 0.7]), (0.1, [0.6, math.nan])):
        played(f"FedAvg/lr={lr}/partition_5_seed_0", accuracies)
    assert [trial.score for trial in trials(plan, plan.folder)] == [0.7, 0.6]


def test_of_a_loss_the_smallest_is_the_best_and_without_validation_data_nothing_is_chosen() -> None:
    plan = sweep({"FedAvg": {LR: [0.01, 0.1]}})
    for lr, value in ((0.01, 0.3), (0.1, 0.6)):
        played(f"FedAvg/lr={lr}/partition_5_seed_0", [value])
        facts = Path(f"sweep/FedAvg/lr={lr}/partition_5_seed_0/version_0/run.json")
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"higher_is_better": False}))
    assert chosen(trials(plan, plan.folder)) == {("", "FedAvg"): "lr=0.01"}
    path = Path("sweep/FedAvg/lr=0.1/partition_5_seed_0/version_0/metrics.csv")
    pd.read_csv(path).drop(columns="after/val_accuracy/mean").to_csv(path, index=False)
    with pytest.raises(FederationError, match=r"has no after/val_accuracy/mean: values are chosen on validation data.*val_share"):
        trials(plan, plan.folder)


@pytest.fixture
def whole() -> Sweep:
    plan = sweep({"FedAvg": {LR: [0.01, 0.1]}})
    played("FedAvg/lr=0.01/partition_5_seed_0", [0.4])
    for partition, seed in ((5, 0), (6, 0), (5, 1), (6, 1)):
        played(f"FedAvg/lr=0.1/partition_{partition}_seed_{seed}", [0.8], seed=seed, partition=partition)
        played(f"Standalone/partition_{partition}_seed_{seed}", [0.5], seed=seed, partition=partition)
    return plan


def test_a_report_compares_the_chosen_and_says_what_else_was_tried(whole: Sweep) -> None:
    for path in Path("sweep").glob("FedAvg/lr=*/*/version_0/config.yaml"):
        config = yaml.safe_load(path.read_text())
        config["model"]["init_args"]["optimizer"] = {"init_args": {"lr": float(path.parts[2].removeprefix("lr="))}}
        path.write_text(yaml.safe_dump(config))
    runs = load_runs("sweep")
    assert runs[["method", "partition", "seed", "last"]].to_numpy().tolist() == [
        *(["FedAvg", p, s, 0.8] for p in (5, 6) for s in (0, 1)),
        *(["Standalone", p, s, 0.5] for p in (5, 6) for s in (0, 1)),
    ]
    [table] = [table for table in report_on([Path("sweep")]).tables if table.title == "Tuning"]
    [row] = table.rows
    assert [entry.text for entry in row] == ["FedAvg", "lr=0.01, lr=0.1", "lr=0.1", "80.00 %", "40.00 %", "40.00 %"]
    assert row[2].note.startswith("At an edge of what was tried")
    assert table.notes[-1] == "Methods were tuned unequally; values tried: FedAvg 2, Standalone none."
    report_on([Path("sweep")]).write(Path("out"))
    assert Path("out/tuning.png").is_file()


def test_the_picture_has_a_dot_per_value_and_the_chosen_is_full(whole: Sweep) -> None:
    [axes] = values_tried(grouped(trials(whole, whole.folder))).axes
    dots = {float(line.get_xdata()[0]): line.get_markerfacecolor() for line in axes.lines}
    assert sorted(dots) == pytest.approx([40, 80])
    assert [color == "white" for _, color in sorted(dots.items())] == [True, False]
    assert {text.get_text() for text in axes.texts} == {"0.01", "0.1"}
    assert axes.get_xlabel() == "validation accuracy (%)"


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({LR: []}, rf"tune.{LR} is \[\], expected a list of different values"),
        ({LR: [0.1, 0.1]}, "expected a list of different values"),
        ({LR: [0.1, "1e-1"]}, "expected a list of different values"),
        ({LR: 0.1}, rf"tune.{LR} is 0.1, expected an option and its values, or a method \(FedAvg, Standalone\)"),
        ({"FedProx": {LR: [0.1]}}, "tune.FedProx is .*, expected an option"),
        ({"model": ["FedAvg", "FedProx"]}, "tune and method FedAvg or the grid both set model"),
        ({"seed_everything": [1, 2]}, "tune.FedAvg sets seed_everything, which the sweep sets"),
    ],
)
def test_what_is_wrong_is_named(tune: Any, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        sweep(tune)


def test_nothing_is_known_before_anything_was_played() -> None:
    plan = sweep({LR: [0.01, 0.1]})
    assert all(math.isnan(trial.score) and trial.status == "waiting" for trial in trials(plan, plan.folder))
    assert not Path("sweep/FedAvg").exists()
