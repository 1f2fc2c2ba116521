"""The interface of the transport between a server and sites."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A message or its answer that was lost in transport.

    Args:
        why: the reason, for messages.
        away: whether the site was offline; the message is then sent again when it is online.
    """

    why: str
    away: bool = False


class Link(ABC):
    """Transports messages to the sites of clients, and their answers back. It guarantees that an answer comes from the holder of
    the key that is registered for the client.
    """

    @abstractmethod
    def online(self) -> Collection[int]:
        """The clients whose sites are online."""

    @abstractmethod
    def send(self, client: int, message: bytes, seconds: float) -> str | Broken:
        """Send a message that expires after ``seconds``; returns an id to ask for the answer."""

    @abstractmethod
    def poll(self, message_id: str) -> bytes | Broken | None:
        """The answer, returned only once; None: not yet available."""
