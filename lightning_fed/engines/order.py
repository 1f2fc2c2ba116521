"""Turns and what an engine makes of them, side by side."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.engines.base import Engine
from lightning_fed.errors import FederationError

log = logging.getLogger(__name__)

Receive = Callable[[Turn, ClientUpdate], ClientUpdate]
"""What is handed on of what a turn gave. Raises a :class:`FederationError` for what it should not have given."""


def run_turns(
    engine: Engine, turns: Iterable[Turn], receive: Receive | None = None, failure: str | None = None
) -> Iterator[tuple[Turn, ClientUpdate]]:
    """Turns and what comes of them, in their order, without those that were lost, of which a line is printed.

    Args:
        engine: where they run; it says what becomes of a turn whose update is refused.
        turns: what is to be done.
        receive: takes every update, or refuses it.
        failure: what to say, before the reason, where no turn may be lost; None: one goes on without it.

    Raises:
        FederationError: if the engine hands on something else than its contract says, or does not go on without a turn.
    """
    due: deque[Turn] = deque()
    waiting, name = iter(turns), type(engine).__name__

    def noted() -> Iterator[Turn]:
        for turn in waiting:
            due.append(turn)
            yield turn

    for result in engine.run(noted()):
        if not due or result.client != due[0].client.id:
            raise FederationError(
                f"{name} returned something of client {result.client}"
                + (f" when client {due[0].client.id}'s turn was due" if due else ", whose turn it was not")
                + ": an engine hands on what comes of turns in their order."
            )
        turn = due.popleft()
        if receive is not None and isinstance(result, ClientUpdate):
            try:
                result = receive(turn, result)
            except FederationError as error:
                result = engine.refused(turn, error)
        if isinstance(result, TurnFailure):
            if failure is not None:
                raise FederationError(f"{failure}: {result.reason}")
            log.warning(f"Round {turn.round}: the turn of client {result.client} was lost: {result.reason}")
        else:
            yield turn, result
    left = due[0] if due else next(waiting, None)
    if left is not None:
        raise FederationError(f"{name} did not carry out all turns of round {left.round}.")
