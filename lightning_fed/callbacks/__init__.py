"""Callbacks that report on a run."""

from lightning_fed.callbacks.adapter_ranks import AdapterRanks
from lightning_fed.callbacks.base import FederationCallback, RunView
from lightning_fed.callbacks.board import TensorBoardPage
from lightning_fed.callbacks.facts import RunFacts
from lightning_fed.callbacks.hyperparameters import Hyperparameters
from lightning_fed.callbacks.lines import RoundLines, StartLine
from lightning_fed.callbacks.progress import ProgressBar, Summary
from lightning_fed.callbacks.table import CrossTable, MetricsTable
from lightning_fed.callbacks.tensorboard import TensorBoardFigures

__all__ = [
    "AdapterRanks",
    "CrossTable",
    "FederationCallback",
    "Hyperparameters",
    "MetricsTable",
    "ProgressBar",
    "RoundLines",
    "RunFacts",
    "RunView",
    "StartLine",
    "Summary",
    "TensorBoardFigures",
    "TensorBoardPage",
]
