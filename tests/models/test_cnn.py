"""The five networks of the pFedLoRA experiments."""

import pytest
import torch

from lightning_fed.errors import FederationError
from lightning_fed.models import CNN, CNN1, CNN2, CNN3, CNN4, CNN5


@pytest.mark.parametrize(
    ("network", "parameters"),
    [(CNN1, 2_621_558), (CNN2, 1_815_142), (CNN3, 1_320_558), (CNN4, 1_060_358), (CNN5, 670_058)],
)
def test_parameters(network: type[CNN], parameters: int) -> None:
    for classes in (10, 100):
        with torch.device("meta"):
            assert sum(p.numel() for p in network(classes).parameters()) == parameters + 501 * (classes - 10)


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
