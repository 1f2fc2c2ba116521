"""Networks of two convolutions, and the MLP with two softmaxes."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

from lightning_fed.errors import FederationError
from lightning_fed.models import FedAvgCNN, FedProtoCNN, LeNet5, SmallCNN, SoftmaxMLP

PUBLISHED = [
    (LeNet5, {"channels": 1, "image_size": 28}, 44_426),
    (LeNet5, {}, 62_006),
    (FedAvgCNN, {"channels": 1, "image_size": 28}, 582_026),
    (FedAvgCNN, {}, 878_538),
    (FedProtoCNN, {"channels": 1, "image_size": 28}, 21_840),
    (SoftmaxMLP, {"inputs": 784, "hidden": [512, 256, 256, 128]}, 633_226),
]
"""How many parameters the codes have that these networks are of."""

GREY = {"channels": 1, "image_size": 28}


@pytest.mark.parametrize(("network", "settings", "parameters"), PUBLISHED)
def test_parameters(network: type[nn.Module], settings: dict[str, int], parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in network(10, **settings).parameters()) == parameters


@pytest.mark.parametrize("filters", [18, 22])
def test_fedprotos_networks_differ_in_filters(filters: int) -> None:
    network = FedProtoCNN(10, filters=filters, **GREY)
    expected = (10 * 25 + 10) + (10 * filters * 25 + filters) + (16 * filters * 50 + 50) + (50 * 10 + 10)
    assert sum(p.numel() for p in network.parameters()) == expected
    assert network.cuts == {"features": 50}  # equally wide, so that prototypes can be averaged


@pytest.mark.parametrize("network", [LeNet5, FedAvgCNN, FedProtoCNN])
def test_pooling_first_changes_no_value_and_no_gradient(network: type[SmallCNN]) -> None:
    torch.manual_seed(0)
    model, x = network(10, **GREY).eval(), torch.randn(3, 1, 28, 28)
    hidden = [getattr(model, name) for name in ("fc1", "fc2") if hasattr(model, name)]

    def as_written() -> torch.Tensor:
        z = max_pool2d(relu(model.conv1(x)), 2)
        z = max_pool2d(relu(model.conv2(z)), 2).flatten(1)
        for layer in hidden:
            z = relu(layer(z))
        return model.head(z)

    expected = torch.autograd.grad(as_written().square().sum(), list(model.parameters()))
    assert torch.equal(model(x), as_written())
    assert all(map(torch.equal, torch.autograd.grad(model(x).square().sum(), list(model.parameters())), expected))
    assert torch.equal(model.classify(model.encode(x)), model(x))


def test_dropout_is_for_training_and_leaves_the_representation_whole() -> None:
    model, x = FedProtoCNN(10, **GREY), torch.rand(4, 1, 28, 28)
    model.between.p = 0.0
    assert torch.equal(model.encode(x), model.encode(x))
    assert not torch.equal(model(x), model(x))
    model.between.p = 0.5
    assert not torch.equal(model.encode(x), model.encode(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_width_makes_them_narrower() -> None:
    assert [tuple(p.shape) for p in LeNet5(10, width=0.5).parameters()][::2] == [
        (3, 3, 5, 5),
        (8, 3, 5, 5),
        (60, 200),
        (42, 60),
        (10, 42),
    ]
    assert FedAvgCNN(10, width=0.25).head.in_features == 128


@pytest.mark.parametrize("network", [LeNet5, FedAvgCNN, FedProtoCNN])
def test_images_of_another_shape_are_refused(network: type[SmallCNN]) -> None:
    said = rf"{network.__name__} got images of shape \(3, 28, 28\), it is built for \(1, 28, 28\): set channels"
    with pytest.raises(FederationError, match=said):
        network(10, **GREY)(torch.zeros(1, 3, 28, 28))
    with pytest.raises(FederationError, match=r"got image_size=15: .* need 16"):
        network(10, image_size=15)
    assert network(10, image_size=16)(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


def test_a_second_softmax_bounds_the_loss_from_below() -> None:
    network = SoftmaxMLP(10, inputs=4, hidden=[5])
    probabilities = network(torch.randn(6, 4))
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(6))
    sure = torch.eye(10)
    assert cross_entropy(sure, torch.arange(10)).item() == pytest.approx(math.log(1 + 9 / math.e))
