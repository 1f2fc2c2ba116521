"""FedALA: clients begin with a mixture of their last model and the server's, whose weights they learn."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, Recording, momentum, new_data, private_states, same, sgd
from tiny_loops import batches, fixed, learn, stripped, turn_of
from tiny_rounds import assert_same_runs, fit
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from lightning_fed.core import FederationError, FineTuning, weighted_mean
from lightning_fed.methods import FedALA, FedAvg, Standalone
from lightning_fed.tensors import State

fit = partial(fit, rounds=3)
HEAD = ("head.weight", "head.bias")


class Alone(FedALA):
    """Whose clients take nothing of the server's model."""

    def build(self) -> None:
        super().build()
        for weight in self.weights.values():
            torch.nn.init.zeros_(weight)


def test_with_weights_that_stay_1_it_is_fedavg_bit_for_bit() -> None:
    """With dropout and batch norm, and clients that are absent; the clients are measured with the global model."""
    ours = FedALA(NoisyNet, CLASSES, weight_epochs=0, first_weight_epochs=0, optimizer=momentum)
    assert_same_runs(ours, FedAvg(NoisyNet, CLASSES, momentum), "server", "results", rounds=3, participation=0.7)


def test_with_weights_that_stay_0_in_all_layers_it_is_standalone() -> None:
    options: dict[str, Any] = {"weight_epochs": 0, "first_weight_epochs": 0, "optimizer": momentum}
    ours, theirs = fit(Alone(fixed(Net), CLASSES, 3, **options)), fit(Standalone(fixed(Net), CLASSES, momentum))
    for client in range(3):
        assert same(ours.client_module(client).export_state(), dict(theirs.client_module(client).state_dict()))
    assert ours.run.results == theirs.run.results


@pytest.mark.parametrize("rate", [1.0, 1e4])
def test_rounds_are_those_of_a_plain_loop(rate: float) -> None:
    """Two passes for the weights in the second turn, one in the third; far steps end at 0 or 1."""
    data = new_data(3, 120)
    federation = fit(FedALA(fixed(Net), CLASSES, weight_lr=rate, first_weight_epochs=2, optimizer=sgd), data)
    network = fixed(Net)(CLASSES)
    last: list[State] = [{n: p.detach().clone() for n, p in network.named_parameters() if n in HEAD} for _ in range(3)]
    weights: list[State] = [{name: torch.ones_like(t) for name, t in last[0].items()} for _ in range(3)]
    for round in (1, 2, 3):
        states: list[State] = []
        for client in range(3):
            local, own = copy.deepcopy(network), dict(copy.deepcopy(network).named_parameters())
            passes = (0, 2, 1)[round - 1]

            def mixture(client: int = client, own: State = own) -> State:
                return {n: (t + (own[n] - t) * weights[client][n]).detach() for n, t in last[client].items()}

            for x, y in turn_of(data, client, round, passes):
                point = {name: t.requires_grad_() for name, t in mixture().items()}
                loss = cross_entropy(functional_call(local, point, (x,)), y)
                for name, grad in zip(point, torch.autograd.grad(loss, list(point.values())), strict=True):
                    moved = weights[client][name] - rate * grad * (own[name] - last[client][name])
                    weights[client][name] = moved.clamp(0, 1).detach()
            local.load_state_dict(mixture(), strict=False)
            learn(local, batches(data, client, round, passes), sgd)
            last[client] = {n: p.detach().clone() for n, p in local.named_parameters() if n in HEAD}
            states.append({name: tensor.clone() for name, tensor in local.state_dict().items()})
        network.load_state_dict(weighted_mean(states, [info.num_train for info in data.clients]))
    torch.testing.assert_close(stripped(federation.run.server.state), network.state_dict(), rtol=1e-4, atol=1e-5)
    found = [w for state in private_states(federation).values() for name, w in state.items() if name.startswith("weights.")]
    assert all(((w >= 0) & (w <= 1)).all() for w in found)
    assert any((w != 1).any() for w in found)


def test_measuring_changes_nothing_that_stays_and_absentees_keep_all() -> None:
    """A client is measured with what its next turn would begin with."""
    engine = Recording()
    often, once = (fit(FedALA(NoisyNet, CLASSES, optimizer=momentum), participation=0.7, evaluate_every=n) for n in (1, 0))
    assert all(same(state, private_states(once)[client]) for client, state in private_states(often).items())
    federation = fit(FedALA(NoisyNet, CLASSES, optimizer=momentum), participation=0.7, engine=engine)
    sent = {update.client: update.state for update in engine.trained}
    for client, state in private_states(federation).items():
        assert state["turns"] == sum(update.client == client for update in engine.trained)
        for name in HEAD:
            assert torch.equal(state[f"last.backbone/{name.replace('.', '/')}"], sent[client][f"backbone.{name}"])
    plain = FedAvg(NoisyNet, CLASSES).for_client(new_data().clients[1]).update_state().keys()
    assert all(update.state.keys() == plain for update in engine.trained)
    module = federation.client_module(0)
    mixed, global_layers = module.export_state(), federation.run.server.state
    assert not torch.equal(mixed["backbone.head.weight"], global_layers["backbone.head.weight"])
    assert torch.equal(mixed["backbone.fc1.weight"], global_layers["backbone.fc1.weight"])
    assert federation.run.history[-1]["fine_tune/flops"] > 0


def test_there_is_nothing_private_to_fine_tune() -> None:
    with pytest.raises(FederationError, match="set part to all or head"):
        FedALA(Net, CLASSES, fine_tuning=FineTuning(part="private"))
