"""Pairs turns with the results that an engine returns."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.engines.base import Engine
from lightning_fed.errors import FederationError

log = logging.getLogger(__name__)

Receive = Callable[[Turn, ClientUpdate], ClientUpdate]
"""Processes a turn's update before it is passed on. Raises a :class:`FederationError` for an update that is not acceptable."""


def run_turns(
    engine: Engine, turns: Iterable[Turn], receive: Receive | None = None, failure: str | None = None
) -> Iterator[tuple[Turn, ClientUpdate]]:
    """Run turns and yield them with their updates, in order. Failed turns are left out and reported in a line.

    Args:
        engine: runs the turns; it decides what happens to a turn whose update is refused.
        turns: the turns.
        receive: accepts or refuses each update.
        failure: message, before the reason, if no turn may fail. None: failed turns are left out.

    Raises:
        FederationError: if the engine breaks its contract, or does not continue without a turn.
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
                + (f" when client {due[0].client.id}'s turn was due" if due else ", which had no turn")
                + ": an engine returns the results of turns in their order."
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
        raise FederationError(f"{name} did not run all turns of round {left.round}.")
