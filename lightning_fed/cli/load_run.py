"""Opening a run of the command line in Python, without the code that made it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_fed.cli.dry_run import errors_of
from lightning_fed.cli.fit import FederationCLI
from lightning_fed.core.module import FederatedModule
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.federation.run import Run
from lightning_fed.seeding import isolated
from lightning_fed.storage.run_folder import run_folder_of
from lightning_fed.system.folders import from_home

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LoadedRun:
    """Results and models of a run. Tables need pandas: ``pip install "lightning-fed[report]"``."""

    folder: Path
    federation: Federation

    @property
    def run(self) -> Run:
        """The run at the checkpoint: ``server``, ``clients``, ``model``, ``data`` and more."""
        return self.federation.run

    @cached_property
    def history(self) -> "pd.DataFrame":
        """The columns of ``metrics.csv``, a row per round."""
        return _table(self.folder / "metrics.csv").set_index("round")

    @cached_property
    def clients(self) -> "pd.DataFrame":
        """The columns of ``clients.csv``: each client's evaluation metrics, with their rounds."""
        return _table(self.folder / "clients.csv")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The whole configuration, as in ``config.yaml``."""
        settings: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text())
        return settings

    def client_module(self, client: int) -> FederatedModule:
        """A client's model for use outside the federation, with the server's broadcast loaded, fine-tuned if it is evaluated so."""
        return self.federation.client_module(client)

    def server_module(self) -> FederatedModule:
        """The server's shared part, which may be a whole model; the rest has its initial weights."""
        return self.federation.server_module()


def load_run(path: Path | str) -> LoadedRun:
    """Open a run of the command line. For a run of a Python script use :meth:`.Federation.load`, with its objects.

    Relative paths in its configuration refer to the current folder.

    Args:
        path: the folder of a run, for its last round; of a run and ``/best``, for its best one on validation data; or of one
            checkpoint.

    Raises:
        FederationError: if there is no such run, or it has no checkpoint (``keep: none``).
    """
    folder = run_folder_of(from_home(path))
    config = folder / "config.yaml"
    if not config.is_file():
        raise FederationError(
            f"{folder} has no config.yaml: it was run from Python. Create its Federation, module and data as then, and call "
            "federation.load(module, data, ckpt_path)."
        )
    with errors_of(str(config)), isolated():  # Lightning's command line seeds the global generators
        cli = FederationCLI(["test", "--config", str(config)], lambda cli: None)
    cli.federation.load(cli.model, cli.datamodule, path)
    return LoadedRun(folder, cli.federation)


def _table(path: Path) -> "pd.DataFrame":
    try:
        import pandas as pd
    except ModuleNotFoundError as missing:
        raise FederationError("A run's tables need pandas: pip install 'lightning-fed[report]'.") from missing
    from lightning_fed.experiments.report.files import AS_WRITTEN

    return pd.read_csv(path, **AS_WRITTEN)
