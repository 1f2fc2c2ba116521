"""A worker in a Ray process, on any node."""

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
    """Bytes that Ray sends along with a message. The receiver copies them, so that Ray can free them at once."""

    def __init__(self, size: int) -> None:
        self.bytes: Tensor = torch.empty(size, dtype=torch.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.arrived, (self.bytes.numpy(),)

    @classmethod
    def arrived(cls, array: np.ndarray) -> "CopiedBuffer":
        """A buffer with the received bytes."""
        carried = cls(len(array))
        carried.bytes.numpy()[:] = array  # a copy in PyTorch's memory is aligned
        return carried


class SharedBuffer(CopiedBuffer):
    """Bytes that stay in Ray's store, once on each machine, as long as tensors use them."""

    @classmethod
    def arrived(cls, array: np.ndarray) -> "SharedBuffer":
        carried = cls(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that it does not support read-only memory
            carried.bytes = torch.from_numpy(array)
        return carried


class RayWorker:
    """Runs turns.

    Args:
        ordered: the spec, and the PyTorch settings for the process.
    """

    def __init__(self, ordered: Any) -> None:
        self._ray = the_package()
        if not self._ray.get_gpu_ids():
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a worker only uses GPUs that it was assigned
        spec, torch_settings = self._ray.get(ordered)
        torch_settings.set()
        self._quiet = ExitStack()
        self._quiet.enter_context(quiet_lightning())
        self._quiet.enter_context(retained_memory())
        self._worker = RemoteWorker(spec, allocate=CopiedBuffer)
        self._broadcast = 0, Broadcast({})

    def answer(self, turn: Packed, number: int, broadcast: Any) -> Packed | Exception:
        """Run a turn.

        Args:
            turn: the turn without its broadcast, and the client's private state.
            number: number of the broadcast; the same one is not fetched again.
            broadcast: Ray's reference to the broadcast.
        """
        if number != self._broadcast[0]:
            self._broadcast = number, unpack(self._ray.get(broadcast))
        return self._worker.answer(turn, self._broadcast[1])


def new_actor() -> type[Any]:
    """The class of the actors. As it is local to this function, Ray sends its code, and a node imports nothing of this package or
    PyTorch before versions are compared. Types in signatures would be imported, so it uses none.
    """

    class Actor:
        def __init__(self) -> None:
            self.worker: Any = None

        def versions(self) -> tuple[str, dict[str, str | None]]:
            """The node's address, and the installed versions; None: not installed."""
            import platform
            from importlib.metadata import PackageNotFoundError, version

            import ray

            found: dict[str, str | None] = {"Python": platform.python_version()}
            for package in ("torch", "lightning"):
                try:
                    found[package] = version(package).partition("+")[0]  # the local part names the GPU platform
                except PackageNotFoundError:
                    found[package] = None
            try:
                from lightning_fed import __version__

                found["lightning-fed"] = __version__
            except ImportError:
                found["lightning-fed"] = None
            return ray.util.get_node_ip_address(), found

        def start(self, expected: dict[str, str | None], ordered: list[Any]) -> str | None:
            """Create a worker if the versions match; returns the node's id."""
            if self.versions()[1] != expected:
                return None
            import ray

            from lightning_fed.engines.ray.worker import RayWorker

            self.worker = RayWorker(ordered[0])
            return ray.get_runtime_context().get_node_id()

        def take(self, turn: Any, number: int, broadcast: list[Any]) -> Any:
            """Run a turn. Lists keep Ray from fetching their contents."""
            return self.worker.answer(turn, number, broadcast[0])

    return Actor
