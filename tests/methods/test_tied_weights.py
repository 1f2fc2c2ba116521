"""Methods whose clients or servers go by the names of parameters, on a network in which one has two."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, new_data, sgd
from tiny_rounds import fit, two_classes_each
from torch import Tensor, nn

from lightning_fed.core import ClippedMean, Median
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
    FedNova,
    FedPer,
    FedRep,
    LGFedAvg,
    PerFedAvg,
    PFedGate,
    SplitMix,
)
from lightning_fed.nn import running_statistics


class Tied(Net):
    """Its head has the weight of the layer below it."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=num_classes)
        self.fc2, self.head = nn.Linear(num_classes, num_classes), nn.Linear(num_classes, num_classes)
        self.head.weight = self.fc2.weight


@pytest.mark.parametrize("method", [APFL, FedALA, FedDyn, FedNova, MOON, partial(SCAFFOLD, server_lr=0.5)])
def test_a_tied_weight_is_one_under_both_of_its_names(method: Any) -> None:
    """With clients of different size, so that equal and unequal weights differ."""
    federation = fit(method(Tied, CLASSES, optimizer=sgd), new_data(3, 120, batch_size=8), rounds=2)
    server = federation.run.server.state_dict()
    assert torch.equal(server["backbone.fc2.weight"], server["backbone.head.weight"])
    exported = federation.client_module(0).export_state()
    assert torch.equal(exported["backbone.fc2.weight"], exported["backbone.head.weight"])


@pytest.mark.parametrize("method", [FedPer, FedRep, LGFedAvg, FedBABU])
def test_what_is_tied_to_the_head_goes_with_it(method: Any) -> None:
    """The head of FedPer would be sent under its other name, and come back as the mean."""
    module = fit(method(Tied, CLASSES, optimizer=sgd), new_data(2, 80), rounds=1).client_module(0)
    both = {"backbone.fc2.weight", "backbone.head.weight"}
    assert len(module.shared_names() & both) == (2 if method is LGFedAvg else 0)
    assert len(module.private_names() & both) == (2 if method in (FedPer, FedRep) else 0)


def test_what_is_tied_to_the_last_layers_belongs_to_them() -> None:
    network = Net()
    network.fc1.weight = network.head.weight
    assert network.last_layers(2) == {"fc1.weight", "fc2.weight", "fc2.bias", "head.weight", "head.bias"}


def test_rows_of_a_tied_head_are_averaged_over_the_clients_that_have_the_class() -> None:
    server = fit(SplitMix(Tied, CLASSES, bases=1, budgets=[1]), two_classes_each()).run.server.state_dict()
    assert torch.equal(server["bases.0.fc2.weight"], server["bases.0.head.weight"])


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
