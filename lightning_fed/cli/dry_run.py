"""Configurations parsed and their objects built, without a run."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jsonargparse import ArgumentError

from lightning_fed.cli.fit import FederationCLI
from lightning_fed.cli.refusals import shorten
from lightning_fed.engines.silence import quiet_lightning, quieter
from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.settings import Settings, flat

REPORTS = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel", "transformers.integrations.tensor_parallel")
"""Who reports on a network that was loaded. The last two, in whichever version, only do when the first is told to be quiet."""


class DryRun(FederationCLI):
    """The command line of ``fit``, which stops before the first client is trained."""

    def _run_subcommand(self, subcommand: str) -> None:
        federation: Any = self.trainer
        federation.dry_run(self.model, self.datamodule)

    @property
    def settings(self) -> Settings:
        """The whole configuration, defaults included."""
        return flat(self.dumped())


class ParseOnly(DryRun):
    """The command line of ``fit``, which stops when it has parsed its arguments."""

    def instantiate_classes(self) -> None:
        """Build nothing."""

    def _set_seed(self) -> None:
        """Nothing is drawn."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""


def read(name: str, args: Sequence[str]) -> Settings:
    """The configuration that a command line gives. Raises :class:`FederationError` with the name of whose it is."""
    with errors_of(name):
        return ParseOnly(args).settings


def check_start(name: str, args: Sequence[str]) -> Settings:
    """The same, and all that it describes is built. Raises :class:`FederationError` with the name of whose it is."""
    with errors_of(name):
        return DryRun(args).settings


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Say of whatever is wrong whose it is, and nothing else: what pretrained files lack, say, the run itself says."""
    said = io.StringIO()
    quiet_transformers = quieter(logging.ERROR, *REPORTS)
    try:
        with quiet_lightning(), quiet_transformers, warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.filterwarnings("ignore", "LightningCLI's args parameter")
            yield
    except FederationError as error:
        raise FederationError(f"{name}: {error}") from error
    except ArgumentError as error:
        raise FederationError(f"{name}: {shorten(str(error))}") from error
    except SystemExit as error:  # the parser has printed one line, perhaps below a traceback
        line = said.getvalue().strip().rpartition("\n")[2]
        raise FederationError(f"{name}: {line.removeprefix('lightning-fed: error: ')}") from error
    except Exception as error:
        error.add_note(f"In this run: {name}.")
        raise
