"""What is sent to many is made ready for sending once."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from lightning_fed.core.messages import Broadcast

Sent = TypeVar("Sent")


class Broadcasts(Generic[Sent]):
    """Broadcasts as they are sent. The last few are kept, with their tensors, so that no id of a tensor is used twice.

    Args:
        ready: makes a broadcast ready for sending.
    """

    def __init__(self, ready: Callable[[Broadcast], Sent]) -> None:
        self._ready = ready
        self._sent: OrderedDict[tuple[Any, ...], tuple[Broadcast, Sent]] = OrderedDict()

    def sent(self, broadcast: Broadcast, keep: int) -> Sent:
        """A broadcast as it is sent: the same for the same tensors.

        Args:
            broadcast: what a turn comes with.
            keep: how many are kept.
        """
        tensors = {**broadcast.state, **{f"{name} ": tensor for name, tensor in broadcast.statistics.items()}}
        key = (broadcast.model_size, *((name, id(tensor)) for name, tensor in tensors.items()))
        if key not in self._sent:
            self._sent[key] = broadcast, self._ready(broadcast)
            while len(self._sent) > keep:
                self._sent.popitem(last=False)
        self._sent.move_to_end(key)
        return self._sent[key][1]

    def clear(self) -> None:
        """Let go of all of them."""
        self._sent.clear()
