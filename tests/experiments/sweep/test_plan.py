"""A sweep file, and the runs that it stands for."""

from datetime import date
from pathlib import Path

import pytest
import yaml

from lightning_fed.cli.sweep import as_config
from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.plan import arguments
from lightning_fed.experiments.sweep.settings import differences, flat
from lightning_fed.experiments.sweep.sweep_file import read_sweep

CONTENT = {
    "base": "base.yaml",
    "folder": "runs/compared",
    "seeds": [0, 1],
    "methods": {"FedAvg": {"model": "FedAvg"}, "local only": {"model": "Standalone", "federation.rounds": 3}},
    "grid": {
        "data.init_args.partition.init_args.alpha": [0.1, 1.0],
        "size": {"small": {"model.init_args.backbone": ["CNN5"], "data.init_args.augment": None}, "as it is": {}},
    },
    "report": {"at": "mean10", "target": 0.8},
    "published": [{"method": "FedAvg", "setting": "alpha=0.1, small", "mean": 88.09, "std": 0.29, "source": 2019}],
}


def written(**changes: object) -> Path:
    content = {key: value for key, value in (CONTENT | changes).items() if value is not None}
    Path("my.sweep.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return Path("my.sweep.yaml")


def test_cells_are_methods_by_points_of_the_grid_by_seeds() -> None:
    sweep = read_sweep(written())
    assert len(sweep.cells) == len({cell.name for cell in sweep.cells}) == 2 * 4 * 2
    assert [cell.seed for cell in sweep.cells] == [0] * 8 + [1] * 8
    assert sweep.cells[1].name == "alpha=0.1_small/local_only/seed_0"
    assert sweep.varied == {
        *("model", "federation.rounds", "data.partition.alpha", "model.backbone", "data.augment", "seed_everything"),
        "data.partition_seed",
    }


def test_seeds_of_partitions_and_of_training_are_crossed_all_partitions_first() -> None:
    sweep = read_sweep(written(seeds={"partition": [5, 6], "training": [0, 1]}, grid={}, published=[]))
    assert [cell.draw for cell in sweep.cells if cell.method == "FedAvg"] == [(5, 0), (6, 0), (5, 1), (6, 1)]
    assert sweep.cells[0].name == "FedAvg/partition_5_seed_0"
    assert arguments(sweep, sweep.cells[0], Path("there"))[-3:] == [
        *("--seed_everything=0", "--data.init_args.partition_seed=5", "--federation.run_dir=there"),
    ]


def test_options_that_end_alike_are_told_apart() -> None:
    alike = {"model.init_args.optimizer.init_args.lr": [0.1], "model.init_args.head.init_args.lr": [0.1]}
    assert list(read_sweep(written(grid=alike, published=[])).settings) == ["optimizer.lr=0.1, head.lr=0.1"]
    tuned = read_sweep(written(tune=alike, grid={}, published=[]))
    assert list(tuned.values("FedAvg")) == ["optimizer.lr=0.1, head.lr=0.1"]


def test_overrides_are_those_of_the_command_line() -> None:
    sweep = read_sweep(written())
    assert arguments(sweep, sweep.cells[1], Path("there")) == [
        *("fit", "--config", "base.yaml", "--model=Standalone", "--federation.rounds=3"),
        *("--data.init_args.partition.init_args.alpha=0.1", '--model.init_args.backbone=["CNN5"]', "--data.init_args.augment=null"),
        *("--seed_everything=0", "--federation.run_dir=there"),
    ]


def test_dates_of_yaml_are_texts() -> None:
    day = date(2024, 1, 31)
    sweep = read_sweep(written(grid={"data.init_args.root": [day]}, methods={"A": {"data.columns": [day]}}, published=[]))
    assert sweep.cells[0].name == "root=2024-01-31/A/seed_0"
    assert arguments(sweep, sweep.cells[0], Path("there"))[3:5] == [
        '--data.columns=["2024-01-31"]',
        "--data.init_args.root=2024-01-31",
    ]


def test_a_value_can_name_the_seed() -> None:
    begun = {"model": "LGFedAvg", "federation.init_from": "runs/fedavg/seed_{seed}/version_0"}
    sweep = read_sweep(written(methods={"LG": begun, "FedAvg": {"model": "FedAvg"}}, grid={}, published=[]))
    given = [cell.overrides.get("federation.init_from") for cell in sweep.cells]
    assert given == ["runs/fedavg/seed_0/version_0", None, "runs/fedavg/seed_1/version_0", None]
    seeds = {"seed_everything", "data.partition_seed"}
    assert sweep.varied_by_seed == {"federation.init_from", *seeds}
    assert read_sweep(written()).varied_by_seed == seeds


def test_a_value_within_a_value_can_name_the_seed() -> None:
    data = {"class_path": "CSVFiles", "init_args": {"path": "d/{seed}.csv", "columns": ["a", "{partition}"], "num_clients": 3}}
    tune = {"FedAvg": {"model.init_args.start": ["{seed}.pt"]}}
    sweep = read_sweep(written(methods={"FedAvg": {"data": data}}, grid={}, published=[], tune=tune))
    expected = {**data, "init_args": {"path": "d/1.csv", "columns": ["a", "1"], "num_clients": 3}}
    assert sweep.cells[1].overrides == {"data": expected}
    assert {"data.path", "data.columns", "model.start", "seed_everything", "data.partition_seed"} == sweep.varied_by_seed


def test_no_name_leaves_the_folder() -> None:
    sweep = read_sweep(written(methods={"..": {}, "a..b": {}}, grid={".": {"up": {}, "..": {}}}, published=[]))
    assert {cell.name for cell in sweep.cells if cell.seed == 0} == {f"{a}/{b}/seed_0" for a in ("up", "_") for b in ("_", "a..b")}


def test_a_value_can_name_the_partition() -> None:
    methods = {"A": {"federation.init_from": "runs/{partition}/{seed}"}}
    crossed = {"partition": [5], "training": [0]}
    for seeds, expected in ((crossed, "runs/5/0"), ([3], "runs/3/3")):
        sweep = read_sweep(written(seeds=seeds, methods=methods, grid={}, published=[]))
        assert sweep.cells[0].overrides["federation.init_from"] == expected
        assert "federation.init_from" in sweep.varied_by_seed


def test_what_is_written_beside_the_runs_is_the_same_sweep() -> None:
    sweep = read_sweep(written(seeds={"partition": [5, 6], "training": [0, 1]}))
    assert sweep.published[0].source == "2019"
    Path("again.yaml").write_text(yaml.safe_dump(as_config(sweep), sort_keys=False))
    assert read_sweep(Path("again.yaml")) == sweep


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [0]}, "'seed' is not a key of a sweep; known are base, folder, methods, seeds"),
        ({"methods": None}, "'methods' is missing"),
        ({"seeds": [0, 0]}, r"seeds is \[0, 0\], expected different numbers"),
        ({"seeds": 3}, "seeds is 3, expected different numbers"),
        ({"seeds": {"partition": [0]}}, "seeds has partition, expected partition and training"),
        ({"seeds": {"partition": [0, 0], "training": [0]}}, r"seeds.partition is \[0, 0\], expected different numbers"),
        ({"methods": {"A": {"data.init_args.partition_seed": 1}}}, "methods.A sets data.init_args.partition_seed, which the sweep"),
        ({"threads": 0}, "threads is 0"),
        ({"methods": {"FedAvg": "FedAvg"}}, "methods.FedAvg is 'FedAvg', expected options"),
        ({"methods": {"A": {"seed_everything": 1}}}, "methods.A sets seed_everything, which the sweep sets"),
        ({"methods": {"a b": {}, "a_b": {}}, "published": None}, "two runs would be called alpha=0.1_small/a_b/seed_0"),
        ({"grid": {"federation.rounds": [1, 2]}, "published": None}, "method local only and grid.federation.rounds both set"),
        ({"grid": {"model": ["FedAvg", "Ditto"]}, "published": None}, "method FedAvg and grid.model both set model"),
        ({"grid": {"alpha": 3}}, "grid.alpha is 3, expected a list of different values"),
        ({"methods": {False: {}}}, "methods has the name False, as YAML reads No, Off, Yes or Null: put it in quotes"),
        ({"grid": {"tuned": {None: {}}}}, r"grid\.tuned has the name None"),
        ({"grid": {"alpha": [0.1, "1e-1"]}}, r"grid.alpha is \[0.1, '1e-1'\], expected a list of different values"),
        ({"published": [{"method": "FedProx", "mean": 1.0}]}, "published names method 'FedProx'"),
        ({"published": [{"method": "FedAvg", "mean": m} for m in (1, 2)], "grid": {}}, "several entries for 'FedAvg'"),
        ({"report": {"at": "first"}}, "report.at is 'first', expected last, selected, best or, say, mean10"),
        ({"report": {"equal": "seconds"}}, "report.equal is 'seconds', expected rounds, bytes or flops"),
        ({"report": {"between": "FedAvg"}}, "report.between is 'FedAvg', expected a list of two methods, the lower one first"),
        ({"report": {"baseline": "Fedavg"}}, "report names method 'Fedavg'; the sweep has FedAvg, local only"),
        ({"report": {"between": ["local only", "all"]}}, "report names method 'all'"),
        ({"report": {"round": "last"}}, "report has the key 'round', expected metric, at, baseline"),
        ({"published": [{"method": "FedAvg"}]}, "expected method, mean, std, setting, source"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        read_sweep(written(**changes))


def test_a_file_that_is_none() -> None:
    with pytest.raises(FederationError, match=r"There is no file nowhere\.yaml"):
        read_sweep(Path("nowhere.yaml"))
    Path("list.yaml").write_text("[1]")
    with pytest.raises(FederationError, match="holds list, not a mapping"):
        read_sweep(Path("list.yaml"))


def test_configurations_differ_by_keys_without_init_args() -> None:
    one = flat(
        {
            "model": {"class_path": "A", "init_args": {"lr": 1, "nets": ["x"], "of_a": 3}},
            "federation": {"run_dir": "a", "rounds": 3},
        }
    )
    other = flat({"model": {"class_path": "B", "init_args": {"lr": 2, "nets": None}}, "federation": {"run_dir": "b", "rounds": 3}})
    assert one["model.lr"] == 1
    assert differences(one, other) == {
        "model.class_path": ("A", "B"),
        "model.lr": (1, 2),
        "model.nets": (["x"], None),
        "model.of_a": (3, None),
    }
    assert differences(one, other, ["model"]) == {}
    assert differences(one, one | {"federation.dropout": 0.0}) == {}  # of a later version, and not used
    assert differences(one, one | {"federation.dropout": 0.1}) == {"federation.dropout": (None, 0.1)}
    assert differences(one, one | {"model.net.layers": None}) == {}
    assert differences(one | {"model.net.width": 3}, one | {"model.net.width": 3, "model.net.layers": 9}) != {}
    assert set(differences(one, other, ["model.lr", "model.n"])) == {"model.class_path", "model.nets", "model.of_a"}
