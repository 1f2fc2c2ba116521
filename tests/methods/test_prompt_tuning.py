"""PromptTuning: where tokens stand, what becomes of them and how many values they train."""

from typing import Any

import pytest
import torch
from tiny import CLASSES
from tiny_vits import images, strong, vit_small
from torch import Tensor

from lightning_fed.methods import PromptTuning

both_depths = pytest.mark.parametrize("depth", ["deep", "shallow"])


def built(**options: Any) -> PromptTuning:
    module = PromptTuning(**{"backbone": strong, "num_classes": CLASSES, "tokens": (3,)} | options)
    module.configure_model()
    return module.eval()


def prompts(module: PromptTuning) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if name.endswith(".prompt.tokens")]


def lengths(module: PromptTuning, x: Tensor) -> list[int]:
    """Of the sequences that come out of the blocks."""
    noted: list[int] = []
    for block in module.backbone.network.vit.layers:
        block.register_forward_hook(lambda block, args, output: noted.append(output.shape[1]))
    module(x)
    return noted


# ------------------------------------------------------------------------------------------------------------------- output


@both_depths
def test_no_tokens_are_the_plain_network(depth: str) -> None:
    module, x = built(tokens=(0,), depth=depth), images()
    plain = module.networks.frozen[0].copy(CLASSES).eval()
    assert torch.equal(module(x), plain(x))
    module = built(depth=depth)
    assert not torch.allclose(module(x), module.networks.frozen[0].copy(CLASSES).eval()(x), atol=1e-2)


@both_depths
def test_a_sequence_has_the_class_the_patches_and_the_prompt(depth: str) -> None:
    assert lengths(built(depth=depth), images()) == [1 + 4 + 3] * 2
    assert lengths(built(depth=depth, tokens=(0,)), images()) == [1 + 4] * 2


def test_vit_small_has_197_tokens_and_the_prompt() -> None:
    with torch.device("meta"):
        module = built(backbone=vit_small, tokens=(16,))
        assert lengths(module, torch.empty(2, 3, 224, 224)) == [197 + 16] * 12


@both_depths
def test_blocks_get_the_tokens_behind_the_class(depth: str) -> None:
    module, x = built(depth=depth), images()
    plain = module.networks.frozen[0].copy(CLASSES).network.eval()
    hidden = plain.vit.embeddings(x)
    own = prompts(module)
    assert len(own) == (2 if depth == "deep" else 1)
    for place, block in enumerate(plain.vit.layers):
        if place == 0:
            hidden = torch.cat([hidden[:, :1], own[0].expand(5, 3, 8), hidden[:, 1:]], dim=1)
        elif depth == "deep":
            hidden = torch.cat([hidden[:, :1], own[place].expand(5, 3, 8), hidden[:, 4:]], dim=1)
        hidden = block(hidden)
    expected = plain.classifier(plain.vit.layernorm(hidden)[:, 0])
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_deep_with_the_same_tokens_is_not_shallow() -> None:
    deep, x = built(), images()
    shallow = PromptTuning(strong, CLASSES, tokens=(3,), depth="shallow")
    shallow.networks.frozen = deep.networks.frozen
    shallow.configure_model()
    with torch.no_grad():
        for tokens in [*prompts(deep), *prompts(shallow)]:
            tokens.copy_(prompts(deep)[0])
        shallow.backbone.head.load_state_dict(deep.backbone.head.state_dict())
    assert not torch.allclose(deep(x), shallow.eval()(x), atol=1e-2)


# ------------------------------------------------------------------------------------------------------------------ training


@both_depths
def test_tokens_and_head_are_trained(depth: str) -> None:
    module = built(depth=depth).train()
    learning = {id(p) for p in module.parameters() if p.requires_grad}
    assert learning == {id(p) for p in [*prompts(module), *module.backbone.head.parameters()]}
    assert len(module.shared_names()) == len(learning)
    module.client_loss((images(), torch.arange(5) % CLASSES)).backward()
    assert all(parameter.grad.any() for parameter in module.trainable())


def test_tokens_start_as_in_vpt() -> None:
    tokens = torch.cat(prompts(built(tokens=(2000,))))
    bound = (6 / (3 * 2 * 2 + 8)) ** 0.5
    assert tokens.abs().max().item() == pytest.approx(bound, rel=1e-2)
    assert tokens.abs().max() <= bound
    assert tokens.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
