"""Cyclic: one client in a round, which trains what the one before sent."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tiny import CLASSES, Net, Recording, new_data, new_federation, same, sgd
from tiny_rounds import AfterRounds

from lightning_fed.core import Broadcast
from lightning_fed.core.messages import Turn
from lightning_fed.methods import Cyclic
from lightning_fed.tensors import State

Played = list[tuple[int, State]]
"""Of each round who took part, and the server's model after it."""


def play(rounds: int, seed: int = 0, **options: Any) -> tuple[Played, Any]:
    engine, states = Recording(), []
    note = AfterRounds(lambda run: states.append(run.server.state))
    federation = new_federation(rounds, engine=engine, callbacks=[note], participation=0.5, evaluate_every=0, seed=seed)
    federation.fit(Cyclic(Net, CLASSES, optimizer=sgd, steps=2, **options), new_data(3, 120))
    return list(zip([update.client for update in engine.trained], states, strict=True)), federation


@pytest.mark.parametrize("seed", [0, 42])
def test_each_client_has_one_turn_in_a_cycle(seed: int) -> None:
    stream = np.random.default_rng(seed)
    expected = [*stream.permutation(3), *stream.permutation(3)]
    assert [client for client, _ in play(5, seed)[0]] == expected[:5]
    assert [client for client, _ in play(4, seed, order="fixed")[0]] == [0, 1, 2, 0]


def turn(federation: Any, client: int, round: int, state: State) -> State:
    """What a client makes of a model."""
    run = federation.run
    update = run.local.run_turn(Turn("fit", run.clients[client], round, Broadcast(state)), None).update
    return dict(update.state)


@pytest.mark.parametrize("hand_on", [True, False])
def test_a_model_is_handed_on_or_the_first_clients_alone(hand_on: bool) -> None:
    played, federation = play(4, order="fixed", hand_on=hand_on)
    for round, ((_, before), (client, after)) in enumerate(pairwise(played), start=2):
        if hand_on or client == 0:
            assert same(after, turn(federation, client, round, before))
        else:
            assert same(after, before)
    assert not same(played[-1][1], played[-2][1])
