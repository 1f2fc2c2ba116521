"""AdapterTuning: where adapters act, what they compute and how many values they train."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, TINY_VIT, same
from torch import Tensor
from torch.nn.functional import gelu

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods import AdapterTuning
from lightning_fed.models import VisionTransformer
from lightning_fed.tensors import count_floats

strong = partial(VisionTransformer, config=TINY_VIT | {"initializer_range": 0.5})
"""With weights so large that all parts of it matter."""
VIT_SMALL = {"model_type": "vit", "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
vit_small = partial(VisionTransformer, config=VIT_SMALL)
every_placement = pytest.mark.parametrize("placement", ["attention", "mlp", "both"])


def built(**options: Any) -> AdapterTuning:
    module = AdapterTuning(**{"backbone": strong, "num_classes": CLASSES, "hidden": (3,)} | options)
    module.configure_model()
    return module.eval()


def trained(**options: Any) -> AdapterTuning:
    """With random numbers in its adapters."""
    module = built(**options)
    with torch.no_grad():
        for parameter in adapters(module).values():
            parameter.normal_()
    return module


def adapters(module: AdapterTuning) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if ".adapter." in name}


def images(number: int = 5) -> Tensor:
    return torch.randn(number, 3, 4, 4)


# ------------------------------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("bias", [False, True])
@every_placement
def test_it_starts_as_the_plain_network(placement: str, bias: bool) -> None:
    module = built(placement=placement, bias=bias)
    plain, x = module.frozen_backbones[0].copy(CLASSES).eval(), images()
    assert torch.equal(module(x), plain(x))
    assert not torch.allclose(trained(placement=placement, bias=bias)(x), plain(x), atol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
@every_placement
def test_adapters_act_before_the_residual_sums(placement: str, bias: bool) -> None:
    module = trained(placement=placement, bias=bias)
    state = module.state_dict()

    def through(name: str, h: Tensor) -> Tensor:
        if f"{name}.adapter.up.weight" not in state:
            return h
        b, b_out = (state[f"{name}.adapter.{side}.bias"] if bias else 0 for side in ("down", "up"))
        return h + gelu(h @ state[f"{name}.adapter.down.weight"].T + b) @ state[f"{name}.adapter.up.weight"].T + b_out

    x, acted = torch.randn(2, 5, 8), 0
    for place, plain in enumerate(module.frozen_backbones[0].copy(CLASSES).eval().network.vit.layers):
        name, block = f"backbone.network.vit.layers.{place}", module.backbone.network.vit.layers[place]
        inner = x + through(f"{name}.attention.o_proj", plain.attention(plain.layernorm_before(x))[0])
        expected = inner + through(f"{name}.mlp", plain.mlp(plain.layernorm_after(inner)))
        torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
        acted += not torch.allclose(block(x), plain(x), atol=1e-2)
    assert acted == 2


def test_a_copy_has_adapters_of_its_own() -> None:
    module, x = trained(), images()
    before = module(x)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in adapters(copied).values():
            parameter.zero_()
    assert torch.equal(module(x), before)
    assert torch.equal(copied(x), module.frozen_backbones[0].copy(CLASSES).eval()(x))


# ------------------------------------------------------------------------------------------------------------------ training


@every_placement
def test_adapters_and_head_are_trained(placement: str) -> None:
    module = built(placement=placement)
    learning = {name for name, p in module.named_parameters() if p.requires_grad}
    assert learning == adapters(module).keys() | {f"backbone.network.classifier.{part}" for part in ("weight", "bias")}
    assert learning == module.shared_names()
    assert len(adapters(module)) == 2 * 2 * (2 if placement == "both" else 1)
    assert not any("layernorm" in name for name in learning)
    module = trained(placement=placement).train()
    module.client_loss((images(), torch.arange(5) % CLASSES)).backward()
    assert all(parameter.grad.any() for parameter in module.trainable())


def test_up_is_zero_and_down_is_not() -> None:
    for name, parameter in adapters(built(bias=True)).items():
        assert parameter.any() == (".down." in name)
    one, other = built(), built()
    assert not same(adapters(one), adapters(other))


@pytest.mark.parametrize(
    ("hidden", "options", "count"),
    [
        (8, {}, 73_728),
        pytest.param(16, {}, 147_456, marks=pytest.mark.slow),
        pytest.param(32, {}, 294_912, marks=pytest.mark.slow),
        pytest.param(64, {}, 589_824, marks=pytest.mark.slow),
        pytest.param(8, {"placement": "attention"}, 73_728, marks=pytest.mark.slow),
        pytest.param(8, {"placement": "both"}, 147_456, marks=pytest.mark.slow),
        pytest.param(8, {"bias": True}, 78_432, marks=pytest.mark.slow),
        (8, {"placement": "both", "bias": True}, 156_864),
    ],
)
def test_what_vit_small_trains(hidden: int, options: dict[str, Any], count: int) -> None:
    method = AdapterTuning(vit_small, 10, hidden=(8, 16, 32, 64), **options)
    with torch.device("meta"):
        module = method.for_client(ClientInfo(0, 1, 0, 0, (1,) * 10, model_size=hidden))
    shared = {name: tensor for name, tensor in module.state_dict().items() if name in module.shared_names()}
    assert count_floats(shared) == count + 3850
    assert sum(p.numel() for p in adapters(module).values()) == count
