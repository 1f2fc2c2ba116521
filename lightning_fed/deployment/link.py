"""What carries messages between a server and sites."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A message, or its answer, came to nothing on the way.

    Args:
        why: for people.
        away: whether the site was not there: the message then goes out again when it is.
    """

    why: str
    away: bool = False


class Link(ABC):
    """Carries messages to the sites of clients, and their answers back. It vouches for who answers: nobody else than whose key is
    registered for the client.
    """

    @abstractmethod
    def online(self) -> Collection[int]:
        """The clients whose sites are there now."""

    @abstractmethod
    def send(self, client: int, message: bytes, seconds: float) -> str | Broken:
        """Send a message, which is of use for so long; returns an id, under which to ask for the answer."""

    @abstractmethod
    def poll(self, message_id: str) -> bytes | Broken | None:
        """The answer, handed out once; None: not yet."""
