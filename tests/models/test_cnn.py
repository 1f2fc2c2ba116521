"""The five networks of the pFedLoRA experiments."""

import pytest
import torch

from lightning_fed.errors import FederationError
from lightning_fed.models import CNN, CNN1, CNN2, CNN3, CNN4, CNN5


def expected_parameters(conv2: int, fc1: int, classes: int) -> int:
    """Weights and biases, layer by layer; after both poolings 5×5 pixels are left."""
    conv_1, conv_2 = 3 * 16 * 25 + 16, 16 * conv2 * 25 + conv2
    return conv_1 + conv_2 + (conv2 * 25 * fc1 + fc1) + (fc1 * 500 + 500) + (500 * classes + classes)


@pytest.mark.parametrize(
    ("network", "conv2", "fc1", "parameters_10", "parameters_100"),
    [
        (CNN1, 32, 2000, 2_621_558, 2_666_648),
        (CNN2, 16, 2000, 1_815_142, 1_860_232),
        (CNN3, 32, 1000, 1_320_558, 1_365_648),
        (CNN4, 32, 800, 1_060_358, 1_105_448),
        (CNN5, 32, 500, 670_058, 715_148),
    ],
)
def test_parameters(network: type[CNN], conv2: int, fc1: int, parameters_10: int, parameters_100: int) -> None:
    for classes, parameters in ((10, parameters_10), (100, parameters_100)):
        with torch.device("meta"):
            count = sum(p.numel() for p in network(classes).parameters())
        assert count == parameters == expected_parameters(conv2, fc1, classes)


@pytest.mark.parametrize("network", [CNN1, CNN2, CNN3, CNN4, CNN5])
def test_every_cut_divides_the_network(network: type[CNN]) -> None:
    model, x = network(10), torch.randn(2, 3, 32, 32)
    logits = model(x)
    assert logits.shape == (2, 10)
    assert list(model.cuts) == ["conv", "fc1", "features"]
    assert model.cuts["features"] == 500
    for cut, width in model.cuts.items():
        representation = model.encode(x, cut)
        assert representation.shape == (2, width)
        assert (representation >= 0).all()  # all cuts lie after a ReLU
        assert torch.equal(model.classify(representation, cut), logits)


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 32, 32), (3, 33, 33)])
def test_images_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FederationError, match=r"CNN3 got images of shape .* it is built for \(3, 32, 32\): set .*image_size"):
        CNN3()(torch.zeros(1, *shape))
