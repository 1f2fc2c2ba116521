"""Facts about a run that are needed to read its tables."""

import json
from collections.abc import Sequence
from typing import Any

from lightning_fed.callbacks.base import FederationCallback, RunView
from lightning_fed.core.phase import Phase
from lightning_fed.data import FederatedDataModule
from lightning_fed.system.disk import write_synced


class RunFacts(FederationCallback):
    """Writes ``run.json``: method, the seeds of the run and of its partition, the checksum of its data and their division among
    clients, their number, whether clients are those of the data whatever the seed, rounds, the column of ``metrics.csv`` with
    the monitored metric, whether larger values of it are better, the metrics of which smaller values are better, the class that
    is yes in a ``binary`` task, a client's work in a round: its phases in order, each with its epochs or steps, the phases of its
    fine-tuning; and whether the run is finished.

    Phases are those of a generic client; if clients differ in model_size, of the largest.
    """

    def on_fit_start(self, run: RunView) -> None:
        """Write the file; a continued run replaces it."""
        self._write(run, finished=False)

    def on_fit_end(self, run: RunView) -> None:
        """Write the file again, with the final number of rounds."""
        self._write(run, finished=True)

    @staticmethod
    def _write(run: RunView, finished: bool) -> None:
        if run.folder is None:
            return
        model, data = run.model, run.data
        known = model.test_metrics.items(keep_base=True, copy_state=False)
        facts = {
            "method": run.method,
            "seed": int(run.seed),
            "partition_seed": int(data.partition_seed),
            "data": run.identity["data"],
            "clients": len(run.clients),
            "natural_clients": not data.at_hand or (data.partition.is_natural and data.given_num_clients is None),
            "rounds": int(run.rounds),
            "evaluate_every": int(run.evaluate_every),
            "monitor": run.monitored("test"),
            "higher_is_better": model.higher_is_better,
            "lower_is_better": sorted(name for name, metric in known if metric.higher_is_better is False),
            **({"positive_class": binary_classes(data)[1]} if model.task.name == "binary" else {}),
            "training": lengths(model.phases()),
            "fine_tuning": lengths(model.fine_tuning_phases()),
            "fine_tuning_when": model.fine_tuning.when,
            "finished": finished,
        }
        path, aside = run.folder / "run.json", run.folder / ".run.json"  # the same each time: leftovers of a kill are replaced
        write_synced(aside, f"{json.dumps(facts, indent=1)}\n".encode(), becomes=path)
        aside.replace(path)


def binary_classes(data: FederatedDataModule) -> list[str]:
    """The names of no and of yes: those of the classes 0 and 1."""
    return [*map(str, data.class_names or (0, 1))]


def lengths(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Names and lengths of phases."""
    spans = [(one.name, "steps", one.steps) if one.epochs is None else (one.name, "epochs", one.epochs) for one in phases]
    return [{"phase": name, unit: int(length or 0)} for name, unit, length in spans]
