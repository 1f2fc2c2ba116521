"""FedPer, FedRep, LG-FedAvg and FedBN: which part travels, which stays, which learns when."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, WideNet, momentum, new_data, same, sgd, tiny_vit
from tiny_rounds import fit, phases_of
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_fed.core.module import FederatedModule
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAS, FedAvg, FedBABU, FedBN, FedPer, FedRep, LGFedAvg
from lightning_fed.models import CNN1, ResNet8
from lightning_fed.tensors import State, count_floats

INFO = new_data().clients[0]


fit = partial(fit, rounds=2, evaluate_every=1)


def client_states(federation: Federation) -> list[State]:
    return [dict(federation.client_module(client.id).state_dict()) for client in federation.run.clients]


@pytest.mark.parametrize(
    ("method", "floats"), [(FedPer, 2_616_548), (FedRep, 2_616_548), (LGFedAvg, 5_010), (FedBN, 2_621_558), (FedAvg, 2_621_558)]
)
def test_payload_of_cnn1(method: type[FederatedModule], floats: int) -> None:
    assert count_floats(method(CNN1, 10).for_client(INFO).shared_state()) == floats


@pytest.mark.often(3)
@pytest.mark.parametrize(
    ("network", "count", "names"),
    [
        (CNN1, 1, {"head"}),
        (CNN1, 2, {"fc2", "head"}),
        (CNN1, 3, {"fc1", "fc2", "head"}),
        (ResNet8, 2, {"stages.2", "head"}),
        (ResNet8, 3, {"stages.1", "stages.2", "head"}),
    ],
)
def test_the_last_layers_stay_or_travel(network: Any, count: int, names: set[str]) -> None:
    part = tuple(f"backbone.{name}." for name in names)
    per, rep, lg = (
        method(network, 10, **{option: count}).for_client(INFO)
        for method, option in ((FedPer, "private_layers"), (FedRep, "private_layers"), (LGFedAvg, "shared_layers"))
    )
    for module in (per, rep):
        assert module.private_names() == {name for name in module.state_dict() if name.startswith(part)}
    assert lg.shared_names() == {name for name in lg.state_dict() if name.startswith(part)}
    head, body = rep.phases()
    own = {name for name, p in rep.named_parameters() if any(p is q for q in head.parameters)}
    assert own == {name for name, _ in rep.named_parameters() if name.startswith(part)}
    assert len(head.parameters) + len(body.parameters) == len(list(rep.parameters()))


def test_the_buffers_of_a_head_stay_or_travel_with_it() -> None:
    """Those of its spectral norm; those of the body's batch norm belong to the body."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU(), spectral_norm(nn.Linear(8, CLASSES)))

    for method in (FedPer, FedRep, FedAS, FedBABU, LGFedAvg):
        module = method(network, CLASSES).for_client(INFO)
        head = {name for name in module.state_dict() if name.startswith("backbone.network.4.")}
        body = {name for name in module.state_dict() if name.startswith("backbone.")} - head
        assert len([name for name, _ in module.named_buffers() if name in head]) == 2
        assert module.shared_names() == (head if method is LGFedAvg else body)
    module = FedBABU(network, CLASSES).for_client(INFO)
    module.train()(torch.randn(4, 3, 4, 4))  # moves the vectors of the spectral norm
    module.load_shared_state(module.shared_state())
    assert same(dict(module.backbone.head.state_dict()), dict(module.initial_head.state_dict()))
    assert not module.private_names()


def test_last_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(FederationError, match="The last 6 layers of CNN1 were asked for, but it has 5"):
        FedPer(CNN1, 10, private_layers=6).for_client(INFO)
    with pytest.raises(FederationError, match="VisionTransformer does not end in its head, so that its last 2 layers"):
        FedPer(tiny_vit, CLASSES, private_layers=2).for_client(INFO)


@pytest.mark.parametrize("method", [FedPer, FedRep])
def test_heads_differ_and_bases_agree(method: type[FederatedModule]) -> None:
    one, other, _ = client_states(fit(method(Net, CLASSES, optimizer=momentum)))
    for name in one:
        assert torch.equal(one[name], other[name]) == (not name.startswith("backbone.head."))


def test_heads_agree_and_bases_differ_in_lg_fedavg() -> None:
    one, other, third = client_states(fit(LGFedAvg([Net, WideNet], CLASSES, optimizer=momentum)))
    assert all(torch.equal(one[name], other[name]) for name in ("backbone.head.weight", "backbone.head.bias"))
    assert not torch.equal(one["backbone.fc2.weight"], third["backbone.fc2.weight"])


def test_fedrep_trains_the_head_then_the_representation() -> None:
    model = FedRep(Net, CLASSES, optimizer=momentum, head_epochs=2, epochs=1)
    changed = phases_of(model)
    assert {phase.name: phase.epochs for phase in model.for_client(INFO).phases()} == {"head": 2, "representation": 1}
    assert list(changed) == ["head", "representation"]
    assert changed["head"] == {"backbone.head.weight", "backbone.head.bias"}
    assert changed["representation"] == {f"backbone.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")}


def test_fedbn_finds_norms_by_type() -> None:
    module = FedBN(ResNet8, 10).for_client(INFO)
    private = module.private_names()
    norms = [name for name, layer in module.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    assert "backbone.stages.1.downsample.1" in norms
    entries = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert private == {f"{norm}.{entry}" for norm in norms for entry in entries}
    assert count_floats(module.shared_state()) == 1_235_274 - 2_688


def test_fedbn_keeps_norms_apart() -> None:
    one, other, _ = client_states(fit(FedBN(NoisyNet, CLASSES, sgd)))
    for name in one:
        if name != "backbone.norm.num_batches_tracked":  # may agree by chance
            assert torch.equal(one[name], other[name]) == (not name.startswith("backbone.norm."))


def test_networks_that_share_other_layers_are_refused_before_the_first_round() -> None:
    module = LGFedAvg([Net, partial(Net, width=0.5)], CLASSES)
    with pytest.raises(
        FederationError, match=r"What client 1's network, Net, shares has 'backbone\.head\.weight' of shape \(4, 3\)"
    ):
        fit(module)
