"""Hyperparameters of a run, in short values that loggers can show in columns."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fed.callbacks.base import FederationCallback, RunView
from lightning_fed.callbacks.lines import networks
from lightning_fed.core.phase import Phase

Word = bool | int | float | str
"""Types that every logger accepts."""

TOLD_OTHERWISE = {"backbone", "num_classes", "task"}
"""Options of a method that are not listed separately."""


class Hyperparameters(FederationCallback):
    """Passes the hyperparameters to each logger before the first round, so that stopped runs have them, too. For TensorBoard, which
    has a table for them, see :class:`.TensorBoardPage`.
    """

    def on_fit_start(self, run: RunView) -> None:
        for logger in run.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(hyperparameters(run))


def hyperparameters(run: RunView) -> dict[str, Word]:
    """Method, seed, data, clients, networks, learning rates and the method's own options, by dotted names. With slashes, a name
    could be a folder of another one in loggers that write a file for each.
    """
    partition = run.data.partition
    found: dict[str, Any] = {
        **{"method": run.method, "seed": run.seed, "data": type(run.data).__name__},
        **dict(_words("partition", type(partition).__name__)),
        **dict(_words("partition", vars(partition))),
        **{"clients": len(run.clients), "cohort": run.cohort_size, "rounds": run.rounds, "networks": networks(run)},
    }
    for phase in (*run.model.phases(), *run.model.fine_tuning_phases()):
        found |= {f"{name}.{phase.name}": value for name, value in _phase_words(phase).items()}
    options = {name: value for name, value in run.model.hparams.items() if _is_own(name)}
    return found | dict(_words("model", options))


def columns(run: RunView) -> dict[str, Word]:
    """Hyperparameters in as few columns as fit on a screen, the same for every method: TensorBoard uses one run's columns for
    all.
    """
    words = hyperparameters(run)
    of_partition = {name.replace("partition.", ""): value for name, value in words.items() if name.startswith("partition.")}
    [first, *_] = [*run.model.phases(), None]
    return {
        **{name: words[name] for name in ("method", "seed")},
        "partition": _called(str(words["partition"]), of_partition),
        "networks": words["networks"],
        "lr": words.get(f"lr.{first.name}", 0.0) if first else 0.0,
        **{name: words[name] for name in ("data", "clients", "cohort", "rounds")},
        **{name: value for name, value in words.items() if name.startswith("partition.")},
        "phases": ", ".join(_called(phase.name, _phase_words(phase)) for phase in run.model.phases()),
        "options": ", ".join(f"{name[6:]}={value}" for name, value in words.items() if name.startswith("model.")),
    }


def _phase_words(phase: Phase) -> dict[str, Word]:
    """Length of a phase, and the non-zero numbers of its optimizer."""
    length: dict[str, Word] = {"epochs": phase.epochs} if phase.epochs is not None else {"steps": phase.steps or 0}
    defaults = phase.new_optimizer().defaults if phase.parameters else {}
    numbers = {name: value for name, value in defaults.items() if not isinstance(value, bool) and isinstance(value, int | float)}
    return {name: plain for name, value in (length | numbers).items() if (plain := _plain(value)) or name in length}


def _is_own(option: str) -> bool:
    return not option.startswith("_") and option not in TOLD_OTHERWISE and not option.endswith("optimizer")


def _words(name: str, value: Any) -> Iterator[tuple[str, Word]]:
    """Options under dotted names; a class by its name. Options that are not set are left out."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _words(name if key in ("class_path", "init_args") else f"{name}.{key}", entry)
    elif isinstance(value, list | tuple):
        yield name, ", ".join(str(_plain(entry)) for entry in value)
    elif value is not None:
        yield name, _plain(value)


def _plain(value: Any) -> Word:
    """A value without the types of the command line, which YAML would write as constructor calls."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    text = str(value)
    return text.rpartition(".")[2] if text.replace(".", "").isidentifier() else text


def _called(name: str, options: Mapping[str, Word]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})" if options else name
