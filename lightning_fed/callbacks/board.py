"""What TensorBoard shows of a run besides its metrics."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING, Any

import yaml

from lightning_fed.callbacks.base import FederationCallback, RunView, boards
from lightning_fed.callbacks.hyperparameters import Word, columns, hyperparameters

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardPage(FederationCallback):
    """Adds to TensorBoard the monitored metric under separate names (``monitor/…``), a page of charts that starts with it (CUSTOM
    SCALARS), a table of runs (HPARAMS) and the configuration (TEXT).

    The page has six charts instead of one for each column of ``metrics.csv``: the monitored metric with the quartiles of the
    clients, the worst client, the losses of the phases, bytes, FLOPs and seconds.
    """

    def on_fit_start(self, run: RunView) -> None:
        """Add the page, and the run to the table, so that a run that is stopped is in it, too."""
        for logger in boards(run):
            logger.hparams.update(hyperparameters(run))  # for hparams.yaml
            writer = logger.experiment
            writer.add_custom_scalars(page(run.metric))
            writer.add_text("configuration", indent(configuration(run), "    "), global_step=run.round)
            begin_session(writer, columns(run), run.metric, f"{run.method}, seed {run.seed}, {logger.log_dir}")

    def on_round_end(self, run: RunView) -> None:
        """Add the monitored metric, if it was evaluated."""
        for logger in boards(run):
            for tag, value in monitor(run).items():
                logger.experiment.add_scalar(tag, value, global_step=run.round)

    def on_fit_end(self, run: RunView) -> None:
        """Mark the run as finished."""
        from torch.utils.tensorboard.summary import hparams

        *_, end = hparams({}, {})
        for logger in boards(run):
            logger.experiment._get_file_writer().add_summary(end)


def monitor(run: RunView) -> dict[str, float]:
    """The last round's monitored metric on test data, the clients' quartiles and worst value, and the value that may be
    reported.
    """
    row, metric = run.history[-1], run.metric
    of_clients = f"after/test_{metric}"
    columns = {
        metric: run.monitored("test"),
        "q25": f"{of_clients}/q25",
        "q75": f"{of_clients}/q75",
        "worst": f"{of_clients}/{'min' if run.model.higher_is_better else 'max'}",
        "selected": f"selected/test_{metric}",
    }
    if run.monitored("test") not in row:
        return {}
    return {f"monitor/{name}": row[column] for name, column in columns.items() if column in row}


def page(metric: str) -> dict[str, dict[str, list[Any]]]:
    """The charts of CUSTOM SCALARS."""
    return {
        "monitor": {
            f"{metric}, and the middle half of the clients": ["Margin", [f"monitor/{metric}", "monitor/q25", "monitor/q75"]],
        },
        "clients": {"worst client": ["Multiline", ["monitor/worst"]]},  # a separate line: bands are drawn behind lines
        "training": {"loss of each phase": ["Multiline", ["^train/.*loss$"]]},
        "cost": {
            "bytes, all rounds so far": ["Multiline", ["traffic/total_bytes"]],
            "training FLOPs, all rounds so far": ["Multiline", ["compute/total_flops"]],
            "seconds of a round": ["Multiline", ["^seconds/(fit|evaluate|aggregate|server)$"]],
        },
    }


def configuration(run: RunView) -> str:
    """The command line's configuration without unset options, or else the hyperparameters."""
    file = run.folder / "config.yaml" if run.folder else None
    if file is None or not file.is_file():
        return yaml.safe_dump(hyperparameters(run), sort_keys=False)
    return "\n".join(line for line in file.read_text().splitlines() if not line.endswith(": null"))


def begin_session(writer: SummaryWriter, words: dict[str, Word], metric: str, name: str) -> None:
    """Add a row to the table of runs. Its metrics are the last values of scalars. Columns are numbered, because TensorBoard shows
    the first five in the order of their names.
    """
    from tensorboard.plugins.hparams import summary_v2 as api  # the API without TensorFlow

    numbered = {f"{place:02d} {name}": word for place, (name, word) in enumerate(words.items())}
    hparams = [api.HParam(key, display_name=name) for key, name in zip(numbered, words, strict=True)]
    tags = {
        "last": f"monitor/{metric}",
        "selected": "monitor/selected",
        "worst": "monitor/worst",
        "bytes": "traffic/total_bytes",
    }
    metrics = [api.Metric(tag, display_name=name) for name, tag in tags.items()]
    file = writer._get_file_writer()
    file.add_summary(api.hparams_config_pb(hparams, metrics))
    file.add_summary(api.hparams_pb(numbered, trial_id=name))
