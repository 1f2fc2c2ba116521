"""FedDecomp: shared full-rank and private low-rank weights, one after the other."""

from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, Net, NoisyNet, momentum, new_data, new_federation, private_states, same, sgd, still
from tiny_loops import fixed
from tiny_rounds import UniformFedAvg, fit, phases_of
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized

from lightning_fed import FederationError
from lightning_fed.core.phased_module import MOMENTS, moment_parts
from lightning_fed.methods import FedDecomp
from lightning_fed.methods.feddecomp import distance
from lightning_fed.models import CNN1
from lightning_fed.tensors import State, count_floats
from lightning_fed.testing.toys import PartlyFrozenNet

INFO = new_data().clients[0]


fit = partial(fit, rounds=2, evaluate_every=1)


def plain(state: State) -> State:
    """A state under the names it has without decomposition."""
    return {name.replace(".parametrizations.", ".").replace(".original", ""): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize("network", mostly_slow([Net, NoisyNet], often={NoisyNet}))
def test_without_lora_epochs_it_is_fedavg(network: Any, variant: str) -> None:
    ours = fit(FedDecomp(fixed(network), CLASSES, lora_epochs=0, global_epochs=2, variant=variant, optimizer=momentum))
    theirs = fit(UniformFedAvg(fixed(network), CLASSES, momentum, epochs=2))
    assert same(plain(ours.run.server.state_dict()), theirs.run.server.state_dict())
    assert ours.run.results == theirs.run.results


def test_each_phase_leaves_the_other_part_bit_identical() -> None:
    moved = phases_of(FedDecomp(Net, CLASSES, optimizer=momentum))
    assert list(moved) == ["low_rank", "full_rank"]
    parts = {name.rsplit(".", 1)[1] for name in moved["low_rank"]}
    assert parts == {"A", "B"}
    assert {name.rsplit(".", 1)[1] for name in moved["full_rank"]} == {"original", "bias"}


def test_moments_of_both_phases_stay_with_the_client_if_they_persist() -> None:
    federation = fit(FedDecomp(Net, CLASSES, persistent=True, optimizer=momentum))
    kept = [moment_parts(name) for name in private_states(federation)[0] if name.startswith(MOMENTS)]
    assert {(phase, parameter.rsplit(".", 1)[1]) for phase, parameter, _ in kept} == {
        ("low_rank", "A"),
        ("low_rank", "B"),
        ("full_rank", "original"),
        ("full_rank", "bias"),
    }


@pytest.mark.often(1)
@pytest.mark.parametrize("alternating", [True, False])
def test_low_rank_parts_are_private(alternating: bool) -> None:
    federation = fit(FedDecomp(NoisyNet, CLASSES, alternating=alternating, optimizer=sgd))
    assert not any(name.endswith((".A", ".B")) for name in federation.run.server.state_dict())
    one, other = (federation.client_module(client).state_dict() for client in (0, 1))
    for name in one:
        private = name.endswith((".A", ".B"))
        assert torch.equal(one[name], other[name]) != private


def test_a_frozen_weight_has_no_low_rank_part() -> None:
    """Neither shared nor private training moves what is frozen."""
    federation = fit(FedDecomp(fixed(PartlyFrozenNet), CLASSES, optimizer=momentum))
    network = fixed(PartlyFrozenNet)(CLASSES)
    for client in (0, 1):
        trained = federation.client_module(client).backbone
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):
                frozen = not layer.weight.requires_grad
                assert frozen != is_parametrized(trained.get_submodule(name)), name
                assert frozen == torch.equal(trained.get_submodule(name).weight, layer.weight), name


def test_a_network_without_weights_to_decompose_is_refused() -> None:
    class Still(Net):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.endswith("bias"))

    with pytest.raises(FederationError, match=r"weights that learn, and Still has none: let some learn, or use FedAvg\.$"):
        FedDecomp(Still, CLASSES).configure_model()


def test_payload_is_the_whole_network() -> None:
    module = FedDecomp(CNN1, 10).for_client(INFO)
    assert count_floats(module.shared_state()) == 2_621_558
    assert count_floats(module.private_state()) == 2_108_335


@pytest.mark.parametrize("alternating", [True, False])
def test_the_low_rank_part_has_its_own_optimizer(alternating: bool) -> None:
    """One that does not move leaves B at zero, whoever learns beside it."""
    federation = fit(FedDecomp(fixed(Net), CLASSES, alternating=alternating, optimizer=sgd, lora_optimizer=still), rounds=1)
    learned = plain(federation.run.server.state)
    for name, tensor in fixed(Net)(CLASSES).named_parameters():
        assert not torch.equal(learned[f"backbone.{name}"], tensor)
    for client in federation.run.clients:
        zeros = [p for name, p in federation.client_module(client.id).named_parameters() if name.endswith(".B")]
        assert zeros
        assert not any(p.any() for p in zeros)


def test_simultaneous_training_differs_from_alternating() -> None:
    one, other = (fit(FedDecomp(fixed(Net), CLASSES, alternating=value, optimizer=sgd), rounds=1) for value in (True, False))
    assert [key for key in one.run.history[0] if key.startswith("train/")] == ["train/low_rank_loss", "train/full_rank_loss"]
    assert [key for key in other.run.history[0] if key.startswith("train/")] == ["train/local_loss"]
    assert not same(one.run.server.state_dict(), other.run.server.state_dict())


class ClientStates(FedDecomp):
    """Notes what clients sent."""

    sent: list[State]

    def shared_state(self) -> State:
        state = super().shared_state()
        if self.client is not None:
            self.sent.append(state)
        return state


@pytest.mark.parametrize("absentees", ["left_out", "stale"])
def test_average_under_partial_participation(absentees: str) -> None:
    """Three of four clients; a fifth may not take part and does not count."""
    ClientStates.sent = []
    model = ClientStates(Net, CLASSES, absentees=absentees, optimizer=sgd)
    federation = new_federation(1, participation=0.75, eligible_clients=[0, 1, 3, 4])
    federation.fit(model, new_data(5, 160))
    start, sent = federation.run.model.shared_state(), ClientStates.sent[:3]
    for name, tensor in federation.run.server.state_dict().items():
        mean = sum(state[name] for state in sent) / 3
        expected = mean if absentees == "left_out" else (3 * mean + start[name]) / 4
        assert torch.allclose(tensor, expected, atol=1e-6)


@pytest.mark.parametrize("absentees", ["left_out", "stale"])
def test_drift_is_the_mean_distance_from_the_average(absentees: str) -> None:
    ClientStates.sent = []
    federation = new_federation(1, participation=0.75)
    federation.fit(ClientStates(NoisyNet, CLASSES, absentees=absentees, optimizer=sgd), new_data(4, 160))
    names = {name for name, _ in federation.run.model.named_parameters()} & ClientStates.sent[0].keys()
    mean = federation.run.server.state_dict()
    flat = [torch.cat([(sent[name] - mean[name]).flatten() for name in sorted(names)]) for sent in ClientStates.sent[:3]]
    expected = sum(vector.norm().item() for vector in flat) / 3
    assert federation.run.history[0]["server/drift"] == pytest.approx(expected, rel=1e-5)
    assert distance({"a": torch.tensor([3.0, 0.0])}, {"a": torch.tensor([0.0, 4.0])}) == 5
    assert "server/drift" not in fit(FedDecomp(Net, CLASSES, track_drift=False), rounds=1).run.history[0]


class NormedNet(Net):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        spectral_norm(self.fc1)


def test_weights_that_are_computed_are_not_decomposed() -> None:
    with pytest.raises(FederationError, match=r"The weight of layer 'fc1' is computed .* expected a parameter to decompose"):
        FedDecomp(NormedNet, CLASSES).for_client(INFO)
    module = FedDecomp(NormedNet, CLASSES, layers=["fc2", "head"]).for_client(INFO)
    network = NormedNet(CLASSES).eval()
    network.load_state_dict({name.removeprefix("backbone."): tensor for name, tensor in module.export_state().items()})
    x = torch.randn(4, 3, 4, 4)
    assert torch.equal(network(x), module.eval()(x))
