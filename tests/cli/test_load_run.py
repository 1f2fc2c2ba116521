"""Runs of the command line in Python, and what their models predict."""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny import CLASSES, Net, new_data, new_federation
from tiny_commands import printed, refused
from torch import Tensor

import lightning_fed
from lightning_fed.__main__ import main
from lightning_fed.cli.load_run import LoadedRun
from lightning_fed.data import CSVFiles
from lightning_fed.errors import FederationError
from lightning_fed.federation.predictions import columns
from lightning_fed.methods import FedAvg
from lightning_fed.models import MLP
from lightning_fed.tasks.task import TASKS

CONFIG = """
data: {class_path: Digits, init_args: {num_clients: 3, image_size: 8, val_share: 0.2, test_share: 0.3}}
model: {class_path: FedPer, init_args: {backbone: {class_path: MLP, init_args: {inputs: 192, hidden: [8]}}}}
federation: {rounds: 2, progress: false, logger: false}
trainer: {accelerator: cpu}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    (place / "config.yaml").write_text(CONFIG)
    main(["fit", "--config", str(place / "config.yaml"), "--federation.run_dir", str(place / "runs")])
    return place / "runs" / "version_0"


def test_a_run_has_its_tables_settings_and_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lightning_fed.load_run(folder)
    assert run.history.loc[2, "after/test_accuracy/mean"] == pytest.approx(run.clients["test/accuracy"].mean())
    assert run.settings["model"]["class_path"].endswith("FedPer")
    ours, theirs = run.client_module(0), run.client_module(2)
    assert torch.equal(ours.backbone.hidden[0].weight, run.server_module().backbone.hidden[0].weight)
    assert not torch.equal(ours.backbone.head.weight, theirs.backbone.head.weight)
    assert run.run.round == 2
    assert (lightning_fed.load_run(folder / "checkpoints" / "round_000001")).run.round == 1
    assert capsys.readouterr() == ("", "")


def test_clients_have_the_names_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "clients.csv").write_text("client,name,test/auroc\n0,007,0.5\n1,NA,\n2,North,nan\n")
    clients = LoadedRun(tmp_path, new_federation(1)).clients
    assert clients["name"].tolist() == ["007", "NA", "North"]
    assert clients["test/auroc"].isna().tolist() == [False, True, True]


def test_nobody_elses_random_numbers_change(folder: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    lightning_fed.load_run(folder)
    assert torch.equal(torch.rand(2), expected)


def test_one_of_python_is_opened_with_its_objects(tmp_path: Path) -> None:
    new_federation(1, run_dir=tmp_path).fit(FedAvg(Net, CLASSES), new_data(2))
    with pytest.raises(FederationError, match=r"has no config\.yaml: it was run from Python"):
        lightning_fed.load_run(tmp_path / "version_0")
    federation = new_federation(1, run_dir=tmp_path)
    run = federation.load(FedAvg(Net, CLASSES), new_data(2))
    assert run.client_module(1).is_built
    assert run.store.folder.is_dir()
    with pytest.raises(FederationError, match="No checkpoint at"):
        lightning_fed.load_run(tmp_path)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_predictions_are_those_that_were_measured(
    folder: Path, tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / f"predictions.{ending}"
    main(["predict", "--config", str(folder / "config.yaml"), "--ckpt_path", str(folder), "--output", str(output)])
    table = pd.read_csv(output) if ending == "csv" else pd.read_parquet(output)
    run = lightning_fed.load_run(folder)
    assert f"{len(table)} predictions of 3 clients, with the models after round 2.\n" in capsys.readouterr().out
    assert (table["example"].value_counts() == 1).all()
    assert table.groupby("client").size().tolist() == run.clients["test"].tolist()
    right = (table["target"] == table["prediction"]).groupby(table["client"]).mean()
    assert right.tolist() == pytest.approx(run.clients["test/accuracy"].tolist())
    likely = table[[f"probability/{digit}" for digit in range(10)]]
    assert likely.sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-5)
    data = run.run.data.client(1)
    assert table.loc[table["client"] == 1, "target"].astype(int).tolist() == data.data.labels[data.splits[2]].tolist()


def test_an_example_is_a_row_of_the_file_wherever_its_set_is(tmp_path: Path) -> None:
    lines = [f"{'ab'[k % 2]},{k},{k},{('train', 'test', 'val')[k % 3]}" for k in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["site,x,row,fold", *lines]))
    given: dict[str, Any] = {"target": "row", "input": "x", "task": "regression", "client": "site", "split_column": "fold"}
    data, model = CSVFiles(str(tmp_path / "t.csv"), **given), FedAvg(partial(MLP, inputs=1), 1)
    federation = new_federation(1, run_dir=tmp_path)
    federation.fit(model, data)
    rows = federation.predict(FedAvg(partial(MLP, inputs=1), 1), data, tmp_path / "p.csv")
    assert [(row["example"], row["client"]) for row in rows] == [(row["target"], row["target"] % 2) for row in rows]
    assert len(rows) == 10


def test_all_examples_are_predicted_or_none(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", str(folder / "config.yaml"), "--ckpt_path", str(folder), "--output", str(tmp_path / "p.csv")]
    assert "set no limit_predict_batches" in refused(
        capsys, "predict", *given, "--trainer.limit_predict_batches=1", "--data.eval_batch_size=4"
    )
    assert not (tmp_path / "p.csv").exists()


def test_other_files_are_refused_before_anything_is_loaded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "predict", "--config", str(folder / "config.yaml"), "--ckpt_path", str(folder), "--output", "a.xlsx")
    assert "ends in .csv or .parquet" in said
    assert "--output" in printed(capsys, "predict", "--help")


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "expected"),
    [
        ("multiclass", [[0.0, 9.0]], [0], {"target": ["no"], "prediction": ["yes"], "probability/yes": [0.999877]}),
        ("binary", [[2.0]], [[1.0]], {"target": [1], "prediction": [1], "probability": [0.880797]}),
        ("multilabel", [[0.0, 9.0]], [[1, 0]], {"target/0": [1], "target/1": [0], "probability/0": [0.5]}),
        ("regression", [[2.5]], [2.0], {"target": [2.0], "prediction": [2.5]}),
        ("regression", [[2.5, 1.0]], [[2.0, 3.0]], {"target/1": [3.0], "prediction/1": [1.0]}),
        ("survival", [[0.5]], [[1.0, 12.0]], {"event": [1], "time": [12.0], "risk": [0.5]}),
    ],
)
def test_each_task_has_columns_of_its_own(task: str, outputs: list[Any], targets: list[Any], expected: dict[str, Any]) -> None:
    names = ["no", "yes"] if task == "multiclass" else None
    found = columns(TASKS[task](), torch.tensor(outputs), torch.tensor(targets), names)
    if len(outputs[0]) == 1:  # as networks may give them, too
        assert columns(TASKS[task](), torch.tensor(outputs).flatten(), torch.tensor(targets)) == found
    for name, values in expected.items():
        assert found[name] == (pytest.approx(values, abs=1e-5) if isinstance(values[0], float) else values)


def test_answers_that_are_no_row_of_numbers_are_refused() -> None:
    outputs: Tensor = torch.zeros(2, 5, 7)
    with pytest.raises(FederationError, match=r"shape \(2, 5, 7\), which does not fit into a table"):
        columns(TASKS["multiclass"](), outputs, torch.zeros(2, 7))
