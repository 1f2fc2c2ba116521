"""Whether two states, or two runs, are the same, bit for bit."""

import torch

from lightning_fed.exchange import State
from lightning_fed.federation import Federation
from lightning_fed.measure.meters import Metrics
from lightning_fed.run import Run


def same(one: State, other: State) -> bool:
    """Equal names and equal bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def private_states(federation: Federation) -> dict[int, State]:
    """The private state of every client that has one."""
    return states_of(federation.run)


def states_of(run: Run) -> dict[int, State]:
    """The private state of every client that has one."""
    return {client.id: dict(run.store.get(client.id)) for client in run.clients if client.id in run.store}


def kept_states(federation: Federation) -> dict[int, State]:
    """What the server keeps for each client."""
    return {client: dict(federation.run.kept.get(client)) for client in federation.run.kept}


def assert_same(one: Federation, other: Federation) -> None:
    """Two runs found the same, bit for bit."""
    assert without_seconds(one.run.history) == without_seconds(other.run.history)
    assert same_end(one, other)


def same_end(one: Federation, other: Federation) -> bool:
    """Whether two runs ended alike, bit for bit: what was measured last, what the server has and keeps, and what clients keep."""
    pairs = [(states(one), states(other)) for states in (private_states, kept_states)]
    return (
        one.run.results == other.run.results
        and same(one.run.server.state_dict(), other.run.server.state_dict())
        and all(ours.keys() == theirs.keys() for ours, theirs in pairs)
        and all(same(ours[client], theirs[client]) for ours, theirs in pairs for client in ours)
    )


def without_seconds(history: list[Metrics]) -> list[Metrics]:
    """The part of the metrics that two runs have in common."""
    return [{name: value for name, value in row.items() if not name.startswith("seconds/")} for row in history]
