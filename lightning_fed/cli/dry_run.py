"""Parsing configurations and building their objects, without a run."""

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from jsonargparse import ArgumentError

from lightning_fed.cli.fit import FederationCLI
from lightning_fed.cli.refusals import shorten
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.engines.silence import quieter
from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.settings import Settings, flat, read_json
from lightning_fed.system.signals import Preempted, Terminated

REPORTS = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel", "transformers.integrations.tensor_parallel")
"""Loggers of reports about a loaded network. The last two are only silent if the first one is, in some versions."""


LoadedData = dict[str, FederatedDataModule]
"""The data of one check, by their configuration."""


class ParseOnly(FederationCLI):
    """The command line of ``fit``, which stops after parsing its arguments."""

    def instantiate_classes(self) -> None: ...

    def _set_seed(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def read(name: str, args: Sequence[str]) -> Settings:
    """The configuration of a command line. Raises :class:`FederationError` with its name."""
    with errors_of(name):
        return flat(ParseOnly(args).dumped())


def check_start(
    name: str, args: Sequence[str], tuned: bool = False, played: Path | None = None, loaded: LoadedData | None = None
) -> Settings:
    """The configuration of a command line, after building its objects. Raises :class:`FederationError` with its name.

    Args:
        name: the run's name.
        args: the command line.
        tuned: the run tries a value, which needs validation data.
        played: folder of the finished run of this command line, whose data must be the same.
        loaded: data of the last check, which are used if this one's are configured alike, and replaced by them otherwise.
    """
    before = played and read_json(played / "run.json").get("data")
    known = {} if loaded is None else loaded

    def do(cli: FederationCLI) -> None:
        key = repr(cli.config_dump["data"])
        data = known.get(key, cli.datamodule)
        known.clear()  # data sets can be large
        known[key] = data
        cli.federation.dry_run(cli.model, data)
        if tuned and not any(client.num_val for client in data.clients):
            raise FederationError("tune chooses on validation data, of which no client has any: set the data's val_share.")
        if played and before != (now := data.fingerprint()):
            raise FederationError(
                f"It was run with other data (checksum {before}, now {now}): give the sweep another folder, or "
                f"remove {played.parent}."
            )

    with errors_of(name):
        settings = flat(FederationCLI(args, do).dumped())
        if tuned and settings.get("trainer.limit_val_batches") == 0:
            raise FederationError("tune chooses on validation data, of which trainer.limit_val_batches = 0 leaves none: remove it.")
        return settings


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """A context that adds a name to errors and suppresses other messages: the run itself prints them."""
    said = io.StringIO()
    try:
        with quieter(logging.ERROR, *REPORTS), contextlib.redirect_stderr(said):
            yield
    except FederationError as error:
        raise FederationError(f"{name}: {error}") from error
    except ArgumentError as error:
        raise FederationError(f"{name}: {shorten(str(error))}") from error
    except (Terminated, Preempted):  # not by the parser
        raise
    except SystemExit as error:  # the parser has printed one line, possibly after a traceback
        line = said.getvalue().strip().rpartition("\n")[2]
        raise FederationError(f"{name}: {line.removeprefix('lightning-fed: error: ')}") from error
    except Exception as error:
        error.add_note(f"In this run: {name}.")
        raise
