"""Numbers of parameters of the networks in PF2LoRA's paper. Nothing is computed: the tensors have no storage."""

from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import tiny_transformer
from torch import Tensor

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods import HETLoRA, HOMLoRA, PF2LoRA
from lightning_fed.methods.families.lora import CLIENT, LoRAModule
from lightning_fed.methods.hetlora import HETLoRAServer
from lightning_fed.models.adapters import COMMON
from lightning_fed.models.frozen import FrozenBackbone
from lightning_fed.models.pretrained import transformer_of
from lightning_fed.models.transformer import TransformerClassifier
from lightning_fed.tensors import count_floats

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # peft, of each Conv1D of GPT-2, and sets it

Config = dict[str, Any]

roberta: Config = {
    "model_type": "roberta",
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
roberta_large = roberta | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
deberta: Config = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "max_relative_positions": -1,
    "position_biased_input": False,
}
gpt2_medium: Config = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
}
gpt2_xl = gpt2_medium | {"n_embd": 1600, "n_layer": 48, "n_head": 25}


def on_meta(method: type[LoRAModule], config: Config, num_classes: int = 2, **options: Any) -> LoRAModule:
    with torch.device("meta"):
        module = method(partial(TransformerClassifier, config=config), num_classes, **options)
        module.configure_model()
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    return module


def size(parameters: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in parameters.values())


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("config", "r", "client_r", "common", "both", "layers"),
    [
        (roberta, 8, 2, 294_912, 368_640, {"query", "value"}),
        pytest.param(roberta_large, 8, 2, 786_432, 983_040, {"query", "value"}, marks=pytest.mark.slow),
        (deberta, 8, 4, 294_912, 442_368, {"query_proj", "value_proj"}),
        (gpt2_medium, 4, 2, 393_216, 589_824, {"c_attn"}),
        pytest.param(gpt2_xl, 4, 2, 1_228_800, 1_843_200, {"c_attn"}, marks=pytest.mark.slow),
    ],
    ids=["roberta", "roberta-large", "deberta", "gpt2-medium", "gpt2-xl"],
)
def test_adapters_have_the_papers_sizes(config: Config, r: int, client_r: int, common: int, both: int, layers: set[str]) -> None:
    module = on_meta(PF2LoRA, config, r=r, client_r=client_r)
    adapters = {name: module.adapter(name) for name in (COMMON, CLIENT)}
    assert size(adapters[COMMON]) == common
    assert size(adapters[COMMON]) + size(adapters[CLIENT]) == both
    assert {name.split(".")[-4] for name in adapters[COMMON] | adapters[CLIENT]} == layers
    assert module.private_names() == adapters[CLIENT].keys()
    assert {name for name in module.shared_names() if ".lora_" in name} == adapters[COMMON].keys()


@pytest.mark.parametrize(("r", "count"), mostly_slow([(8, 294_912), (12, 442_368)], often={(12, 442_368)}))
def test_homloras_adapter_has_the_papers_size(r: int, count: int) -> None:
    module = on_meta(HOMLoRA, roberta, r=r, train_head=False)
    assert size(module.adapter(COMMON)) == count
    shared = {name: tensor for name, tensor in module.state_dict().items() if name in module.shared_names()}
    assert count_floats(shared) == count  # without the head, that is all that travels


def ranks_of(r_min: int, r_max: int, number: int) -> dict[int, int]:
    """The ranks of HETLoRA's clients, as a network of numbers has them."""
    method = HETLoRA(tiny_transformer, 2, r_min=r_min, r_max=r_max)
    method.configure_model()
    return method.configure_server(infos(number)).ranks


def infos(number: int) -> list[ClientInfo]:
    return [ClientInfo(client, 10, 0, 1, (5, 5)) for client in range(number)]


@pytest.mark.parametrize(
    ("config", "r_min", "r_max", "number", "mean"),
    [
        (roberta, 8, 12, 8, 350_208),
        pytest.param(roberta_large, 8, 12, 8, 933_888, marks=pytest.mark.slow),
        pytest.param(gpt2_medium, 6, 12, 8, 811_008, marks=pytest.mark.slow),
        pytest.param(deberta, 6, 14, 4, 331_776, marks=pytest.mark.slow),
    ],
    ids=["roberta", "roberta-large", "gpt2-medium", "deberta"],
)
def test_hetloras_payloads_have_the_papers_mean_size(config: Config, r_min: int, r_max: int, number: int, mean: int) -> None:
    module = on_meta(HETLoRA, config, r_min=r_min, r_max=r_max, train_head=False)
    state = {name: tensor for name, tensor in module.state_dict().items() if name in module.shared_names()}
    server = HETLoRAServer(state, ranks_of(r_min, r_max, number), r_min)
    sent = [count_floats(server.broadcast(client).state) for client in infos(number)]
    assert sum(sent) == mean * number
    assert min(sent) * r_max == count_floats(state) * r_min


@pytest.mark.parametrize(
    ("config", "classes", "count"),
    [(roberta, 2, 592_130), (roberta, 3, 592_899), (roberta_large, 2, 1_051_650), (gpt2_medium, 2, 2_048)],
    ids=["roberta-2", "roberta-3", "roberta-large", "gpt2-medium"],
)
def test_heads_have_the_papers_sizes(config: Config, classes: int, count: int) -> None:
    with torch.device("meta"):
        network = TransformerClassifier(classes, config=config)
    heads = network.head_names()
    assert size({name: p for name, p in network.named_parameters() if name in heads}) == count


def test_a_trained_head_travels_with_the_adapter() -> None:
    module = on_meta(HOMLoRA, roberta, num_classes=3)
    shared = {name: tensor for name, tensor in module.state_dict().items() if name in module.shared_names()}
    assert count_floats(shared) == 294_912 + 592_899
    assert {name for name, p in module.named_parameters() if p.requires_grad} == shared.keys()


# ----------------------------------------------------------------------------------------------------------------- copies


def test_copies_share_all_but_the_head() -> None:
    built = []

    def factory(num_classes: int) -> TransformerClassifier:
        built.append(tiny_transformer(num_classes))
        return built[-1]

    source = FrozenBackbone(factory, transformer_of)
    one, other = source.copy(3), source.copy(3)
    assert len(built) == 1
    heads = one.head_names()
    assert {name.split(".")[1] for name in heads} == {"classifier"}
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert (theirs[name] is parameter) == (name not in heads)
        assert parameter.requires_grad == (name in heads)
        assert torch.equal(theirs[name], parameter)


def test_logits_are_those_of_the_network() -> None:
    network = tiny_transformer(3).eval()
    ids = torch.tensor([[0, 5, 6, 1], [0, 7, 8, 9]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    logits = network(inputs)
    assert logits.shape == (2, 3)
    short = {name: tensor[:1, :3] for name, tensor in inputs.items()}
    torch.testing.assert_close(network(short), logits[:1])  # padding changes nothing


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_can_be_chosen(attention: str) -> None:
    assert tiny_transformer(3, attention=attention).network.config._attn_implementation == attention
