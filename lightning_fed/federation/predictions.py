"""Clients' predictions for their own test examples, as a table."""

import csv
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.hub import optional
from lightning_fed.engines.turn_loop import TrainerFactory, turn_trainer
from lightning_fed.errors import FederationError
from lightning_fed.federation.run import Run
from lightning_fed.models import Transformer
from lightning_fed.tasks.task import Task

Row = dict[str, int | float | str]


class _TestData(ClientDataModule):
    """A client's data with its test examples as the data to predict."""

    def predict_dataloader(self) -> Any:
        return self.test_dataloader()


def refuse_output(output: Path) -> None:
    """Raises :class:`FederationError` for a file that is neither CSV nor Parquet, or if pyarrow is missing for Parquet."""
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise FederationError(f"Writing {output} needs pyarrow: pip install 'lightning-fed[hub]'.")
    if output.suffix not in (".csv", ".parquet"):
        raise FederationError(f"output is {output}: give a file name that ends in .csv or .parquet.")


def predictions(run: Run, new_trainer: TrainerFactory) -> list[Row]:
    """A row for each test example of each client: ``client``, ``example`` (its place in the data, from 0; see
    :meth:`.FederatedDataModule.given_places`), the target, the prediction and its scores; see :func:`columns`.

    Raises:
        FederationError: if a network answers with texts or with spans of them.
    """
    trainer, names = turn_trainer(new_trainer), run.data.class_names if run.data.predicts_labels else None
    rows: list[Row] = []
    for client in run.clients:
        module, data = run.client_module(client.id), run.data.client(client.id)
        test = data.splits[2]
        if isinstance(module.predictor, Transformer) and not run.data.predicts_labels:
            raise FederationError(
                f"{type(module.predictor).__name__} answers with texts or spans of them, which do not fit into a table: export the "
                "model, and predict with the library that it belongs to."
            )
        batches: Any = trainer.predict(module, datamodule=_TestData(**{one.name: getattr(data, one.name) for one in fields(data)}))
        outputs = torch.cat(batches) if batches else torch.empty(0, module.num_classes)
        if len(outputs) != len(test):
            raise FederationError(
                f"Of client {client.id}'s {len(test)} test examples {len(outputs)} were predicted: set no limit_predict_batches "
                "and no fast_dev_run."
            )
        found = columns(module.task, outputs, data.data.targets(test), names)
        rows += [
            {"client": client.id, "example": example} | {name: values[row] for name, values in found.items()}
            for row, example in enumerate(run.data.given_places(test.numpy()).tolist())
        ]
    return rows


def columns(task: Task, outputs: Tensor, targets: Tensor, names: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Columns that describe the predictions, by name, with a value for each example.

    - ``multiclass``: ``target`` and ``prediction`` (class names if known, else numbers), and ``probability/<class>`` of each class;
    - ``binary``: the same for 0 and 1, with ``probability`` of 1;
    - ``multilabel``: ``target/<n>`` and ``probability/<n>`` of each label;
    - ``regression``: ``target`` and ``prediction``, or ``…/<n>`` of each value;
    - ``survival``: ``event``, ``time`` and ``risk``.

    Raises:
        FederationError: if the outputs are not one number or one row of numbers per example, as with texts.
    """
    if outputs.dim() == 1:
        outputs = outputs[:, None]
    if outputs.dim() != 2:
        raise FederationError(
            f"The network's outputs have shape {tuple(outputs.shape)}, which does not fit into a table: export the model, and "
            "predict with the library that it belongs to."
        )
    outputs, targets = outputs.float().cpu(), targets.cpu()
    classes = [str(names[k]) if names else k for k in range(outputs.shape[1])]
    match task.name:
        case "multiclass":
            found = {"target": targets, "prediction": outputs.argmax(1)}
            named = {name: [classes[k] for k in numbers.tolist()] for name, numbers in found.items()}
            return named | _each("probability", outputs.softmax(1), classes)
        case "binary":
            likely = outputs.sigmoid().flatten()
            found = {"target": targets.flatten().int(), "prediction": (likely > 0.5).int(), "probability": likely}
        case "multilabel":
            return _each("target", targets.int(), classes) | _each("probability", outputs.sigmoid(), classes)
        case "regression":
            targets = targets.reshape(outputs.shape)
            if outputs.shape[1] > 1:
                return _each("target", targets, classes) | _each("prediction", outputs, classes)
            found = {"target": targets.flatten(), "prediction": outputs.flatten()}
        case "survival":
            found = {"event": targets[:, 0].int(), "time": targets[:, 1], "risk": outputs.flatten()}
    return {name: values.tolist() for name, values in found.items()}


def _each(what: str, values: Tensor, names: list[Any]) -> dict[str, list[Any]]:
    return {f"{what}/{name}": column.tolist() for name, column in zip(names, values.T, strict=True)}


def write_rows(rows: list[Row], output: Path) -> None:
    """Write a table as CSV or, with pyarrow, as Parquet."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".parquet":
        pyarrow, parquet = optional("pyarrow", "hub"), optional("pyarrow.parquet", "hub")
        parquet.write_table(pyarrow.Table.from_pylist(rows), output)
        return
    with output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["client", "example"])
        writer.writeheader()
        writer.writerows(rows)
