"""What a server and its sites read out of the same configuration."""

import json
from zlib import crc32

from lightning_fed.cli.fit import FederationCLI
from lightning_fed.deployment.wire import VerbSettings, pack
from lightning_fed.experiments.sweep.settings import SEED, flat, within
from lightning_fed.storage.initial import initial_network

OF_DATA = ("num_classes", "class_names", "problem", "batch_size", "single_example", "continue_epochs", "augment", "mean", "std")
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


def verb_settings(cli: FederationCLI) -> VerbSettings:
    """What must be the same everywhere, of what a command line has built."""
    given = flat(cli.dumped())
    blocks = ("model", SEED, "federation.compression", *(f"trainer.{name}" for name in OF_TRAINER))
    found = {key: value for key, value in given.items() if within(key, blocks)}
    # as JSON has them
    found |= {f"data.{name}": json.loads(json.dumps(getattr(cli.datamodule, name), default=list)) for name in OF_DATA}
    if (path := cli.federation.init_from) is not None:
        network, _ = initial_network(path)
        found["federation.init_from"] = f"{crc32(pack({}, dict(sorted(network.items())))):08x}"
    return VerbSettings.of(found)
