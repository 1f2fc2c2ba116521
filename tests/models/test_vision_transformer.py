"""Vision transformers: a backbone like any other, and a network to put something beside."""

from pathlib import Path
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, new_data, new_federation, new_method, tiny_vit
from tiny_vits import vit_small
from torch.nn.functional import interpolate

from lightning_fed.errors import FederationError
from lightning_fed.models import VisionTransformer
from lightning_fed.models.adapters import COMMON

HEAD = {"network.classifier.weight", "network.classifier.bias"}


def test_vit_small_has_the_papers_size() -> None:
    with torch.device("meta"):
        network = vit_small(10)
    assert sum(p.numel() for p in network.parameters()) == 21_669_514
    assert sum(p.numel() for p in network.head.parameters()) == 3_850
    assert network.cuts == {"features": 384}


def test_its_logits_are_those_of_the_transformers_library() -> None:
    network, images = tiny_vit(CLASSES).eval(), torch.randn(5, 3, 4, 4)
    logits = network(images)
    assert torch.equal(logits, network.network(pixel_values=images).logits)
    features = network.encode(images)
    assert features.shape == (5, 8)
    assert torch.equal(network.classify(features), logits)
    assert logits.shape == (5, CLASSES)


def test_images_are_resized_to_what_the_network_was_made_for() -> None:
    network, images = tiny_vit(CLASSES).eval(), torch.randn(5, 3, 9, 12)
    resized = interpolate(images, (4, 4), mode="bilinear", antialias=True)
    assert torch.equal(network(images), network(resized))
    assert network(images).shape == (5, CLASSES)


def test_the_head_is_where_the_library_has_it_and_nowhere_else() -> None:
    network = tiny_vit(CLASSES)
    assert network.head is network.network.classifier
    assert network.head_names() == HEAD
    tensors = [tensor.data_ptr() for tensor in network.state_dict().values()]
    assert len(tensors) == len(set(tensors))


@pytest.mark.parametrize("num_classes", [CLASSES, 7])
def test_pretrained_weights_come_from_a_folder(tmp_path: Path, num_classes: int) -> None:
    """A head for as many classes comes with them; for other numbers of classes there is a new one."""
    saved = tiny_vit(CLASSES).eval()
    saved.network.save_pretrained(tmp_path / "model")
    loaded = VisionTransformer(num_classes, name=str(tmp_path / "model"))
    assert all(module.training for module in loaded.modules())
    loaded.eval()
    images, theirs = torch.randn(5, 3, 4, 4), saved.state_dict()
    assert torch.equal(loaded.encode(images), saved.encode(images))
    assert loaded(images).shape == (5, num_classes)
    for name, tensor in loaded.state_dict().items():
        if name not in HEAD or num_classes == CLASSES:
            assert torch.equal(tensor, theirs[name])


def test_other_architectures_are_refused() -> None:
    """Their classifiers read something else than the first token."""
    config = {
        "model_type": "swin",
        "image_size": 8,
        "patch_size": 2,
        "embed_dim": 4,
        "depths": [1],
        "num_heads": [1],
        "window_size": 2,
    }
    with pytest.raises(FederationError, match="VisionTransformer got a network of model_type 'swin': give one of model_type 'vit'"):
        VisionTransformer(CLASSES, config=config)


# ---------------------------------------------------------------------------------------------------------------- methods


def test_fedavg_fine_tunes_all_of_it() -> None:
    federation = new_federation(1)
    federation.fit(new_method("FedAvg", backbone=tiny_vit), new_data(2, 100))
    before = federation.run.model.shared_state()
    trained = federation.run.server.state
    assert trained.keys() == before.keys() == {f"backbone.{name}" for name in tiny_vit(CLASSES).state_dict()}
    still = {name for name in trained if torch.equal(trained[name], before[name])}
    assert all(name.endswith("k_proj.bias") for name in still)  # a key's bias cancels in the softmax
    assert federation.run.history[0]["traffic/up_parameters"] == 2 * sum(tensor.numel() for tensor in trained.values())
    assert federation.run.history[0]["compute/flops"] > 0


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "name", mostly_slow(["FedPer", "FedRep", "LGFedAvg", "FedRoD", "PFedLoRA"], often={"LGFedAvg", "FedRoD", "PFedLoRA"})
)
def test_methods_that_cut_a_network_find_its_head(name: str) -> None:
    federation = new_federation(1, evaluate_every=0)
    federation.fit(new_method(name, backbone=tiny_vit), new_data(2, 100))
    heads = {f"backbone.{head}" for head in HEAD}
    whole = {f"backbone.{tensor}" for tensor in tiny_vit(CLASSES).state_dict()}
    travels = {
        "FedPer": whole - heads,
        "FedRep": whole - heads,
        "LGFedAvg": heads,
        "FedRoD": whole,
        "PFedLoRA": {f"adapter.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")},
    }
    assert federation.run.server.state.keys() == travels[name]
    first, second = (federation.client_module(client).state_dict() for client in range(2))
    own = {tensor for tensor in whole if not torch.equal(first[tensor], second[tensor])}
    assert (heads & own == set()) == (heads <= travels[name])


def test_lora_adapts_query_and_value_unless_told_otherwise() -> None:
    for options, layers in (({}, {"q_proj", "v_proj"}), ({"target_modules": ["k_proj", "fc1"]}, {"k_proj", "fc1"})):
        module = new_method("HOMLoRA", backbone=tiny_vit, **options)
        module.configure_model()
        assert {name.split(".")[-4] for name in module.adapter(COMMON)} == layers
        assert heads_of(module) == {f"backbone.{head}" for head in HEAD}


def heads_of(module: Any) -> set[str]:
    return module.shared_names() - module.adapter(COMMON).keys()
