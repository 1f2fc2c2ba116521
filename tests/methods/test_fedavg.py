"""FedAvg against its paper."""

from functools import partial

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, WideNet, momentum, new_data, new_trainer, photos, same, sgd
from tiny_loops import stripped
from tiny_rounds import fit
from torch.nn.functional import cross_entropy

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Server
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.models import CNN1


def test_without_local_epochs_nothing_changes() -> None:
    federation = fit(FedAvg(NoisyNet, CLASSES, epochs=0), rounds=3)
    assert same(federation.run.server.state_dict(), federation.run.model.shared_state())


def test_one_full_batch_step_is_a_centralized_step() -> None:
    """Double precision, unequal clients: the weighted mean of the clients' gradients is the gradient of all examples."""
    data = new_data(dtype=torch.float64, batch_size=1000)
    assert len({client.num_train for client in data.clients}) == 4
    federation = fit(FedAvg(Net, CLASSES, sgd), data, trainer=partial(new_trainer, precision="64-true"))

    network = federation.run.model.backbone.double()
    everybody = torch.cat([data.client(k).splits[0] for k in range(4)])
    cross_entropy(network(data.client(0).data.images[everybody]), data.client(0).data.labels[everybody]).backward()
    sgd(network.parameters()).step()
    torch.testing.assert_close(stripped(federation.run.server.state_dict()), network.state_dict(), rtol=0, atol=1e-12)


def test_uniform_weights() -> None:
    server = Server({"w": torch.zeros(1)}, weighting="uniform")
    server.aggregate([ClientUpdate(0, 100, {"w": torch.tensor([1.0])}), ClientUpdate(1, 300, {"w": torch.tensor([2.0])})])
    assert server.state_dict()["w"].item() == 1.5


def test_batch_norm_statistics_are_averaged_and_their_counter_takes_the_maximum() -> None:
    data = new_data(batch_size=16)
    federation = fit(FedAvg(NoisyNet, CLASSES, momentum), data)
    state = federation.run.server.state_dict()
    counter = state["backbone.norm.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.item() == max(len(data.client(k).train_dataloader()) for k in range(4))
    initial = federation.run.model.shared_state()
    assert not torch.equal(state["backbone.norm.running_mean"], initial["backbone.norm.running_mean"])
    assert not torch.equal(state["backbone.norm.running_var"], initial["backbone.norm.running_var"])


def test_everybody_holds_the_global_model_after_aggregation() -> None:
    federation = fit(FedAvg(NoisyNet, CLASSES, momentum), new_data())
    for client in range(4):
        module = federation.client_module(client)
        assert same(module.state_dict(), federation.run.server.state_dict())
        assert not module.private_state()


def test_different_networks_are_refused() -> None:
    with pytest.raises(FederationError, match="FedAvg got 2 different backbones"):
        fit(FedAvg([Net, WideNet], CLASSES))


def test_traffic_of_cnn1() -> None:
    """All 2,621,558 parameters, down and up."""
    data = photos(10, 2)
    row = fit(FedAvg(CNN1, 10, epochs=0), data).run.history[0]
    assert row["traffic/down_parameters"] == row["traffic/up_parameters"] == 2 * 2_621_558
    assert row["traffic/down_bytes"] == row["traffic/up_bytes"] == 2 * 4 * 2_621_558
