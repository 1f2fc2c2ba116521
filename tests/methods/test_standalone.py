"""Standalone: nobody learns of anybody."""

from dataclasses import dataclass

import numpy as np
import torch
from tiny import CLASSES, Net, WideNet, momentum, new_data, same
from tiny_loops import fixed
from tiny_rounds import fit

from lightning_fed.data import Partitioner
from lightning_fed.data.partition.pools import Indices
from lightning_fed.methods import FedAvg, Standalone


def test_nothing_is_sent() -> None:
    federation = fit(Standalone([Net, WideNet], CLASSES), rounds=2)
    assert all(value == 0 for name, value in federation.run.history[-1].items() if name.startswith("traffic/"))
    assert federation.run.server.state_dict() == {}
    assert not federation.client_module(0).shared_state()


def test_one_client_of_fedavg_is_standalone_bit_for_bit() -> None:
    one, other = (fit(method(fixed(Net), CLASSES, momentum), new_data(1), rounds=2) for method in (Standalone, FedAvg))
    assert same(one.run.store.get(0), other.run.server.state_dict())
    assert one.run.results == other.run.results


@dataclass(frozen=True)
class Blocks(Partitioner):
    """Client 0 holds the first 40 examples, the others share the rest."""

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        rest = np.arange(40, sum(map(len, members)))
        return [np.arange(40), *(np.array_split(rest, num_clients - 1) if num_clients > 1 else [])]


def test_a_client_learns_as_if_it_were_alone() -> None:
    """Neither the number of clients nor what they hold makes a difference."""
    states = []
    for size, num_clients in ((200, 1), (200, 3), (120, 4)):
        data = new_data(num_clients, size, partition=Blocks())
        data.client(0).data.images[40:] += size  # what the others hold
        states.append(fit(Standalone(Net, CLASSES, momentum), data, rounds=2).run.store.get(0))
    assert same(states[0], states[1])
    assert same(states[0], states[2])


def test_before_and_after_aggregation_are_the_same() -> None:
    row = fit(Standalone(Net, CLASSES), rounds=2).run.history[-1]
    before = {name.removeprefix("before/"): value for name, value in row.items() if name.startswith("before/")}
    after = {name.removeprefix("after/"): value for name, value in row.items() if name.startswith("after/")}
    assert before == after


def test_only_who_is_drawn_trains() -> None:
    federation = fit(Standalone(Net, CLASSES), new_data(), participation=0.5)
    drawn = [client.id for client in federation.run.clients if client.id in federation.run.store]
    assert len(drawn) == 2
    for client in federation.run.clients:
        untrained = federation.run.model.for_client(client, federation.seed).state_dict()
        assert same(federation.client_module(client.id).state_dict(), untrained) == (client.id not in drawn)


def test_equal_clients_start_differently() -> None:
    template = Standalone(Net, CLASSES)
    one, other = (template.for_client(client) for client in new_data().clients[:2])
    assert not torch.equal(one.backbone.fc1.weight, other.backbone.fc1.weight)
