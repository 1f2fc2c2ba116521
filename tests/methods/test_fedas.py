"""FedAS: clients align the body that comes with their last one, and count by their Fisher information."""

import copy
from functools import partial

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, Recording, momentum, new_data, private_states, same, sgd
from tiny_loops import batches, fixed, learn, turn_of
from tiny_rounds import at_start, fit
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.core import FederationError, weighted_mean
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data import InMemory
from lightning_fed.methods import FedAS, FedPer
from lightning_fed.methods.fedas import FISHER, mean_by_fisher
from lightning_fed.models import CNN1, Backbone
from lightning_fed.tensors import State, count_floats

fit = partial(fit, rounds=3)
HEAD = ("head.weight", "head.bias")


def test_without_alignment_and_weighted_by_examples_it_is_fedper_bit_for_bit() -> None:
    """With dropout and batch norm, and clients that are absent."""
    options = {"weighting": "examples", "optimizer": momentum}
    ours = fit(FedAS(NoisyNet, CLASSES, alignment_epochs=0, **options), participation=0.7)
    theirs = fit(FedPer(NoisyNet, CLASSES, **options), participation=0.7)
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())
    keys = [key for key in theirs.run.history[-1] if key.startswith(("after/", "before/"))]
    assert keys
    assert [{key: row.get(key) for key in keys} for row in ours.run.history] == [
        {key: row.get(key) for key in keys} for row in theirs.run.history
    ]


def classes_apart(features: Tensor, means: dict[int, Tensor], y: Tensor) -> Tensor:
    """Class after class, the mean over examples and dimensions."""
    labels = [int(label) for label in y.unique()]
    return torch.stack([(features[y == c] - means[c]).square().mean() for c in labels if c in means]).sum()


def test_the_alignment_counts_classes_and_not_examples() -> None:
    module = FedAS(Net, CLASSES).for_client(new_data().clients[1])
    module.class_means.normal_()
    module.known[1:] = True
    x, y = torch.randn(7, 3, 4, 4), torch.tensor([0, 1, 1, 1, 1, 2, 0])
    means = {c: module.class_means[c] for c in range(1, CLASSES)}
    torch.testing.assert_close(module.alignment_loss((x, y)), classes_apart(module.backbone.encode(x), means, y))


def test_what_stays_with_a_client_is_not_aligned() -> None:
    module = FedAS(Net, CLASSES, private_layers=2).for_client(new_data().clients[1])
    assert not module.evaluation_phases()
    module.known[0] = True
    shared = {id(p) for name, p in module.named_parameters() if name in module.shared_names()}
    assert {id(p) for p in module.evaluation_phases()[0].parameters} == shared


def seen(network: Backbone, data: InMemory, client: int) -> tuple[dict[int, Tensor], float]:
    """The mean features of a client's classes, and the sum over batches of the squared norms of gradients."""
    network.eval()
    features, labels, trace = [], [], 0.0
    for x, y in data.client(client).predict_dataloader():
        features.append(network.encode(x).detach())
        labels.append(y)
        loss = cross_entropy(network(x), y)
        trace += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(network.parameters())))
    network.train()
    z, y = torch.cat(features), torch.cat(labels)
    return {int(c): z[y == c].mean(0) for c in y.unique()}, trace


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_rounds_are_those_of_a_plain_loop(rate: float) -> None:
    """Every client aligns a body of its own, as the server sent it."""
    data = new_data(3, 120)
    federation = fit(FedAS(fixed(Net), CLASSES, alignment_lr=rate, alignment_epochs=2, optimizer=sgd), data)
    network = fixed(Net)(CLASSES)
    heads: list[State] = [{n: t.clone() for n, t in network.state_dict().items() if n in HEAD} for _ in range(3)]
    means: list[dict[int, Tensor]] = [{} for _ in range(3)]
    for round in (1, 2, 3):
        states, traces = [], []
        for client in range(3):
            local, passes = copy.deepcopy(network), 2 if round > 1 else 0
            local.load_state_dict(heads[client], strict=False)
            body = [p for name, p in local.named_parameters() if name not in HEAD]
            for x, y in turn_of(data, client, round, passes):
                loss = classes_apart(local.encode(x), means[client], y)
                for p, gradient in zip(body, torch.autograd.grad(loss, body), strict=True):
                    p.data -= rate * gradient
            learn(local, batches(data, client, round, passes), sgd)
            means[client], trace = seen(local, data, client)
            heads[client] = {n: t.clone() for n, t in local.state_dict().items() if n in HEAD}
            states.append({n: t.clone() for n, t in local.state_dict().items() if n not in HEAD})
            traces.append(trace)
        network.load_state_dict(weighted_mean(states, traces), strict=False)
    for name, tensor in network.state_dict().items():
        if name not in HEAD:
            torch.testing.assert_close(federation.run.server.state[f"backbone.{name}"], tensor, rtol=1e-4, atol=1e-5)
    for client, state in private_states(federation).items():
        assert {int(c) for c in state["known"].nonzero()} == means[client].keys()
        for label, mean in means[client].items():
            torch.testing.assert_close(state["class_means"][label], mean, rtol=1e-4, atol=1e-5)


def test_measuring_changes_nothing_that_stays_and_no_client_changes_the_servers_body() -> None:
    engine = Recording()
    often, once = (fit(FedAS(NoisyNet, CLASSES, optimizer=momentum), participation=0.7, evaluate_every=n) for n in (1, 0))
    assert all(same(state, private_states(once)[client]) for client, state in private_states(often).items())
    assert same(often.run.server.state_dict(), once.run.server.state_dict())
    federation = fit(FedAS(NoisyNet, CLASSES, optimizer=momentum), participation=0.7, engine=engine)
    body = FedPer(NoisyNet, CLASSES).for_client(new_data().clients[1]).update_state().keys()
    assert all(update.state.keys() == {*body, FISHER} for update in engine.trained)
    aligned, sent = federation.client_module(0).export_state(), federation.run.server.state
    assert not torch.equal(aligned["backbone.fc1.weight"], sent["backbone.fc1.weight"])
    assert torch.equal(aligned["backbone.head.weight"], private_states(federation)[0]["backbone.head.weight"])
    assert federation.run.history[-1]["fine_tune/flops"] > 0


def test_the_mean_is_in_proportion_to_the_traces_that_are_more_than_0() -> None:
    old = {"w": torch.tensor([7.0]), FISHER: torch.zeros(())}
    sent = [({"w": torch.tensor([w]), FISHER: torch.tensor(t)}, 10.0) for w, t in ((1.0, 3.0), (5.0, 1.0), (100.0, 0.0))]
    assert same(mean_by_fisher(sent, old), {"w": torch.tensor([2.0]), FISHER: torch.zeros(())})
    assert mean_by_fisher(sent[2:], old) == {}
    with pytest.raises(FederationError, match="is -1, expected 0 or more"):
        mean_by_fisher([({"w": torch.ones(1), FISHER: torch.tensor(-1.0)}, 1.0)], old)


def test_a_round_without_information_leaves_the_server_as_it_was() -> None:
    data = new_data()
    server = at_start(FedAS(Net, CLASSES), data.clients)
    before = dict(server.state)
    moved = {name: tensor + 1 if name != FISHER else tensor for name, tensor in before.items()}
    server.aggregate([ClientUpdate(0, data.clients[0].num_train, moved)])
    assert same(server.state, before)


def test_the_body_of_cnn_1_and_one_number_travel() -> None:
    module = FedAS(CNN1, 10).for_client(new_data().clients[1])
    assert count_floats(module.update_state()) == 2_616_548 + 1
