"""Bitwise comparison of states and of runs, and lists of differences."""

from collections.abc import Callable, Collection, Sequence

import torch

from lightning_fed.callbacks import RunView
from lightning_fed.federation.federation import Federation
from lightning_fed.storage.manifest import Metrics
from lightning_fed.tensors import State

SHOWN = 5
"""Maximum number of differences that a message names."""


def same(one: State, other: State) -> bool:
    """Whether names and bits are equal."""
    return not unequal(one, other)


def unequal(one: State, other: State) -> list[str]:
    """Names of tensors that differ, or that only one of two states has."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or not torch.equal(one[name], other[name])]


def private_states(federation: Federation) -> dict[int, State]:
    """The private state of every client that has one."""
    return states_of(federation.run)


def states_of(run: RunView) -> dict[int, State]:
    """The private state of every client that has one."""
    return {client.id: dict(run.store.get(client.id)) for client in run.clients if client.id in run.store}


def server_client_states(federation: Federation) -> dict[int, State]:
    """What the server keeps for each client."""
    return {client: dict(federation.run.client_state.get(client)) for client in federation.run.client_state}


def assert_same(one: Federation, other: Federation) -> None:
    """Assert that two runs have the same results, bit for bit."""
    ours, theirs = without_seconds(one.run.history), without_seconds(other.run.history)
    assert len(ours) == len(theirs), f"One run has {len(ours)} rounds, the other {len(theirs)}."
    rows = zip(ours, theirs, strict=True)
    differing = [place for mine, its in rows for place in unequal_metrics(mine, its)] + unequal_ends(one, other)
    assert not differing, f"The runs differ in {listed(differing)}."


def unequal_ends(one: Federation, other: Federation) -> list[str]:
    """Differences of two runs at their end, bit for bit: last metrics, the server's states, the clients' states."""
    differing = [f"{name} of the server" for name in unequal(one.run.server.state_dict(), other.run.server.state_dict())]
    differing += [
        f"{name} of privacy" for name in unequal(one.run.server.privacy.state_dict(), other.run.server.privacy.state_dict())
    ]
    kinds: list[tuple[str, Callable[[Federation], dict[int, State]]]] = [
        ("{} of client {}", private_states),
        ("{} that the server keeps for client {}", server_client_states),
    ]
    for said, states in kinds:
        ours, theirs = states(one), states(other)
        differing += [said.format("all", client) for client in sorted(ours.keys() ^ theirs.keys())]
        both = sorted(ours.keys() & theirs.keys())
        differing += [said.format(name, client) for client in both for name in unequal(ours[client], theirs[client])]
    if one.run.results != other.run.results:
        clients = sorted(one.run.results.keys() | other.run.results.keys())
        measured = [client for client in clients if one.run.results.get(client) != other.run.results.get(client)]
        differing.append(f"what was measured of client {listed(measured)}")
    return differing


def unequal_metrics(one: Metrics, other: Metrics, names: Collection[str] | None = None) -> list[str]:
    """The metrics in which two rows of one round differ.

    Args:
        one: a row.
        other: another row.
        names: names of the metrics to compare. None: all.
    """
    counted = sorted(one.keys() | other.keys()) if names is None else names
    return [f"{name} in round {one['round']:.0f}" for name in counted if one.get(name) != other.get(name)]


def without_seconds(history: list[Metrics]) -> list[Metrics]:
    """The metrics without times, which differ between equal runs."""
    return [{name: value for name, value in row.items() if not name.startswith("seconds/")} for row in history]


def listed(places: Sequence[object]) -> str:
    """The first entries, and the number of others."""
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return ", ".join(map(str, places[:SHOWN])) + more
