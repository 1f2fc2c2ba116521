"""A site in a process of its own, as ``lightning-fed join`` would be."""

import os
import sys

import lightning_fed.cli.verb_settings
import lightning_fed.deployment.flower.node
import lightning_fed.deployment.site  # noqa: F401 - imported once, for all sites
from lightning_fed.__main__ import main


def station(args: list[str], folder: str, output: str) -> None:
    """Run a command in a folder, and print to a file there."""
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.argv = ["lightning-fed", *args]
    main(args)
