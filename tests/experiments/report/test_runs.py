"""Runs read from their files."""

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from written_runs import add_facts, write_crossed, write_run, write_sweep, write_sweep_file

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report import load_clients, load_rounds, load_runs, read_runs
from lightning_fed.experiments.report.methods_table import tables
from lightning_fed.experiments.report.report import as_csv, report_on
from lightning_fed.experiments.report.runs import work_of
from lightning_fed.experiments.report.views import COSTS
from lightning_fed.experiments.sweep.plan import ReportOptions


def test_a_row_per_run() -> None:
    accuracies = [i / 20 for i in range(20)]
    write_run(Path("runs/version_0"), [0.2, 0.8, 0.6], clients=accuracies)
    [row] = load_runs("runs", target=0.5).to_dict("records")
    assert row == {
        **{"method": "FedAvg", "setting": "", "partition": 0, "seed": 0, "model": "FedAvg", "rounds": 3, "planned": 3},
        **{"equal_partitions": "", "natural_clients": False},
        **{"epochs": "1", "metric": "after/test_accuracy/mean", "monitor": "after/test_accuracy/mean"},
        "lower_is_better": False,
        **{"last": 0.6, "selected": 0.8, "selected_round": 2, "best": 0.8, "best_round": 2},
        **{"worst_tenth": 0.025, "majority": 0.25},
        "pooled": pytest.approx(sum(k * (k + 1) / 20 for k in range(20)) / 210),
        **{"bytes": 300, "flops": 3000, "server_flops": 0, "seconds": 9.0},
        **{"target_round": 2, "target_bytes": 200, "target_flops": 2000},
        **{"made_with": "", "folder": "runs/version_0"},
    }


def test_small_is_good_where_the_measure_is_a_loss() -> None:
    write_run(Path("runs/version_0"), [0.2, 0.8, 0.6])
    row = load_runs("runs", metric="after/test_loss", target=0.5).iloc[0]
    assert (row["metric"], row["last"]) == ("after/test_loss/mean", pytest.approx(0.4))
    assert row["target_round"] == 2
    assert math.isnan(row["selected"])  # there is no loss on validation data


@pytest.mark.parametrize("facts", [{"higher_is_better": False}, {"monitor": "after/test_f1", "lower_is_better": ["surprise"]}])
def test_a_run_says_whether_less_is_better_of_a_measure_that_nobody_knows(facts: dict[str, Any]) -> None:
    write_run(Path("runs/version_0"), [0.2, 0.8, 0.6], clients=[0.1, 0.9])
    for file in ("metrics.csv", "clients.csv", "run.json"):
        path = Path("runs/version_0", file)
        path.write_text(path.read_text().replace("accuracy", "surprise"))
    add_facts(Path("runs"), **facts)
    row = load_runs("runs", metric="after/test_surprise", target=0.5, equal="flops").iloc[0]
    assert (row["best"], row["best_round"], row["selected"], row["target_round"], row["worst_tenth"]) == (0.2, 1, 0.2, 1, 0.9)


def test_the_majority_label_is_that_of_the_clients_that_were_measured() -> None:
    path = write_run(Path("runs/a"), [0.5])
    (path / "clients.csv").write_text((path / "clients.csv").read_text() + "2,9,0.95,\n")  # unseen
    assert load_runs("runs")["majority"].item() == 0.25


def test_what_was_never_reached_is_not_known() -> None:
    write_run(Path("runs/version_0"), [0.2])
    assert math.isnan(load_runs("runs", target=0.9)["target_round"].iloc[0])


def test_unseen_clients_without_any_number_have_none() -> None:
    table = write_run(Path("runs/version_0"), [0.5]) / "metrics.csv"
    pd.read_csv(table).assign(**{"unseen/personalized/test_accuracy/mean": math.nan}).to_csv(table, index=False)
    assert load_runs("runs")["unseen_personalized"].isna().all()


def test_a_row_per_round_and_per_client() -> None:
    write_sweep(Path("sweep"), {"FedAvg": [0.8, 0.6], "Standalone": [0.7, 0.7]})
    rounds, clients = load_rounds("sweep"), load_clients("sweep")
    assert (len(rounds), len(clients)) == (8, 8)
    assert list(rounds.columns[:5]) == [*clients.columns[:4], "round"] == ["method", "setting", "partition", "seed", "round"]
    assert rounds.query("method == 'FedAvg' and seed == 1")["after/test_accuracy/mean"].tolist() == [0.3, 0.6]


def test_rows_stand_in_the_order_of_the_sweep_wherever_it_lies() -> None:
    write_sweep(Path("sweep"), {"Standalone": [0.7, 0.7], "FedAvg": [0.8, 0.6]})
    shutil.move("sweep", "elsewhere")
    assert load_runs("elsewhere")[["method", "seed"]].to_numpy().tolist() == [
        *(["Standalone", 0], ["Standalone", 1], ["FedAvg", 0], ["FedAvg", 1]),
    ]
    assert len(load_runs("elsewhere/FedAvg")) == 2


def test_runs_behind_links_count_once() -> None:
    write_sweep(Path("sweep"), {"Standalone": [0.7, 0.7], "FedAvg": [0.8, 0.6]})
    whole = load_runs("sweep")
    shutil.move("sweep/FedAvg", "another_disk")
    for link, to in (("FedAvg", "../another_disk"), ("round", "."), ("again", "Standalone")):
        Path("sweep", link).symlink_to(to)
    assert load_runs("sweep").equals(whole)
    assert load_runs("sweep/FedAvg", "sweep", "sweep").equals(whole)


def test_folders_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    write_sweep(Path("sweep"), {"Standalone": [0.7], "FedAvg": [0.8]})

    def denying(function: Any) -> Any:
        def denied(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and "FedAvg" in Path(path).parts and (function is not stat or Path(path).name != "FedAvg"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return function(path, *args, **options)

        return denied

    stat = os.stat
    for function in (os.scandir, os.open, stat):
        monkeypatch.setattr(os, function.__name__, denying(function))
    monkeypatch.setattr(os, "access", lambda path, mode: "FedAvg" not in Path(path).parts)
    assert set(load_runs("sweep", "nowhere")["method"]) == {"Standalone"}
    assert caplog.messages == ["Left out: sweep/FedAvg cannot be read (Permission denied)."]
    assert report_on([Path("sweep")]).notes == [
        f"Left out: 1 of 2 runs in {Path('sweep').absolute()}, which have not finished a round."
    ]


def test_settings_stand_in_the_order_of_the_sweep_or_of_their_numbers() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.5]}, grid={"model.mu": [1, 0.5, 10]})
    for mu in (10, 1, 0.5):
        cell = sweep / f"mu={mu}/FedAvg/seed_0"
        write_run(cell / "version_0", [0.5], mu=mu)
        (cell / "cell.json").write_text('{"status": "finished"}')
        write_run(Path(f"alone/{mu}"), [0.5], mu=mu)
    assert load_runs("sweep")["setting"].tolist() == ["mu=1", "mu=0.5", "mu=10"]
    assert load_runs("alone", vary=["model.mu"])["setting"].tolist() == ["mu=0.5", "mu=1", "mu=10"]


def test_of_a_cell_the_newest_run_counts_and_what_the_sweep_no_longer_plays_does_not() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8], "Standalone": [0.7]})
    cell = sweep / "FedAvg/seed_0"
    for number in (2, 10):
        write_run(cell / f"version_{number}", [number / 100])
    (cell / "cell.json").write_text('{"status": "finished"}')
    content = yaml.safe_load((sweep / "sweep.yaml").read_text())
    del content["methods"]["Standalone"]
    (sweep / "sweep.yaml").write_text(yaml.safe_dump(content))
    assert load_runs(sweep)["last"].tolist() == [0.1]
    with pytest.raises(FederationError, match=r"No run below sweep/Standalone is one of its sweep: .* no longer has them"):
        load_runs(sweep / "Standalone")


def test_runs_that_differ_in_what_was_not_to_vary_are_refused_by_the_key() -> None:
    write_run(Path("runs/a"), [0.5], mu=0.1)
    write_run(Path("runs/b"), [0.5], seed=1, mu=0.2)
    with pytest.raises(FederationError, match=r"runs/a and runs/b differ in model.mu \(0.1 and 0.2\).* add --vary model.mu"):
        load_runs("runs")
    assert load_runs("runs", vary=["model.init_args.mu"])["setting"].tolist() == ["mu=0.1", "mu=0.2"]
    with pytest.raises(FederationError, match=r"No run has the setting model\.nu: --vary takes one of config\.yaml"):
        load_runs("runs", vary=["model.mu", "model.nu"])


def test_other_methods_may_have_other_options_but_not_other_data() -> None:
    write_run(Path("runs/a"), [0.5], "FedAvg")
    write_run(Path("runs/b"), [0.5], "FedRep", head_epochs=3)
    assert load_runs("runs")["method"].tolist() == ["FedAvg", "FedRep"]
    write_run(Path("runs/c"), [0.5], "FedPer", clients=(0.5, 0.5, 0.5))
    with pytest.raises(FederationError, match=r"differ in data.num_clients \(2 and 3\)"):
        load_runs("runs")


def set_in_configs(folder: Path, **options: Any) -> None:
    for path in folder.rglob("config.yaml"):
        config = yaml.safe_load(path.read_text())
        config["federation"] |= options
        path.write_text(yaml.safe_dump(config))


def test_options_that_came_after_a_run_do_not_part_it_from_others() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8], "Standalone": [0.7]})
    set_in_configs(sweep / "FedAvg", sampling="fixed")
    assert len(load_runs(sweep)) == 2
    set_in_configs(sweep / "FedAvg", dropout=0.3)
    with pytest.raises(FederationError, match=r"differ in federation.dropout \(0.3 and None\)"):
        load_runs(sweep)
    set_in_configs(sweep / "FedAvg", dropout=0.0, compression=None)
    set_in_configs(sweep / "Standalone", compression={"up": "int8"})
    with pytest.raises(FederationError, match=r"differ in federation.compression.up \(None and 'int8'\)"):
        load_runs(sweep)


def test_what_a_sweep_varies_may_differ() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8], "Standalone": [0.7]})
    for method, share in (("FedAvg", 1.0), ("Standalone", 0.5)):
        set_in_configs(sweep / method, participation=share)
    with pytest.raises(FederationError, match=r"differ in federation.participation \(1.0 and 0.5\)"):
        load_runs(sweep)
    content = yaml.safe_load((sweep / "sweep.yaml").read_text())
    content["methods"]["Standalone"]["federation.participation"] = 0.5
    (sweep / "sweep.yaml").write_text(yaml.safe_dump(content))
    assert len(load_runs(sweep)) == 2


def test_settings_of_one_name_are_the_same_in_all_sweeps() -> None:
    """Also if their names stand for a block that varies."""
    for name, count in (("one", 2), ("other", 3)):
        method = {"one": "FedAvg", "other": "Standalone"}[name]
        grid = {"clients": {"few": {"data.init_args.num_clients": count}}}
        write_sweep_file(Path(name), [method], grid=grid, seeds=[0])
        write_run(Path(name, "few", method, "seed_0", "version_0"), [0.5], method, clients=[0.5] * count)
    with pytest.raises(FederationError, match=r"differ in data\.num_clients \(2 and 3\).* add --vary data\.num_clients"):
        load_runs("one", "other")
    assert load_runs("one", "other", vary=["data.num_clients"])["setting"].tolist() == ["few, num_clients=2", "few, num_clients=3"]
    with pytest.raises(FederationError, match=r"differ in data\.num_clients \(2 and 3\)"):
        load_runs("one", "other", vary=["data"])


def test_what_has_the_seed_in_its_name_differs_by_seed() -> None:
    sweep = write_sweep(Path("sweep"), {"LG": [0.8, 0.7]})
    for path in sweep.glob("LG/*/*/config.yaml"):
        config = yaml.safe_load(path.read_text())
        config["federation"]["init_from"] = f"runs/seed_{config['seed_everything']}"
        path.write_text(yaml.safe_dump(config))
    content = yaml.safe_load((sweep / "sweep.yaml").read_text())
    content["methods"]["LG"]["federation.init_from"] = "runs/seed_0"
    (sweep / "sweep.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(FederationError, match=r"differ in federation\.init_from"):
        load_runs(sweep)
    content["methods"]["LG"]["federation.init_from"] = "runs/seed_{seed}"
    (sweep / "sweep.yaml").write_text(yaml.safe_dump(content))
    assert load_runs(sweep)["seed"].tolist() == [0, 1]


def test_runs_on_other_data_are_refused() -> None:
    sweep = write_crossed(Path("sweep"), {"FedAvg": [[0.8, 0.7]], "Standalone": [[0.6, 0.5]]})
    add_facts(sweep, data="0a")
    assert len(load_runs(sweep)) == 4
    add_facts(sweep / "Standalone/partition_0_seed_1", data="0b")
    with pytest.raises(FederationError, match=r"have the same options and partition, but not the same data: the files changed"):
        load_runs(sweep)
    set_in_configs(sweep, unseen=0.2)  # drawn with the training seed
    add_facts(sweep / "FedAvg/partition_0_seed_1", data="0b")
    assert len(load_runs(sweep)) == 4


def test_two_runs_of_one_name_are_refused() -> None:
    write_run(Path("runs/a"), [0.5])
    write_run(Path("runs/b"), [0.6])
    with pytest.raises(FederationError, match=r"runs/a and runs/b are both FedAvg with seed 0: name the folders.* meant\.$"):
        load_runs("runs")
    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}}
    write_run(Path("more/a"), [0.6], lr_scheduler=schedule)
    with pytest.raises(FederationError, match=r"--vary what they differ in \(model.lr_scheduler, model.lr_scheduler.step_size\)"):
        load_runs("runs/a", "more")
    assert load_runs("runs/a", "more", vary=["model.lr_scheduler"])["setting"].tolist() == [
        "lr_scheduler=None",
        "lr_scheduler=StepLR",
    ]


def test_nothing_to_read() -> None:
    with pytest.raises(FederationError, match="No run below nowhere, elsewhere"):
        load_runs("nowhere", "elsewhere")
    write_run(Path("runs/a"), [0.5])
    with pytest.raises(FederationError, match="No run has global/test_accuracy; there are after/test_accuracy/mean, "):
        load_runs("runs", metric="global/test_accuracy")


def test_a_csv_file_is_read_as_it_was_written() -> None:
    write_sweep(Path("sweep"), {"None": [0.8, 1 / 3]})
    runs = load_runs("sweep")
    Path("runs.csv").write_text(as_csv(runs))
    assert as_csv(read_runs("runs.csv")) == as_csv(runs)
    assert read_runs("runs.csv")[["method", "setting"]].to_numpy().tolist() == [["None", ""]] * 2


def cheaper(path: str, cost: str, share: float) -> None:
    """Have a run spend less."""
    rounds = pd.read_csv(path)
    rounds.assign(**{cost: share * rounds[cost]}).to_csv(path, index=False)


def test_each_method_may_be_reported_by_its_own_headline() -> None:
    write_run(Path("runs/a"), [0.5, 0.6], "FedAvg")
    write_run(Path("runs/b"), [0.7, 0.8], "FedHM", monitor="global/test_accuracy")
    assert load_runs("runs")[["metric", "last"]].to_numpy().tolist() == [["after/test_accuracy/mean", v] for v in (0.6, 0.8)]
    own = load_runs("runs", metric="monitor")
    assert own["metric"].tolist() == own["monitor"].tolist() == ["after/test_accuracy/mean", "global/test_accuracy"]
    assert own["last"].tolist() == [0.6, pytest.approx(0.7)]
    assert load_runs("runs/b")["metric"].tolist() == ["global/test_accuracy"]  # what all of them have in common


def test_who_has_begun_only_does_not_decide_what_is_common_to_all() -> None:
    write_run(Path("runs/a"), [0.5, 0.6], "FedAvg")
    write_run(Path("runs/b"), [0.7, 0.8], "FedPer", monitor="global/test_accuracy")
    write_run(Path("runs/c"), [0.9], "FedRep", rounds=2)
    for run, dropped in (("a", "nothing"), ("b", "test_accuracy/mean"), ("c", "test_")):
        rounds = pd.read_csv(f"runs/{run}/metrics.csv").assign(**{"after/test_f1/mean": 0.25})
        rounds[[column for column in rounds if dropped not in column]].to_csv(f"runs/{run}/metrics.csv", index=False)
    assert set(load_runs("runs")["metric"]) == {"after/test_f1/mean"}


def test_clients_means_of_different_measures_stand_side_by_side() -> None:
    write_run(Path("runs/a"), [0.5], "HOMLoRA")
    write_run(Path("runs/b"), [0.7], "PerFedAvgLoRA", monitor="after/test_adapted_accuracy/mean")
    runs = load_runs("runs")
    assert runs["metric"].tolist() == ["after/test_accuracy/mean", "after/test_adapted_accuracy/mean"]
    assert runs["last"].tolist() == [0.5, pytest.approx(0.6)]


@pytest.mark.parametrize(
    ("training", "fine_tuning", "said"),
    [
        ([{"phase": "local", "epochs": 5}], [], "5"),
        ([{"phase": "local", "steps": 10}], [], "10 steps"),
        ([{"phase": "lora", "epochs": 2}, {"phase": "global", "epochs": 3}], [], "2 on lora + 3 on global"),
        ([{"phase": "local", "epochs": 1}], [{"phase": "fine_tune", "epochs": 1}], "1, fine-tuned 1"),
        ([], [], "0"),
    ],
)
def test_what_a_client_does_in_a_round(training: list[dict[str, Any]], fine_tuning: list[dict[str, Any]], said: str) -> None:
    facts = {"training": training, "fine_tuning": fine_tuning}
    assert work_of(facts) == work_of(facts | {"fine_tuning_when": "always"}) == said
    assert work_of(facts | {"fine_tuning_when": "last"}) == said + " at the end" * bool(fine_tuning)


def test_at_equal_cost_everybody_has_spent_what_all_of_them_have() -> None:
    write_run(Path("runs/a"), [0.1, 0.2, 0.3, 0.4], "FedAvg")
    write_run(Path("runs/b"), [0.5, 0.6, 0.7, 0.6], "FedPer")
    write_run(Path("runs/c"), [0.9], "FedRep", rounds=4)  # who is not finished does not decide
    cheaper("runs/b/metrics.csv", "compute/total_flops", 0.5)
    for at, expected in (("last", [0.2, 0.6, 0.9]), ("best", [0.2, 0.7, 0.9]), ("mean2", [0.15, 0.65, math.nan])):
        runs = load_runs("runs", at=at, equal="flops")
        assert runs["equal_flops"].tolist() == pytest.approx(expected, nan_ok=True), at
    assert [load_runs("runs", equal=cost)[f"equal_{cost}_budget"].iloc[0] for cost in COSTS] == [4, 400, 2000]


def test_a_run_that_is_measured_long_before_the_common_cost_is_named() -> None:
    write_run(Path("runs/a"), [0.1, 0.2], "FedAvg")
    write_run(Path("runs/b"), [0.3, 0.4], "FedPer")
    cheaper("runs/b/metrics.csv", "compute/total_flops", 1.01)
    runs = load_runs("runs", equal="flops")
    assert runs["equal_flops"].tolist() == [0.2, 0.3]
    assert runs["equal_flops_reached"].tolist() == pytest.approx([1, 0.505])
    [note] = [note for note in tables(runs, ReportOptions(equal="flops"))[0].notes if note.startswith("At equal cost")]
    assert note.endswith("every run of the setting reached. FedPer is measured at 50% of it or more.")


def test_who_sends_nothing_has_no_part_in_equal_traffic() -> None:
    write_run(Path("runs/a"), [0.1, 0.2, 0.3], "FedAvg")
    write_run(Path("runs/b"), [0.5, 0.6, 0.7], "Standalone")
    cheaper("runs/b/metrics.csv", "traffic/total_bytes", 0)
    runs = load_runs("runs", equal="bytes")
    assert runs[["equal_bytes", "equal_bytes_budget"]].to_numpy().tolist() == [[0.3, 300], [0.7, 300]]
    notes = tables(runs, ReportOptions(equal="bytes"))[0].notes
    assert "At equal cost: each run at the largest cost that every run of the setting that sends anything reached." in notes
    [alone] = tables(load_runs("runs/b", equal="bytes"), ReportOptions(equal="bytes"))
    assert alone.columns[1] == "at equal bytes sent (0 B) (%)"
