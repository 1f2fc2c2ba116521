"""The rank that a launcher such as srun or torchrun gives to each process that it starts."""

import os

VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables that Lightning, when it is imported, reads its rank from: the first one that is set."""


def forget_rank() -> None:
    """Make this process, and those that it starts, rank 0 for Lightning."""
    for name in VARIABLES:
        os.environ.pop(name, None)


def rank_variable() -> str:
    """The variable that gives this process its rank, as `` (NAME=VALUE)``; empty if there is none."""
    return next((f" ({name}={os.environ[name]})" for name in VARIABLES if name in os.environ), "")
