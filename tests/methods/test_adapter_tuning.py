"""AdapterTuning: where adapters act, what they compute and how many values they train."""

from typing import Any

import pytest
import torch
from tiny import CLASSES, same
from tiny_vits import images, strong
from torch import Tensor
from torch.nn.functional import gelu

from lightning_fed.methods import AdapterTuning

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


# ------------------------------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("bias", [False, True])
@every_placement
def test_it_starts_as_the_plain_network(placement: str, bias: bool) -> None:
    module = built(placement=placement, bias=bias)
    plain, x = module.networks.frozen[0].copy(CLASSES).eval(), images()
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
    for place, plain in enumerate(module.networks.frozen[0].copy(CLASSES).eval().network.vit.layers):
        name, block = f"backbone.network.vit.layers.{place}", module.backbone.network.vit.layers[place]
        inner = x + through(f"{name}.attention.o_proj", plain.attention(plain.layernorm_before(x))[0])
        expected = inner + through(f"{name}.mlp", plain.mlp(plain.layernorm_after(inner)))
        torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
        acted += not torch.allclose(block(x), plain(x), atol=1e-2)
    assert acted == 2


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
