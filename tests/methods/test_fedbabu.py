"""FedBABU: a head that nobody moves, and fine-tuning from it."""

import copy
from functools import partial
from typing import Any

import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, momentum, new_data, private_states, same
from tiny_loops import batches, fixed, mean_of, step
from tiny_rounds import fit
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fed.core import FineTuning
from lightning_fed.core.messages import Broadcast
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedBABU, FedPer
from lightning_fed.models import CNN1
from lightning_fed.seeding import FINE_TUNE, derive_seed
from lightning_fed.tensors import State, count_floats

fit = partial(fit, rounds=3)
babu = partial(FedBABU, optimizer=momentum)
HEAD = {"backbone.head.weight", "backbone.head.bias"}


def body(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith("backbone.") and name not in HEAD}


def head_of(federation: Federation, client: int) -> State:
    """The head that a client would train its body under."""
    return dict(federation.client_module(client).backbone.head.state_dict())


def test_the_head_is_the_same_for_everybody_all_the_time_and_never_sent() -> None:
    """Momentum and weight decay would move a head whose gradient is merely zero."""
    engine, data = Recording(), new_data(3, 120)
    plain = FineTuning(epochs=0)
    federation = fit(babu(NoisyNet, CLASSES, fine_tuning=plain), data, engine=engine, participation=0.7, evaluate_every=1)
    drawn = dict(federation.run.model.initial_head.state_dict())
    assert same(dict(federation.run.model.for_client(INFO).backbone.head.state_dict()), drawn)
    assert all(same(head_of(federation, client), drawn) for client in range(3))
    sent = [*(turn.broadcast.state for turn in engine.turns), *(update.state for update in engine.updates)]
    assert all(HEAD.isdisjoint(state) and not any("initial_head" in name for name in state) for state in sent)
    assert not private_states(federation)
    other = fit(babu(NoisyNet, CLASSES), data, rounds=1, seed=1).run.model
    assert not same(dict(other.initial_head.state_dict()), drawn)


def test_what_travels_is_what_travels_with_fedper() -> None:
    names = FedPer(NoisyNet, CLASSES).for_client(INFO).shared_names()
    assert FedBABU(NoisyNet, CLASSES).for_client(INFO).shared_names() == names
    assert count_floats(FedBABU(CNN1, 10).for_client(INFO).update_state()) == 2_616_548


def trained(network: Any, parameters: list[nn.Parameter], loader: Any) -> None:
    """An epoch of plain PyTorch."""
    optimizer = momentum(parameters)
    for x, y in loader:
        step(optimizer, cross_entropy(network(x), y))


def test_rounds_and_fine_tuning_are_those_of_a_plain_loop() -> None:
    """Two rounds and, from what the server has then, two epochs of the whole network."""
    data = new_data(3, 120)
    federation = fit(babu(fixed(Net), CLASSES, fine_tuning=FineTuning(epochs=2)), data, rounds=2)
    network = fixed(Net)(CLASSES)
    for round in (1, 2):
        clients = []
        for client in range(3):
            clients.append(own := copy.deepcopy(network))
            trained(own, [*own.fc1.parameters(), *own.fc2.parameters()], batches(data, client, round, epoch=0))
        network.load_state_dict(mean_of(clients))
    ours = {f"backbone.{name}": tensor for name, tensor in network.state_dict().items()}
    assert same(federation.run.server.state_dict(), body(ours))
    for client in range(3):
        own, tuned = copy.deepcopy(network), data.client(client)
        tuned.order_seed = derive_seed(0, FINE_TUNE, 2, client)
        optimizer = momentum(own.parameters())
        for epoch in range(2):
            loader = tuned.train_dataloader()
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                step(optimizer, cross_entropy(own(x), y))
        x, y = tuned.data[tuned.splits[2]]
        accuracy, plain = ((network(x).argmax(dim=1) == y).float().mean().item() for network in (own, network))
        assert federation.run.results[client]["test/accuracy"] == accuracy
        assert not same(dict(own.head.state_dict()), dict(network.head.state_dict()))
        assert accuracy >= plain


def test_fine_tuning_leaves_nothing_behind() -> None:
    """However long, however often, and of whatever part: the body's path is the same, and so is a second measurement."""
    tunings = [FineTuning(epochs=0), FineTuning(epochs=3), FineTuning(epochs=1, part="head")]
    runs = [fit(babu(NoisyNet, CLASSES, fine_tuning=tuning), evaluate_every=1).run for tuning in tunings]
    assert all(same(run.server.state_dict(), runs[0].server.state_dict()) for run in runs[1:])
    assert runs[0].results != runs[1].results
    seldom = fit(babu(NoisyNet, CLASSES, fine_tuning=tunings[1]), evaluate_every=0).run
    assert seldom.results == runs[1].results


def test_an_export_has_the_head_and_it_is_the_initial_one_for_the_server() -> None:
    module = FedBABU(Net, CLASSES).for_client(INFO)
    initial = module.initial_head.weight.clone()
    with torch.no_grad():
        module.backbone.head.weight.copy_(initial + 1)  # as fine-tuning does
    assert module.export_state().keys() == {f"backbone.{name}" for name in Net().state_dict()}
    assert torch.equal(module.export_state()["backbone.head.weight"], initial + 1)
    module.load_broadcast(Broadcast(module.shared_state()))
    assert torch.equal(module.export_state(private=False)["backbone.head.weight"], initial)
