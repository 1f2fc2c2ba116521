"""The command line of ``serve``, as far as it needs torch."""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from lightning_fed.cli.study import StudyCLI
from lightning_fed.deployment.data import DataAtSites
from lightning_fed.deployment.engine import Sites
from lightning_fed.deployment.flower.link import linked
from lightning_fed.storage.export.folder import refuse_others, write


class Leading(StudyCLI):
    """``fit`` with turns at sites.

    Args:
        args: options of ``fit``.
        given: options of ``serve``.
        keys: the sites' public keys, in order of their clients.
    """

    def __init__(self, args: Sequence[str], given: Namespace, keys: Sequence[Path]) -> None:
        self.keys = keys
        super().__init__(list(args), given)

    def _run_subcommand(self, subcommand: str) -> None:
        if self.given.output:
            refuse_others(self.given.output)
        data = DataAtSites(self.datamodule)
        data.refuse_what_needs_them(self.model)
        kwargs = self._prepare_subcommand_kwargs(subcommand) | {"datamodule": data}
        study = self.study
        with tempfile.TemporaryDirectory() as scratch:
            home = (self.federation.run_dir or Path(scratch)) / "flower"
            with linked(self.given.certificates, self.keys, self.given.host, self.given.port, home) as link:
                waits = {name: getattr(self.given, name) for name in ("wait", "deadline", "quorum")}
                self.federation.engine = Sites(link, len(self.keys), study, **waits)
                self.federation.fit(**kwargs)
        if self.given.output:
            run = self.federation.run
            facts = {"method": run.method, "round": run.round, "client": None, "seed": run.seed}
            write(self.given.output, run.server_module(), data, facts)
