"""PrefixTuning: what queries attend to, where the prefix comes from, and what is exported."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from often import mostly_slow
from tiny import CLASSES, TINY_VIT, new_data, new_federation, same
from tiny_vits import images, strong
from torch import Tensor

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.methods import PrefixTuning
from lightning_fed.models import VisionTransformer
from lightning_fed.storage.export.safetensors import write_safetensors

both_kinds = pytest.mark.parametrize("reparametrize", [True, False])
PREFIX = "backbone.network.vit.layers.{}.attention.prefix"


def built(**options: Any) -> PrefixTuning:
    module = PrefixTuning(**{"backbone": strong, "num_classes": CLASSES, "hidden": (3,), "length": 6} | options)
    module.configure_model()
    return module.eval()


def trained(**options: Any) -> PrefixTuning:
    """With a prefix of random numbers."""
    module = built(**options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".prefix." in name:
                parameter.normal_()
    return module


def attention_of(module: PrefixTuning, place: int = 0) -> Any:
    return module.backbone.network.vit.layers[place].attention


def by_heads(x: Tensor) -> Tensor:
    """``(…, heads, L, d / heads)`` of ``(…, L, d)``."""
    return x.unflatten(-1, (2, 4)).transpose(-2, -3)


# ---------------------------------------------------------------------------------------------------------------- attention


@both_kinds
def test_no_prefix_is_the_plain_network(reparametrize: bool) -> None:
    module, x = trained(length=0, reparametrize=reparametrize), images()
    assert torch.equal(module(x), module.networks.frozen[0].copy(CLASSES).eval()(x))
    module = trained(reparametrize=reparametrize)
    assert not torch.allclose(module(x), module.networks.frozen[0].copy(CLASSES).eval()(x), atol=1e-2)


@both_kinds
@pytest.mark.parametrize("place", [0, 1])
def test_queries_attend_to_prefix_and_sequence(place: int, reparametrize: bool) -> None:
    attention, x = attention_of(trained(reparametrize=reparametrize), place), torch.randn(3, 5, 8)
    query, key, value = (by_heads(layer(x)) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    own_keys, own_values = (by_heads(part).expand(3, 2, 6, 4) for part in attention.prefix())
    key, value = torch.cat([own_keys, key], dim=2), torch.cat([own_values, value], dim=2)
    weights = (query @ key.transpose(2, 3) / 4**0.5).softmax(dim=-1)
    expected = attention.o_proj((weights @ value).transpose(1, 2).flatten(2))
    output, _ = attention(x)
    assert output.shape == x.shape
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_part_of_the_attention_goes_to_the_prefix() -> None:
    """Read off where the prefix's values are 1 and all others 0."""
    attention = attention_of(trained(reparametrize=False))
    with torch.no_grad():
        attention.prefix.values.fill_(1)
        for parameter in attention.v_proj.parameters():
            parameter.zero_()
        attention.o_proj.weight.copy_(torch.eye(8))
        attention.o_proj.bias.zero_()
        share, _ = attention(torch.randn(3, 5, 8))
        assert (share > 0).all()
        assert (share < 1).all()
        assert share.std() > 1e-2
        attention.prefix.keys.zero_()
        attention.k_proj.weight.zero_()
        attention.k_proj.bias.zero_()
        torch.testing.assert_close(attention(torch.randn(3, 5, 8))[0], torch.full((3, 5, 8), 6 / 11))


@both_kinds
def test_sequences_stay_as_long_as_they_are(reparametrize: bool) -> None:
    module, noted = trained(reparametrize=reparametrize), []
    for block in module.backbone.network.vit.layers:
        block.register_forward_hook(lambda block, args, output: noted.append(output.shape))
    module(images())
    assert noted == [(5, 1 + 4, 8)] * 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_drops_out_in_training(dropout: float) -> None:
    config = TINY_VIT | {"initializer_range": 0.5, "attention_probs_dropout_prob": dropout}
    module, x = trained(backbone=partial(VisionTransformer, config=config)).train(), images()
    assert torch.equal(module(x), module(x)) == (dropout == 0)
    assert torch.equal(module.eval()(x), module(x))


def test_networks_without_a_prefix_attend_as_before() -> None:
    module = built()
    assert module.networks.frozen[0].copy(CLASSES).network.config._attn_implementation == "sdpa"
    assert module.backbone.network.config._attn_implementation != "sdpa"


def test_another_attention_is_refused() -> None:
    with pytest.raises(FederationError, match="attention is 'eager', but a prefix needs sdpa"):
        built(backbone=partial(strong, attention="eager"))
    built(backbone=partial(strong, attention="sdpa"))


# ------------------------------------------------------------------------------------------------------------------ the maps


def test_maps_make_keys_and_values_of_fixed_embeddings() -> None:
    module = trained()
    state = module.state_dict()
    embeddings = attention_of(module).prefix.embeddings
    assert embeddings.shape == (6, 8)
    for place in (0, 1):
        for part, found in zip(("key_maps", "value_maps"), attention_of(module, place).prefix(), strict=True):
            down, up = (state[f"{PREFIX.format(place)}.{part}.{layer}.weight"] for layer in (0, 2))
            assert (down.shape, up.shape) == ((3, 8), (8, 3))
            torch.testing.assert_close(found, torch.tanh(embeddings @ down.T) @ up.T)


def test_everybody_has_the_same_embeddings() -> None:
    modules = [built(hidden=(hidden,)) for hidden in (3, 5)]
    info = ClientInfo(3, 1, 0, 0, (1,) * CLASSES)
    modules += [modules[0].for_client(info, seed) for seed in (0, 1)]
    first = attention_of(modules[0]).prefix.embeddings
    assert first.std() > 0.5
    assert all(torch.equal(attention_of(module, place).prefix.embeddings, first) for module in modules for place in (0, 1))
    assert not any("embeddings" in name for name in modules[0].state_dict() if "prefix" in name)


# ------------------------------------------------------------------------------------------------------------------ training


@both_kinds
def test_prefix_and_head_are_trained(reparametrize: bool) -> None:
    module = built(reparametrize=reparametrize).train()
    learning = {name for name, p in module.named_parameters() if p.requires_grad}
    head = {f"backbone.network.classifier.{part}" for part in ("weight", "bias")}
    parts = ["key_maps.0.weight", "key_maps.2.weight", "value_maps.0.weight", "value_maps.2.weight"] if reparametrize else None
    assert learning == head | {f"{PREFIX.format(place)}.{part}" for place in (0, 1) for part in parts or ["keys", "values"]}
    assert learning == module.shared_names()
    module.client_loss((images(), torch.arange(5) % CLASSES)).backward()
    assert all(parameter.grad.any() for parameter in module.trainable())


# -------------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("client", mostly_slow([None, 0, 1], often={1}))
def test_the_export_has_keys_and_values_instead_of_maps(client: int | None) -> None:
    data, network = new_data(3), strong(CLASSES)

    def method() -> PrefixTuning:
        return PrefixTuning(lambda classes: copy.deepcopy(network), CLASSES, hidden=(3, 5), length=6)

    new_federation(1, "runs", evaluate_every=0).fit(method(), data)
    federation, model = new_federation(1, "runs"), method()
    federation.export(model, data, "exported", client)
    module = (federation.run.server_module() if client is None else federation.client_module(client)).eval()
    state = safetensors.torch.load_file(Path("exported/model.safetensors"))
    assert not any("maps" in name for name in state)
    assert state[f"{PREFIX.format(1).removeprefix('backbone.')}.keys"].shape == (6, 8)
    loaded, x = built(reparametrize=False), images()
    loaded.backbone.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module(x), rtol=0, atol=1e-6)
        assert not torch.allclose(module(x), network.eval()(x), atol=1e-2)


def test_without_maps_the_export_is_the_state_dict() -> None:
    module = trained(reparametrize=False)
    write_safetensors(Path("exported"), module)
    state = safetensors.torch.load_file(Path("exported/model.safetensors"))
    assert same(state, dict(module.backbone.state_dict()))
