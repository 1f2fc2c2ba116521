"""Engines, which run turns."""

from lightning_fed.engines.base import Engine
from lightning_fed.engines.in_process import InProcess
from lightning_fed.engines.processes import Processes
from lightning_fed.engines.ray.engine import Ray

__all__ = ["Engine", "InProcess", "Processes", "Ray"]
