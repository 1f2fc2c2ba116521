"""Output on the terminal."""

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lightning_fed.callbacks.base import FederationCallback, RunView
from lightning_fed.callbacks.measured_table import Split, add_other_metrics, measured_table
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.formatting import amount, grouped, ordinal
from lightning_fed.system.console import UnreadConsole

log = logging.getLogger(__name__)


class ProgressBar(FederationCallback):
    """A bar over rounds with the current mean accuracy."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._turns = 0
        self._accuracy = ""

    def on_fit_start(self, run: RunView) -> None:
        """Show the bar, from the round at which the run starts or continues."""
        self._progress = Progress(
            TextColumn("Round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("", total=run.rounds, completed=run.round, status="")
        self._turns = 0
        self._accuracy = ""
        self._progress.start()

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        """Advance within the round, so that a long round shows progress."""
        assert self._progress is not None
        self._turns += 1
        size = len(run.server.cohort)
        done = run.round - 1 + self._turns / (size + 1)
        self._progress.update(self._task, completed=done, status=f"{self._accuracy} client {self._turns}/{size}")

    def on_round_end(self, run: RunView) -> None:
        """Complete the round and show the accuracy."""
        assert self._progress is not None
        self._turns = 0
        mean = run.history[-1].get(run.monitored("test"))
        if mean is not None:
            self._accuracy = f"{run.metric} {mean:.4f}"
        self._progress.update(self._task, completed=run.round, status=self._accuracy)

    def on_fit_end(self, run: RunView) -> None:
        """Remove the bar before the final output."""
        self.teardown(run)

    def teardown(self, run: RunView) -> None:
        """Restore the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Summary(FederationCallback):
    """Prints the table at the end of a run."""

    def on_fit_end(self, run: RunView) -> None:
        """Print the results, beside the trivial baseline, and the costs."""
        console = UnreadConsole()
        console.print(summary_table(run))
        for line in (*what_next(run), *where_to_look(run)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_measure_end(self, run: RunView, metrics: dict[str, float]) -> None:
        """Print the results of ``validate`` or ``test``."""
        if run.folder is not None:
            log.info(f"Evaluated: {run.folder}")
        kind: Split = "val" if any("/val_" in name for name in metrics) else "test"
        table = measured_table(run, kind, metrics, f"{run.method}: {len(run.clients)} clients, after round {run.round}")
        add_other_metrics(table, run, kind, metrics)
        UnreadConsole().print(table)


def what_next(run: RunView) -> Iterator[str]:
    """The command of the local baseline, where it makes sense: without fine-tuning, which would only prolong its training, and
    without what concerns updates, which it does not send.
    """
    config = run.folder / "config.yaml" if run.folder is not None else None
    if run.model.local_baseline and run.model.local_baseline != run.method and config is not None and config.is_file():
        federation = yaml.safe_load(config.read_text()).get("federation", {})
        unset = ["model.fine_tuning"] * bool(run.model.fine_tuning.length())
        unset += ["model.server_optimizer"] * (run.model.server_optimizer is not None)
        unset += [f"federation.{name}" for name in ("aggregation", "attack", "privacy") if federation.get(name)]
        nulls = [part for option in unset for part in (f"--{option}", "null")]
        yield "To see what sharing gains, train the same clients alone:"
        yield shlex.join(["lightning-fed", "fit", "--config", str(config), "--model", run.model.local_baseline, *nulls])


def where_to_look(run: RunView) -> Iterator[str]:
    """The command or place that shows each logger's data."""
    for logger in run.loggers:
        if isinstance(logger, TensorBoardLogger):
            yield "To see the curves:"
            yield shlex.join(["tensorboard", "--logdir", str(Path(logger.log_dir))])
            yield "  then open http://localhost:6006/#custom_scalars"
        elif isinstance(logger, MLFlowLogger):
            yield shlex.join(["mlflow", "ui", "--backend-store-uri", str(logger._tracking_uri)])
        elif isinstance(logger, WandbLogger):
            of_wandb = logger.experiment
            yield shlex.join(["wandb", "sync", str(Path(of_wandb.dir).parent)]) if of_wandb.offline else str(of_wandb.url)
        else:
            place = logger.log_dir or logger.save_dir
            yield f"{type(logger).__name__}: {place}" if place else f"Logged by {type(logger).__name__}."
    if not run.loggers and run.folder is not None:
        yield f"Tables: {run.folder}"


def summary_table(run: RunView) -> Table:
    """Accuracy per client, beside the trivial baseline, and the costs of a finished run."""
    metric, last = run.metric, run.history[-1]
    title = f"{run.method}: {len(run.clients)} clients, round {run.round} of {run.rounds}"
    table = measured_table(run, "test", last, title)
    table.add_section()
    table.add_row("values sent, up + down", amount(last["traffic/total_parameters"]))
    table.add_row("bytes sent, up + down", amount(last["traffic/total_bytes"]))
    table.add_row("training FLOPs", f"{last['compute/total_flops']:.3g}")
    # participants are evaluated in the turns in which they train
    training, evaluating = (sum(row.get(f"seconds/{stage}", 0.0) for row in run.history) for stage in ("fit", "evaluate"))
    table.add_row("seconds training", grouped(training, 1))
    every = run.evaluate_every if run.evaluate_every < run.rounds else 0
    often = {0: "at the end", 1: "each round"}.get(every, f"every {ordinal(every)}")
    table.add_row(f"seconds evaluating ({often})", grouped(evaluating, 1))
    if run.target is not None:
        reached = "target/round" in last
        table.add_row(f"{metric} of {run.target:g} reached", f"round {last['target/round']:.0f}" if reached else "not reached")
        if reached:
            table.add_row("  bytes sent until then", amount(last["target/bytes"]))
            table.add_row("  training FLOPs until then", f"{last['target/flops']:.3g}")
    return table
