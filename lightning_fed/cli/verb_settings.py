"""The settings of a configuration on which a server and its sites must agree."""

import json
from zlib import crc32

from lightning_fed.cli.fit import FederationCLI
from lightning_fed.deployment.wire import VerbSettings, pack
from lightning_fed.engines.worker_spec import OF_RESULTS
from lightning_fed.experiments.sweep.settings import SEED, flat, within
from lightning_fed.storage.initial import initial_network

OF_DATA = ("num_classes", "class_names", "problem", "batch_size", "single_example", "continue_epochs", "augment", "mean", "std")
"""Settings of the data that must be the same everywhere, for any data."""


def verb_settings(cli: FederationCLI) -> VerbSettings:
    """The settings that must be the same everywhere, from a command line's objects."""
    given = flat(cli.dumped())
    blocks = ("model", SEED, "federation.compression", *(f"trainer.{name}" for name in OF_RESULTS))
    found = {key: value for key, value in given.items() if within(key, blocks)}
    # in the form of JSON
    found |= {f"data.{name}": json.loads(json.dumps(getattr(cli.datamodule, name), default=list)) for name in OF_DATA}
    if (path := cli.federation.init_from) is not None:
        network, _ = initial_network(path)
        found["federation.init_from"] = f"{crc32(pack({}, dict(sorted(network.items())))):08x}"
    return VerbSettings.of(found)
