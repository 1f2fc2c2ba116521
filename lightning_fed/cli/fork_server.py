"""Imported by the process from which a sweep's runs are forked. It imports what they need, and starts no thread and asks for no
GPU, which forks could not share.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module

import matplotlib.backends.backend_agg  # noqa: F401 - a run with loggers imports this and the next ones later
import tensorboard.plugins.hparams.summary_v2  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
from PIL import Image

from lightning_fed.cli.checks import PREFIX
from lightning_fed.cli.dry_run import ParseOnly
from lightning_fed.experiments.configs import shipped
from lightning_fed.experiments.sweep.forks import named_libraries
from lightning_fed.system.children import forget_safe_path

# The parser reads signatures and docstrings of the common options, which takes half a second. Options in environment variables are
# left to the runs.
given = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIX)}
ParseOnly(["fit", "--config", str(shipped()["quickstart"])])
os.environ.update(given)

Image.preinit()  # imports the common formats

forget_safe_path()
gc.collect()
for name in named_libraries():
    with suppress(ImportError):
        import_module(name)

# Existing objects are excluded from garbage collection: a collection in a fork would write to all memory, and so copy it.
gc.freeze()
