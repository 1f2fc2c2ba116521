"""Split-Mix: several independent narrow networks."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, Recording, momentum, new_data, new_trainer, same, sgd, still
from tiny_rounds import UniformFedAvg, fit
from torch.nn.functional import cross_entropy

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import ClassesPerClient
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.methods import FedAvg, SplitMix
from lightning_fed.methods.split_mix import renamed
from lightning_fed.models import ResNet18
from lightning_fed.tensors import State, count_floats

Narrow = partial(Net, width=0.6)
CLIENTS = [ClientInfo(k, 10, 0, 0, (1,) * CLASSES) for k in range(5)]


def server_of(method: FederatedModule) -> Any:
    method.configure_model()
    return method.configure_server(CLIENTS)


def play(server: Any, number: int, cohort: list[ClientInfo]) -> None:
    """A round in which all send back what they received."""
    server.on_round_start(number, cohort)
    server.aggregate(ClientUpdate(client.id, 10, server.broadcast(client).state) for client in cohort)


def base(state: State, number: int) -> State:
    """One network of a state, under the names that it has alone."""
    prefix = f"bases.{number}."
    return {f"backbone.{name.removeprefix(prefix)}": tensor for name, tensor in state.items() if name.startswith(prefix)}


@pytest.mark.often(1)
@pytest.mark.parametrize("masked", [True, False])
def test_one_network_is_unweighted_fedavg(masked: bool) -> None:
    data = new_data(3, 240)
    assert all(min(client.label_counts) > 0 for client in data.clients)
    ours = fit(SplitMix(Narrow, CLASSES, bases=1, budgets=[1], masked=masked, optimizer=momentum), data, rounds=2)
    theirs = fit(UniformFedAvg(Narrow, CLASSES, momentum), data, rounds=2)
    assert same(base(ours.run.server.state_dict(), 0), theirs.run.server.state_dict())
    assert len(ours.run.server.state) == len(theirs.run.server.state)
    assert ours.run.server.global_models().keys() == {"global"}


def test_networks_start_differently() -> None:
    state = server_of(SplitMix(Net, CLASSES, bases=3, budgets=[3])).state
    firsts = [state[f"bases.{k}.fc1.weight"] for k in range(3)]
    assert not any(torch.equal(firsts[k], firsts[k - 1]) for k in range(3))


def test_what_a_network_learns_is_what_it_learns_alone() -> None:
    """Bit for bit, over epochs with momentum and weight decay, whichever other networks are trained beside it."""
    data, start = new_data(1, 80), [FedAvg(Net, CLASSES).for_client(client).shared_state() for client in CLIENTS[:3]]
    ends = []
    for state in start:
        alone = FedAvg(Net, CLASSES, momentum, epochs=2).for_client(data.clients[0])
        alone.load_shared_state(state)
        new_trainer(**QUIET, max_epochs=2, limit_val_batches=0).fit(alone, datamodule=data.client(0))
        ends.append(alone.shared_state())
    method = SplitMix(Net, CLASSES, bases=4, budgets=[1, 2, 3], masked=False, optimizer=momentum, epochs=2)
    for chosen in ([0], [0, 1], [2, 0, 1]):
        module = method.for_client(replace(data.clients[0], model_size=len(chosen)))
        names = [name.removeprefix("backbone.") for name in start[0]]
        module.load_shared_state(
            {f"bases.{place}.{name}": start[k][f"backbone.{name}"] for place, k in enumerate(chosen) for name in names}
        )
        new_trainer(**QUIET, max_epochs=2, limit_val_batches=0).fit(module, datamodule=data.client(0))
        for place, k in enumerate(chosen):
            assert same(base(module.shared_state(), place), ends[k])
            assert not same(ends[k], start[k])


def test_the_loss_that_is_logged_is_the_mean_over_the_networks() -> None:
    data = new_data(1, 80)
    losses = []
    for budget in (1, 4):
        module = SplitMix(Net, CLASSES, bases=5, budgets=[budget], optimizer=still).for_client(
            replace(data.clients[0], model_size=budget)
        )
        for network in module.bases:
            network.load_state_dict(module.bases[0].state_dict())
        trainer = new_trainer(**QUIET, max_epochs=1, limit_val_batches=0)
        trainer.fit(module, datamodule=data.client(0))
        losses.append(trainer.callback_metrics["train/local_loss"].item())
    assert losses[1] == pytest.approx(losses[0])


def test_a_prediction_is_the_mean_of_the_logits() -> None:
    module = SplitMix(Net, CLASSES, bases=3, budgets=[3, 2]).for_client(CLIENTS[0])
    x = torch.randn(8, 3, 4, 4)
    logits = [network(x) for network in module.bases]
    assert len(logits) == 3
    torch.testing.assert_close(module(x), (logits[0] + logits[1] + logits[2]) / 3)
    module.client = ClientInfo(0, 8, 0, 0, (5, 0, 3, 0))
    torch.testing.assert_close(module(x), (logits[0] + logits[1] + logits[2]) / 3 * torch.tensor([1, 0, 1, 0]))
    loss = sum(cross_entropy(each * torch.tensor([1, 0, 1, 0]), torch.tensor([0, 2] * 4)) for each in logits)
    torch.testing.assert_close(module.client_loss((x, torch.tensor([0, 2] * 4))), loss)


@pytest.mark.parametrize("cohorts", [[1], [2], [4], [5], [3, 0, 5, 1, 2, 0, 4, 1]], ids=str)
def test_every_network_is_handed_out_first_once_per_cycle_and_cycles_differ(cohorts: list[int]) -> None:
    """Also if cohorts vary in size, as those of Poisson sampling."""
    server = server_of(SplitMix(Net, CLASSES, bases=4, budgets=[1, 3, 4]))
    firsts: list[int] = []
    for number, cohort in enumerate(cohorts * (48 // sum(cohorts)), start=1):
        play(server, number, CLIENTS[:cohort])
        firsts += [server.assigned[client.id][0] for client in CLIENTS[:cohort]]
    cycles = [tuple(firsts[k : k + 4]) for k in range(0, len(firsts) - 3, 4)]
    assert all(sorted(cycle) == [0, 1, 2, 3] for cycle in cycles)
    assert len(set(cycles)) > len(cycles) / 2


def test_at_full_participation_a_client_does_not_get_the_same_network_in_every_round() -> None:
    """Eight clients who hold one of four networks each: a queue that is the same in every cycle gives each the same for ever."""
    clients = [ClientInfo(k, 10, 0, 0, (1,) * CLASSES) for k in range(8)]
    method = SplitMix(Net, CLASSES, bases=4, budgets=[1])
    method.configure_model()
    server = method.configure_server(clients)
    counts = torch.zeros(8, 4)
    for number in range(1, 201):
        play(server, number, clients)
        for client, assigned in server.assigned.items():
            counts[client, assigned] += 1
    assert (counts / 200 < 0.4).all()


def test_a_continued_run_hands_out_what_one_never_stopped_does() -> None:
    servers = []
    for _ in range(2):
        torch.manual_seed(5)
        servers.append(server_of(SplitMix(Net, CLASSES, bases=4, budgets=[1])))
    first, second = servers
    for number in range(1, 7):
        play(first, number, CLIENTS[: number % 4])
    second.load_state_dict(first.state_dict())
    second.on_round_start(6, CLIENTS[:2])
    for server in servers:
        torch.manual_seed(7)
        server.on_round_start(7, CLIENTS)
    assert first.assigned == second.assigned


def test_a_client_gets_as_many_different_networks_as_it_can_hold() -> None:
    server = server_of(SplitMix(Net, CLASSES, bases=4, budgets=[4, 2, 1, 3]))
    drawn = set()
    for number in range(1, 20):
        play(server, number, CLIENTS)
        for client, budget in zip(CLIENTS, [4, 2, 1, 3, 4], strict=True):
            assigned = server.assigned[client.id]
            assert len(set(assigned)) == len(assigned) == budget
            assert set(assigned) <= {0, 1, 2, 3}
            broadcast = server.broadcast(client)
            assert broadcast.model_size == (None if budget == 4 else budget)
            for place, k in enumerate(assigned):
                assert same(base(broadcast.state, place), base(server.state, k))
            assert len(broadcast.state) == budget * len(base(server.state, 0))
        drawn.add(tuple(server.assigned[1]))
    assert len({pair[1] for pair in drawn}) == 4


@pytest.mark.parametrize("masked", [True, False])
def test_each_network_is_averaged_over_those_who_trained_it(masked: bool) -> None:
    engine, data = Recording(), new_data(3, 120, partition=ClassesPerClient(2), batch_size=10)
    method = SplitMix(Net, CLASSES, bases=4, budgets=[2, 1], masked=masked, optimizer=sgd)
    federation = fit(method, data, engine=engine)
    before, after, assigned = method.shared_state(), federation.run.server.state_dict(), federation.run.server.assigned
    assert [len(assigned[k]) for k in range(3)] == [2, 1, 2]
    trained = {k for bases in assigned.values() for k in bases}
    for k in range(4):
        parts = {client: base(engine.trained[client].state, bases.index(k)) for client, bases in assigned.items() if k in bases}
        for name, old in base(before, k).items():
            found = base(after, k)[name]
            if not parts:
                assert torch.equal(found, old)
            for row in range(len(old)):
                owners = [c for c in parts if not masked or ".head." not in name or data.clients[c].label_counts[row]]
                values = [parts[client][name][row] for client in owners]
                expected = torch.stack(values).mean(dim=0) if values else old[row]
                torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=1e-6)
    assert len(trained) >= 3


def test_networks_that_nobody_trained_stay_bit_for_bit() -> None:
    method = SplitMix(Net, CLASSES, bases=4, budgets=[2], masked=False, optimizer=momentum)
    federation = fit(method, new_data(3, 120), participation=0.3)
    [assigned] = federation.run.server.assigned.values()
    before, after = federation.run.model.shared_state(), federation.run.server.state_dict()
    assert len(assigned) == 2
    for k in range(4):
        assert same(base(before, k), base(after, k)) == (k not in assigned)


def test_clients_and_mixes_predict_with_the_first_networks() -> None:
    server = server_of(SplitMix(Net, CLASSES, bases=4, budgets=[4, 2, 1]))
    server.on_round_start(3, CLIENTS)
    for client, size in zip(CLIENTS, [4, 2, 1, 4, 2], strict=True):
        assert same(server.evaluation_broadcast(client).state, renamed(server.state, {k: k for k in range(size)}))
    models = server.global_models()
    assert list(models) == ["global", "mix_1", "mix_2", "mix_3"]
    assert same(models["global"].state, server.state)
    for size in (1, 2, 3):
        assert models[f"mix_{size}"].model_size == size
        assert same(models[f"mix_{size}"].state, renamed(server.state, {k: k for k in range(size)}))


def test_payloads_have_the_sizes_of_table_2() -> None:
    """9, 3, 2 and 1 networks of width 0.35."""
    method = SplitMix(partial(ResNet18, width=0.35), 10, bases=9, budgets=[9, 3, 2, 1])
    method.configure_model()
    state = method.shared_state()
    assert count_floats(state) == 12_358_440
    parts = [renamed(state, {k: k for k in range(size)}) for size in (3, 2, 1)]
    assert [round(count_floats(part) / 1e6, 2) for part in (state, *parts)] == [12.36, 4.12, 2.75, 1.37]
