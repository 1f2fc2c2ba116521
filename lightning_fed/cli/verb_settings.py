"""What a server and its sites read out of the same configuration."""

import json
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from lightning_fed.cli.fit import FederationCLI
from lightning_fed.deployment.wire import VerbSettings, pack
from lightning_fed.experiments.sweep.settings import SEED, flat, within
from lightning_fed.federation.federation import Federation
from lightning_fed.storage.initial import initial_network

OF_DATA = ("num_classes", "class_names", "problem", "batch_size", "single_example", "augment", "mean", "std")
"""What of the data must be the same everywhere, whatever data they are."""

OF_TRAINER = (
    "precision",
    "max_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "overfit_batches",
    "fast_dev_run",
)
"""What of the Trainer decides what is computed, and not where."""


class VerbCLI(FederationCLI):
    """The command line of ``fit``, with whose objects something else is done.

    Args:
        args: options of ``fit``.
        do: what is done, given this.
    """

    def __init__(self, args: Sequence[str], do: Callable[["VerbCLI"], None]) -> None:
        self._do = do
        super().__init__(["fit", *args])

    def _run_subcommand(self, subcommand: str) -> None:
        self._do(self)

    @property
    def federation(self) -> Federation:
        """The federation, which takes the Trainer's place."""
        federation: Any = self.trainer
        return federation

    @property
    def settings(self) -> VerbSettings:
        """What must be the same everywhere."""
        given = flat(self.dumped())
        blocks = ("model", SEED, *(f"trainer.{name}" for name in OF_TRAINER))
        found = {key: value for key, value in given.items() if within(key, blocks)}
        found |= {f"data.{name}": plainly(getattr(self.datamodule, name)) for name in OF_DATA}
        if (path := self.federation.init_from) is not None:
            network, _ = initial_network(path)
            found["federation.init_from"] = f"{crc32(pack({}, dict(sorted(network.items())))):08x}"
        return VerbSettings.of(found)


def plainly(value: Any) -> Any:
    """A value of a data module as JSON has it."""
    return json.loads(json.dumps(value, default=list))
