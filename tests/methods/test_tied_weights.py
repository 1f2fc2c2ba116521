"""Methods whose clients or servers go by the names of parameters, on a network in which one has two."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, new_data, same, sgd
from tiny_rounds import fit, two_classes_each
from torch import Tensor, nn

from lightning_fed.core import ClippedMean, FederationError, Median
from lightning_fed.methods import (
    APFL,
    MOON,
    SCAFFOLD,
    FedALA,
    FedAvg,
    FedBABU,
    FedBN,
    FedDecomp,
    FedDyn,
    FedHM,
    FedHMDelta,
    FedKD,
    FedNova,
    FedPer,
    FedRep,
    Floco,
    LGFedAvg,
    PerFedAvg,
    PFedGate,
    SplitMix,
)
from lightning_fed.nn import running_statistics
from lightning_fed.privacy import ClientDP


class Tied(Net):
    """Its head has the weight of the layer below it."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=num_classes)
        self.fc2, self.head = nn.Linear(num_classes, num_classes), nn.Linear(num_classes, num_classes)
        self.head.weight = self.fc2.weight


def test_a_mixture_of_heads_needs_one_of_its_own() -> None:
    with pytest.raises(FederationError, match=r"which is fc2.weight, too"):
        Floco(Tied, CLASSES, 2).for_client(INFO)


@pytest.mark.parametrize("method", [APFL, FedALA, FedDyn, FedKD, FedNova, MOON, partial(SCAFFOLD, server_lr=0.5)])
def test_a_tied_weight_travels_once_and_is_one_under_both_of_its_names(method: Any) -> None:
    """With clients of different size, so that equal and unequal weights differ."""
    federation = fit(method(Tied, CLASSES, optimizer=sgd), new_data(3, 120, batch_size=8), rounds=2)
    sent = [name for name in federation.run.server.state_dict() if name.endswith(("fc2.weight", "head.weight"))]
    assert sent
    assert all(name.endswith("fc2.weight") for name in sent)
    for private in (True, False):
        exported = federation.client_module(0).export_state(private)
        heads = [name for name in exported if name.endswith("head.weight")]
        assert heads
        assert all(torch.equal(exported[name], exported[name.replace("head", "fc2")]) for name in heads)


@pytest.mark.parametrize("method", [FedPer, FedRep, LGFedAvg, FedBABU])
def test_what_is_tied_to_the_head_goes_with_it(method: Any) -> None:
    """The head of FedPer would be sent under its other name, and come back as the mean."""
    module = fit(method(Tied, CLASSES, optimizer=sgd), new_data(2, 80), rounds=1).client_module(0)
    assert ("backbone.fc2.weight" in module.shared_state()) == (method is LGFedAvg)
    assert ("backbone.fc2.weight" in module.private_state()) == (method in (FedPer, FedRep))
    assert "backbone.head.weight" not in module.shared_state() | module.private_state()


class SharesTheHead(FedAvg):
    """Goes by names, of which a tied weight has two."""

    def shared_names(self) -> set[str]:
        return {name for name in super().shared_names() if name.startswith("backbone.head.")}


def test_a_weight_is_shared_if_one_of_its_names_is() -> None:
    module = fit(SharesTheHead(Tied, CLASSES, optimizer=sgd), new_data(2, 80), rounds=1).client_module(0)
    assert module.shared_state().keys() == {"backbone.fc2.weight", "backbone.head.bias"}
    assert module.private_state().keys() == {"backbone.fc1.weight", "backbone.fc1.bias", "backbone.fc2.bias"}
    assert module.export_state(private=False).keys() == {*module.shared_state(), "backbone.head.weight"}


@pytest.mark.parametrize("options", [{}, {"privacy": ClientDP(clip=0.2, delta=0.1, noise_multiplier=0.0)}])
def test_a_run_continues_and_another_starts_from_a_tied_network(options: dict[str, Any], tmp_path: Path) -> None:
    """Under client-level privacy, too."""
    whole = fit(FedAvg(Tied, CLASSES, optimizer=sgd), new_data(3, 120), rounds=2, **options)
    for rounds in (1, 2):
        run = fit(FedAvg(Tied, CLASSES, optimizer=sgd), new_data(3, 120), rounds=rounds, run_dir=tmp_path, **options).run
    assert same(run.server.state_dict(), whole.run.server.state_dict())
    next_one = fit(FedAvg(Tied, CLASSES, epochs=0), new_data(3, 120), init_from=run.folder)
    assert same(next_one.run.server.state_dict(), run.server.state_dict())


def test_what_is_tied_to_the_last_layers_belongs_to_them() -> None:
    network = Net()
    network.fc1.weight = network.head.weight
    assert network.last_layers(2) == {"fc1.weight", "fc2.weight", "fc2.bias", "head.weight", "head.bias"}


def test_rows_of_a_tied_head_are_averaged_over_the_clients_that_have_the_class() -> None:
    federation = fit(SplitMix(Tied, CLASSES, bases=1, budgets=[1]), two_classes_each())
    assert "bases.0.head.weight" not in federation.run.server.state_dict()
    network = federation.client_module(0).state_dict()
    assert torch.equal(network["bases.0.fc2.weight"], network["bases.0.head.weight"])


class Looped(Net):
    """Applies the same layers twice."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = self._modules.pop("head")  # the last layer again

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        return self.head(self.block(self.block(representation)))


class Twice(Looped):
    """The same network, whose layers have a second name."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes)
        self.again = self.block
        self.head = self._modules.pop("head")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in (APFL, partial(FedALA, mixed_layers=3), FedBN, FedDecomp, MOON)),
        (partial(PerFedAvg, steps=2), {}),
        (partial(PFedGate, input_shape=(3, 4, 4)), {}),
        *((FedAvg, {"aggregation": rule}) for rule in (Median(), ClippedMean(0.1))),
    ],
)
def test_layers_with_a_second_name_learn_as_with_one(method: Any, options: dict[str, Any]) -> None:
    """torch leaves the values of a functional call in such layers: they would no longer learn. Under a second name, what is private
    would be sent, and statistics would be parameters.
    """
    once, twice = (fit(method(net, CLASSES, optimizer=sgd), new_data(2, 60), rounds=2, **options) for net in (Looped, Twice))
    own, other = (federation.client_module(1).state_dict() for federation in (once, twice))
    assert all(torch.equal(other[name], tensor) for name, tensor in own.items())
    sent = once.run.server.state_dict().keys()
    assert {name.replace("again", "block") for name in twice.run.server.state_dict()} == sent


def test_static_statistics_are_gathered_under_every_name() -> None:
    assert {name.partition(".")[0] for name in running_statistics(Twice())} == {"block", "again"}


def test_what_feddecomp_exports_predicts_the_same_in_the_user_s_network() -> None:
    """Its layers have one weight, and had low-rank parts of their own."""
    module = fit(FedDecomp(Tied, CLASSES, optimizer=sgd), new_data(2, 60), rounds=2).client_module(0).eval()
    loaded, x = Tied(CLASSES).eval(), torch.randn(5, 3, 4, 4)
    loaded.load_state_dict({name.removeprefix("backbone."): tensor for name, tensor in module.export_state().items()})
    with torch.no_grad():
        assert torch.equal(loaded(x), module(x))


@pytest.mark.parametrize(
    ("network", "layers", "said"),
    [
        (Tied, ["fc1", "fc2"], "Layer 'fc2' shares its weight with 'head', expected one of its own to factorize: name only"),
        (Tied, ["head"], "Layer 'head' shares its weight with 'fc2', expected one of its own to factorize: name only"),
        (Twice, ["block.0"], "Layer 'block.0' shares its weight with 'again.0', expected one of its own to factorize: name only"),
    ],
)
@pytest.mark.parametrize("method", [FedHM, FedHMDelta])
def test_a_layer_that_is_tied_or_repeated_is_not_factorized(method: Any, network: Any, layers: list[str], said: str) -> None:
    data = new_data(2, 60)
    with pytest.raises(FederationError, match=said):
        fit(method(network, CLASSES, ratios=[1.0, 0.5], layers=layers), data)
    fit(method(network, CLASSES, ratios=[1.0, 0.5], layers=["fc1"]), data, rounds=1)
