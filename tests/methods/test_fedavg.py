"""FedAvg against its paper."""

from functools import partial

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, WideNet, momentum, new_data, new_trainer, photos, same, sgd
from tiny_loops import stripped
from tiny_rounds import checked, fit
from torch.nn.functional import cross_entropy

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Server
from lightning_fed.data import IID, InMemory
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.models import CNN1


def test_clients_with_equal_data_average_to_each_of_them() -> None:
    """All examples are one and the same, so that their order is no difference either; 3 equal odd weights."""
    image = torch.randn(1, 3, 4, 4)

    def clients(number: int) -> InMemory:
        size = 9 * number
        images, labels = image.expand(size, -1, -1, -1), torch.full((size,), 2)
        return InMemory(images, labels, CLASSES, num_clients=number, partition=IID(), batch_size=3)

    assert [client.num_train for client in clients(3).clients] == [7, 7, 7]
    three, one = (fit(FedAvg(Net, CLASSES, momentum, epochs=2), clients(number)) for number in (3, 1))
    assert same(three.run.server.state_dict(), one.run.server.state_dict())
    assert not same(three.run.server.state_dict(), three.run.model.shared_state())


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


def test_the_order_of_clients_matters_by_no_more_than_rounding() -> None:
    module = FedAvg(Net, CLASSES)
    updates = [ClientUpdate(c.id, c.num_train, module.for_client(c).shared_state()) for c in new_data().clients]
    one, other = Server(updates[0].state), Server(updates[0].state)
    one.aggregate(updates)
    other.aggregate(reversed(updates))
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=1e-7, atol=1e-8)


def test_weights_are_training_examples() -> None:
    server = Server({"w": torch.zeros(1)})
    server.aggregate([ClientUpdate(0, 100, {"w": torch.tensor([1.0])}), ClientUpdate(1, 300, {"w": torch.tensor([2.0])})])
    assert server.state_dict()["w"].item() == (100 * 1 + 300 * 2) / 400


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


def test_an_update_that_diverged_leaves_the_server_as_it_was() -> None:
    server = Server({"w": torch.zeros(2)})
    good, bad = ClientUpdate(0, 1, {"w": torch.ones(2)}), ClientUpdate(1, 1, {"w": torch.tensor([1.0, torch.nan])})
    with pytest.raises(FederationError, match="update of client 1 holds NaN"):
        server.aggregate(checked(server, [good, bad]))
    assert server.state_dict()["w"].tolist() == [0, 0]
