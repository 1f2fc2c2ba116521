"""A worker in a process of Ray's, on whatever node."""

import os
import warnings
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.messages import Broadcast
from lightning_fed.engines.malloc import retained_memory
from lightning_fed.engines.packing import Packed, unpack
from lightning_fed.engines.ray.cluster import the_package
from lightning_fed.engines.remote_worker import RemoteWorker
from lightning_fed.engines.silence import quiet_lightning


class CopiedBuffer:
    """Bytes that Ray carries beside a message. They arrive as a copy, so that Ray can forget them at once."""

    def __init__(self, size: int) -> None:
        self.bytes: Tensor = torch.empty(size, dtype=torch.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.arrived, (self.bytes.numpy(),)

    @classmethod
    def arrived(cls, array: np.ndarray) -> "CopiedBuffer":
        """What has arrived."""
        carried = cls(len(array))
        carried.bytes.numpy()[:] = array  # PyTorch's memory is aligned as its own always is
        return carried


class SharedBuffer(CopiedBuffer):
    """Bytes that stay where Ray has them, once on each machine, as long as there are tensors of them."""

    @classmethod
    def arrived(cls, array: np.ndarray) -> "SharedBuffer":
        carried = cls(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that PyTorch knows no memory that must not be written to
            carried.bytes = torch.from_numpy(array)
        return carried


class RayWorker:
    """Carries out turns.

    Args:
        ordered: the spec, and the settings of PyTorch that the process is to have.
    """

    def __init__(self, ordered: Any) -> None:
        self._ray = the_package()
        if not self._ray.get_gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a worker has the GPUs that it was given, and no other
        spec, torch_settings = self._ray.get(ordered)
        torch_settings.set()
        self._quiet = ExitStack()
        self._quiet.enter_context(quiet_lightning())
        self._quiet.enter_context(retained_memory())
        self._worker = RemoteWorker(spec, allocate=CopiedBuffer)
        self._broadcast = 0, Broadcast({})

    def answer(self, turn: Packed, number: int, broadcast: Any) -> Packed | Exception:
        """Carry out a turn.

        Args:
            turn: without its broadcast; and the client's private state.
            number: of the broadcast. One that is here already is not fetched again.
            broadcast: where Ray has it.
        """
        if number != self._broadcast[0]:
            self._broadcast = number, unpack(self._ray.get(broadcast))
        return self._worker.answer(turn, self._broadcast[1])


def new_actor() -> type[Any]:
    """The class of which Ray makes actors. As it is local to this function, Ray sends its code along, and nothing of ours or of
    PyTorch's is imported on a node before versions have been compared. Types in signatures would be; so there are none of ours.
    """

    class Actor:
        def __init__(self) -> None:
            self.worker: Any = None

        def versions(self) -> tuple[str, dict[str, str | None]]:
            """The node's address, and what is installed there; None: nothing."""
            import platform
            from importlib.metadata import PackageNotFoundError, version

            import ray

            found: dict[str, str | None] = {"Python": platform.python_version()}
            for package in ("torch", "lightning"):
                try:
                    found[package] = version(package).partition("+")[0]  # what stands behind is for which GPUs it is
                except PackageNotFoundError:
                    found[package] = None
            try:
                from lightning_fed import __version__

                found["lightning-fed"] = __version__
            except ImportError:
                found["lightning-fed"] = None
            return ray.util.get_node_ip_address(), found

        def start(self, expected: dict[str, str | None], ordered: list[Any]) -> str | None:
            """Make a worker, if the versions are those expected; the node's id."""
            if self.versions()[1] != expected:
                return None
            import ray

            from lightning_fed.engines.ray.worker import RayWorker

            self.worker = RayWorker(ordered[0])
            return ray.get_runtime_context().get_node_id()

        def take(self, turn: Any, number: int, broadcast: list[Any]) -> Any:
            """Carry out a turn. Lists keep Ray from fetching what is in them."""
            return self.worker.answer(turn, number, broadcast[0])

    return Actor
