"""Methods whose clients or servers go by the names of parameters, on a network in which one has two."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, new_data, sgd
from tiny_rounds import fit
from torch import nn

from lightning_fed.methods import APFL, MOON, SCAFFOLD, FedALA, FedDyn, FedNova


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
