"""Where turns run."""

from lightning_fed.engines.base import Engine
from lightning_fed.engines.in_process import InProcess
from lightning_fed.engines.processes import Processes

__all__ = ["Engine", "InProcess", "Processes"]
