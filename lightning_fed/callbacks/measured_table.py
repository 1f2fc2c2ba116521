"""Metrics of clients and global models, as the terminal shows them after ``fit``, ``validate`` and ``test``."""

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from rich.table import Table

from lightning_fed.callbacks.base import RunView, majority_baseline

Split = Literal["val", "test"]

STAGES = {
    "before": "before aggregation, participants",
    "after": "after aggregation, all clients",
    "fine_tuned": "fine-tuned, all clients",
    "unseen/as_received": "unseen: as received",
    "unseen/personalized": "unseen: personalized",
    "unseen/fine_tuned": "unseen: fine-tuned",
}
"""Names of evaluations of clients, by the beginning of their column; others have that as their name."""


def measured_table(run: RunView, kind: Split, metrics: Mapping[str, float], title: str) -> Table:
    """The monitored metric: a row for each evaluation and one for the trivial baseline. An arrow marks the monitored value.

    Args:
        run: the run.
        kind: ``val`` or ``test``.
        metrics: metrics by column, as in ``metrics.csv``.
        title: title of the table.
    """
    table = Table(title=title, caption="→ monitored", caption_justify="left")
    table.add_column(f"{kind} {run.metric}")
    for column in ("mean", "worst client", "best client"):
        table.add_column(column, justify="right")
    for stage, (mean, *extremes) in measurements(run, kind, run.metric, metrics):
        of_clients = "/mean" if extremes else ""
        monitored = f"{stage}/{kind}_{run.metric}{of_clients}" == run.monitored(kind)
        words = f"{'→ ' if monitored else ''}{named(run, stage, bool(extremes))}"
        table.add_row(words, *(shown(run.metric, v) for v in (mean, *extremes)), style="bold" if monitored else None)
    if f"selected/{kind}_{run.metric}" in metrics:
        best = f"  round {metrics['selected/round']:.0f}, best on validation"
        table.add_row(best, shown(run.metric, metrics[f"selected/{kind}_{run.metric}"]))
    majority = majority_baseline(run) if kind == "test" else None
    if majority is not None:
        values = (majority.mean(), majority.min(), majority.max())
        table.add_row("baseline: majority label", *(shown(run.metric, value.item()) for value in values))
    return table


def add_other_metrics(table: Table, run: RunView, kind: Split, metrics: Mapping[str, float]) -> None:
    """Add rows for the metrics that are not monitored."""
    found = (re.fullmatch(rf".+?/{kind}_(.+?)(/mean)?", name) for name in metrics)
    for metric in dict.fromkeys(match[1] for match in found if match and "/" not in match[1]):
        if metric != run.metric:
            table.add_section()
            for stage, values in measurements(run, kind, metric, metrics):
                words = named(run, stage, len(values) > 1).partition(",")[0]
                table.add_row(f"{metric}, {words}", *(shown(metric, value) for value in values))


def measurements(run: RunView, kind: Split, metric: str, metrics: Mapping[str, float]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """The stages in which a metric was evaluated, with the clients' mean, worst and best value or a global model's value."""
    rises = metric != "loss" and run.model.task.higher_is_better(metric, run.model.test_metrics)
    if metric == run.metric:
        rises = run.model.higher_is_better
    for name, value in metrics.items():
        stage, _, end = name.partition(f"/{kind}_{metric}")
        if stage == "selected":
            continue
        if end == "/mean":
            yield (
                stage,
                (value, *(metrics[f"{stage}/{kind}_{metric}/{part}"] for part in (("min", "max") if rises else ("max", "min")))),
            )
        elif name == f"{stage}/{kind}_{metric}":
            yield stage, (value,)


def named(run: RunView, stage: str, of_clients: bool) -> str:
    """The name of an evaluation."""
    words = stage.replace("_", " ")
    words = STAGES.get(stage, words) if of_clients else f"{words} model, all clients"
    return words.replace("all clients", "seen clients") if run.unseen else words


def shown(metric: str, value: float) -> str:
    """A value as text."""
    return f"{100 * value:.2f} %" if metric.endswith("accuracy") else f"{value:.4f}"
