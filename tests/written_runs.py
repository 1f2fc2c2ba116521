"""Folders as runs write them, with numbers that a test can follow."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

FACTS: dict[str, Any] = {
    **{"monitor": "after/test_accuracy/mean", "higher_is_better": True},
    **{"training": [{"phase": "local", "epochs": 1}], "fine_tuning": []},
}
"""What ``run.json`` always says."""


def write_run(
    path: Path,
    accuracies: Sequence[float],
    model: str = "FedAvg",
    seed: int = 0,
    partition: int | None = None,
    rounds: int | None = None,
    clients: Sequence[float] = (0.5, 1.0),
    monitor: str = "after/test_accuracy/mean",
    **settings: Any,
) -> Path:
    """A run that reached these accuracies, on test data as on validation data, a round each.

    Args:
        path: where.
        accuracies: by round; each costs 100 bytes and 1000 FLOPs.
        model: its method.
        seed: its seed.
        partition: that of its partition, if that has one of its own.
        rounds: how many were planned; None: as many as there are.
        clients: their accuracies in the last round; client k has k + 1 test examples.
        monitor: what its method reports itself by; another than the clients' mean accuracy is a tenth below it.
        settings: more of its ``model`` block.
    """
    path.mkdir(parents=True)
    own = {} if partition is None else {"partition_seed": partition}
    config = {
        "seed_everything": seed,
        "model": {"class_path": f"lightning_fed.methods.{model}", "init_args": {"epochs": 1, **settings}},
        "data": {"class_path": "lightning_fed.data.Digits", "init_args": {"num_clients": len(clients), **own}},
        "federation": {"rounds": rounds or len(accuracies), "run_dir": str(path.parent)},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "run.json").write_text(json.dumps(FACTS | {"monitor": monitor}))
    write_csv(
        path / "metrics.csv",
        [
            {
                **{"round": round, "train/local_loss": 1 / round, "seconds/fit": 2.0, "seconds/evaluate": 1.0},
                **{"traffic/total_bytes": 100 * round, "compute/total_flops": 1000 * round},
                **{"after/val_accuracy/mean": accuracy, "after/test_accuracy/mean": accuracy, "after/test_loss/mean": 1 - accuracy},
                "selected/test_accuracy": accuracy,
                **({monitor: accuracy - 0.1} if monitor != "after/test_accuracy/mean" else {}),
            }
            for round, accuracy in enumerate(accuracies, start=1)
        ],
    )
    of_clients = [{"client": k, "test": k + 1, "majority_accuracy": 0.25, "test/accuracy": v} for k, v in enumerate(clients)]
    write_csv(path / "clients.csv", of_clients)
    return path


def add_facts(folder: Path, **facts: Any) -> None:
    """Change ``run.json`` of all runs below a folder."""
    for path in folder.rglob("run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_sweep(folder: Path, values: dict[str, Sequence[float]], **content: Any) -> Path:
    """A sweep whose runs have two rounds, of which the last reached a value per method and seed."""
    seeds = list(range(max(map(len, values.values()))))
    write_sweep_file(folder, values, seeds=seeds, **content)
    for name, reached in values.items():
        for seed, value in enumerate(reached):
            write_run(folder / name / f"seed_{seed}" / "version_0", [value / 2, value], name, seed)
    return folder


def write_crossed(folder: Path, values: dict[str, Sequence[Sequence[float]]], **content: Any) -> Path:
    """The same with a row of values per partition, a value per training seed; NaN where a run is missing."""
    [first, *_] = values.values()
    seeds = {"partition": list(range(len(first))), "training": list(range(len(first[0])))}
    write_sweep_file(folder, values, seeds=seeds, **content)
    for name, reached in values.items():
        for partition, of_partition in enumerate(reached):
            for seed, value in enumerate(of_partition):
                if value == value:
                    path = folder / name / f"partition_{partition}_seed_{seed}" / "version_0"
                    write_run(path, [value / 2, value], name, seed, partition)
    return folder


def write_sweep_file(folder: Path, methods: Iterable[str], **content: Any) -> None:
    sweep = {"base": "base.yaml", "folder": str(folder), "methods": {name: {"model": name} for name in methods}} | content
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
