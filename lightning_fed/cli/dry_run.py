"""Configurations parsed and their objects built, without a run."""

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence

from jsonargparse import ArgumentError

from lightning_fed.cli.fit import FederationCLI
from lightning_fed.cli.refusals import shorten
from lightning_fed.engines.silence import quieter
from lightning_fed.errors import FederationError
from lightning_fed.experiments.sweep.settings import Settings, flat

REPORTS = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel", "transformers.integrations.tensor_parallel")
"""Who reports on a network that was loaded. The last two, in whichever version, only do when the first is told to be quiet."""


class ParseOnly(FederationCLI):
    """The command line of ``fit``, which stops when it has parsed its arguments."""

    def instantiate_classes(self) -> None: ...

    def _set_seed(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def read(name: str, args: Sequence[str]) -> Settings:
    """The configuration that a command line gives. Raises :class:`FederationError` with the name of whose it is."""
    with errors_of(name):
        return flat(ParseOnly(args).dumped())


def check_start(name: str, args: Sequence[str]) -> Settings:
    """The same, and all that it describes is built. Raises :class:`FederationError` with the name of whose it is."""
    with errors_of(name):
        return flat(FederationCLI(args, lambda cli: cli.federation.dry_run(cli.model, cli.datamodule)).dumped())


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Say of whatever is wrong whose it is, and nothing else: what pretrained files lack, say, the run itself says."""
    said = io.StringIO()
    try:
        with quieter(logging.ERROR, *REPORTS), contextlib.redirect_stderr(said):
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
