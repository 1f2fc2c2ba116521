"""Messages of a run, line by line, as in a log."""

import logging
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

from torch import nn

from lightning_fed.callbacks.base import FederationCallback, RunView
from lightning_fed.callbacks.facts import binary_classes
from lightning_fed.formatting import counted
from lightning_fed.models.backbone import Wrapped
from lightning_fed.models.factory import name_of
from lightning_fed.privacy.mechanism import Mechanism
from lightning_fed.tensors import count_floats

log = logging.getLogger(__name__)


class StartLine(FederationCallback):
    """Prints the run's settings and folder as its first line, what yes is in a binary task, and the privacy settings, if any."""

    def on_fit_start(self, run: RunView) -> None:
        where = str(run.folder) if run.folder is not None else "a run that is not written"
        begun = f"Continuing {where} from round {run.round}" if run.round else f"Starting {where}"
        sampled = f", {run.cohort_size} per round" if run.cohort_size < len(run.clients) else ""
        clients = counted(len(run.clients), "client") + sampled
        what = f"{run.method} with {networks(run)} on {type(run.data).__name__}, {clients}, {counted(run.rounds, 'round')}"
        log.info(f"{begun}: {what}, {type(run.engine).__name__}, {counted(run.threads, 'thread')}.")
        if run.model.task.name == "binary":
            no, yes = binary_classes(run.data)
            log.info(f"Predicted is whether an example is {yes!r} (otherwise it is {no!r}).")
        if isinstance(privacy := run.server.privacy, Mechanism):
            log.info(privacy.forecast(count_floats(run.server.state), run.rounds))


class RoundLines(FederationCallback):
    """Prints a line per round and one at the end, without a terminal that shows a bar."""

    def __init__(self) -> None:
        self._start, self._first = 0.0, 0

    def on_fit_start(self, run: RunView) -> None:
        self._start, self._first = monotonic(), run.round

    def on_round_end(self, run: RunView) -> None:
        """Print the round's result and duration, and the expected remaining time."""
        row, spent = run.history[-1], monotonic() - self._start
        pace = spent / (run.round - self._first)
        losses = [value for name, value in row.items() if name.startswith("train/") and name.endswith("loss")]
        parts = [monitor(run)] if run.monitored("test") in row else []
        parts += [f"loss {losses[0]:.4f}"] if losses else []
        parts.append(f"{sum(value for name, value in row.items() if name.startswith('seconds/')):.1f} s")
        if run.round < run.rounds:
            parts.append(f"{timedelta(seconds=round(pace * (run.rounds - run.round)))} left")
        log.info(f"Round {run.round}/{run.rounds}: {', '.join(parts)}")

    def on_fit_end(self, run: RunView) -> None:
        log.info(f"Finished {counted(run.rounds, 'round')}: {monitor(run)}, {timedelta(seconds=round(monotonic() - self._start))}.")


def monitor(run: RunView) -> str:
    """The last round's monitored metric."""
    value = run.history[-1].get(run.monitored("test"))
    return f"{run.metric} {value:.4f}" if value is not None else f"{run.metric} not evaluated"


def networks(run: RunView) -> str:
    """Names of the clients' networks."""
    return ", ".join(dict.fromkeys(network_name(factory) for factory in run.model.networks.factories))


def network_name(factory: Callable[..., Any] | nn.Module | str) -> str:
    """The name of a network: its class, also if a configuration or ``functools.partial`` binds arguments to it, or if it is an
    object; or the last part of a dotted path.
    """
    if isinstance(factory, nn.Module):
        return name_of(factory)
    if isinstance(factory, str):
        return factory.rpartition(".")[2]
    parts = (factory, getattr(factory, "func", None), *getattr(factory, "args", ()))
    if Wrapped in parts and (network := getattr(factory, "keywords", {}).get("network")) is not None:
        return network_name(network)
    return next((part.__name__ for part in parts if isinstance(part, type)), getattr(factory, "__name__", "a network"))
