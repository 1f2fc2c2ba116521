"""The command line of ``join``, as far as it needs torch."""

import logging
import tempfile
from pathlib import Path

from lightning_fed.cli.study import StudyCLI
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import IID
from lightning_fed.deployment.flower import commands
from lightning_fed.deployment.flower.node import answer_all
from lightning_fed.deployment.site import OneClient, Site
from lightning_fed.engines import InProcess
from lightning_fed.engines.recipe import Recipe
from lightning_fed.signals import stopped_by_signals
from lightning_fed.storage.export.folder import refuse_others, write

log = logging.getLogger(__name__)


class Staying(StudyCLI):
    """Builds what ``fit`` would, for one client, and answers a server's messages."""

    def _run_subcommand(self, subcommand: str) -> None:
        client, data = self.given.client, self.datamodule
        if self.given.output:
            refuse_others(self.given.output)
        if not self.given.partitioned:
            data.asked_clients, data.partition = 1, IID()  # all that is here is this client's
        self.federation.engine = InProcess(self.given.threads)
        with stopped_by_signals(), self.federation._surroundings():
            own = OneClient(data, client if self.given.partitioned else 0, client)
            model = self.federation._started(self.model, own)
            info = own.client(client).info
            log.info(f"Client {client}: {info.num_train} training, {info.num_val} validation, {info.num_test} test examples")
            folder = (self.given.folder or Path(f"site-{client}")).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            recipe = Recipe(model, own, self.federation.new_trainer, self.federation.seed)
            keep = self._export if self.given.output else None
            site = Site(recipe, client, self.study, folder / "states", keep)
            answer_all(site, self._supernode, folder, self.given.socket, self.given.without_supernode)

    def _supernode(self, path: Path) -> list[str]:
        given = self.given
        port = commands.SUPERNODE_PORT if given.without_supernode else commands.free_port()
        return commands.supernode(given.server, given.key.absolute(), given.root_certificates.absolute(), path, port)

    def _export(self, module: FederatedModule, round: int) -> None:
        """Replace the exported model, whole files and nothing else. Last comes ``config.json``, without which it is none."""
        facts = {"method": type(module).__name__, "round": round, "client": self.given.client, "seed": self.federation.seed}
        output = self.given.output
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=output) as aside:
            write(Path(aside), module, self.datamodule, facts)
            config = output / "config.json"
            config.unlink(missing_ok=True)
            for path in sorted(
                (path for path in Path(aside).rglob("*") if path.is_file()), key=lambda path: path.name == config.name
            ):
                place = output / path.relative_to(aside)
                place.parent.mkdir(exist_ok=True)
                path.replace(place)
