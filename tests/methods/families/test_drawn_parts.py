"""What a pretrained model's files lack is drawn at random: it is trained, travels and is exported with what is fine-tuned."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from often import mostly_slow
from peft import PeftModel
from tiny import CLASSES, TINY_BERT, new_federation, new_method, new_texts, same

from lightning_fed.errors import FederationError
from lightning_fed.models import TransformerClassifier, TransformerLM
from lightning_fed.models.adapter_files import modules_of

POOLER = {"network.bert.pooler.dense.weight", "network.bert.pooler.dense.bias"}
HEAD = {"network.classifier.weight", "network.classifier.bias"}


@pytest.fixture
def without_pooler() -> str:
    """A folder with a BERT that was pretrained on masked words, for which nobody needs a pooler."""
    transformers.BertForMaskedLM(transformers.BertConfig(**TINY_BERT)).save_pretrained("bert")
    return "bert"


@pytest.fixture
def with_pooler() -> str:
    transformers.BertModel(transformers.BertConfig(**TINY_BERT)).save_pretrained("bert_with_pooler")
    return "bert_with_pooler"


def test_a_pooler_that_was_drawn_belongs_to_the_head(without_pooler: str, with_pooler: str) -> None:
    assert TransformerClassifier(CLASSES, without_pooler).head_names() == HEAD | POOLER
    assert TransformerClassifier(CLASSES, with_pooler).head_names() == HEAD


METHODS: dict[str, dict[str, Any]] = {
    "HOMLoRA": {},
    "PF2LoRA": {},
    "HETLoRA": {"r_min": 2, "r_max": 4},
    "PerFedAvgLoRA": {},
    "CentralizedLoRA": {},
    "SLoRA": {"sparse_rounds": 1, "target_modules": ["query", "value"]},
}


@pytest.mark.parametrize("name", mostly_slow(METHODS, often={"PF2LoRA", "SLoRA"}))
def test_it_is_trained_and_travels(name: str, without_pooler: str) -> None:
    backbone = partial(TransformerClassifier, name=without_pooler)
    federation = new_federation(2)
    federation.fit(new_method(name, backbone=backbone, **METHODS[name]), new_texts(3))
    module = federation.client_module(1)
    names = {f"backbone.{name}" for name in HEAD | POOLER}
    assert names <= module.shared_names()
    assert names <= federation.run.server.state.keys()
    fresh = new_method(name, backbone=backbone, **METHODS[name])
    fresh.networks.frozen = module.networks.frozen  # with the same numbers drawn
    fresh.configure_model()
    assert not any(torch.equal(federation.run.server.state[name], fresh.state_dict()[name]) for name in names)


@pytest.mark.parametrize("client", mostly_slow([None, 1], often={1}), ids=["server", "client"])
@pytest.mark.parametrize("name", mostly_slow(METHODS, often={"PF2LoRA", "SLoRA"}))
def test_the_exported_adapter_gives_the_same_logits_on_the_checkpoint(name: str, client: int | None, without_pooler: str) -> None:
    """Exactly, where one adapter acts alone; of two, the products are added in another order."""
    backbone, data = partial(TransformerClassifier, name=without_pooler), new_texts(3)
    federation, model = new_federation(2, "runs"), new_method(name, backbone=backbone, **METHODS[name])
    federation.fit(model, data)
    expected = (federation.run.server_module() if client is None else federation.client_module(client)).eval()
    federation.export(model, data, "exported", client)
    torch.manual_seed(7)  # what is drawn now is something else
    attention = expected.backbone.network.config._attn_implementation  # second derivatives take another one, with other last bits
    checkpoint = transformers.AutoModelForSequenceClassification.from_pretrained(
        without_pooler, num_labels=CLASSES, attn_implementation=attention
    )
    loaded = PeftModel.from_pretrained(checkpoint, "exported").eval()
    inputs = data.client(1).data[torch.arange(20)][0]
    with torch.no_grad():
        logits, ours = loaded(**inputs).logits, expected(inputs)
    if name == "PF2LoRA" and client is not None:
        torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(logits, ours)


def test_merged_weights_have_it(without_pooler: str) -> None:
    module = new_method("HOMLoRA", backbone=partial(TransformerClassifier, name=without_pooler))
    module.configure_model()
    with torch.no_grad():
        for name in sorted(module.shared_names()):
            module.get_parameter(name).normal_(std=0.3)
    module.export_merged(Path("merged"))
    inputs = new_texts(3).client(1).data[torch.arange(20)][0]
    merged = TransformerClassifier(CLASSES, "merged").eval()
    assert merged.head_names() == HEAD  # nothing is lacking now
    torch.testing.assert_close(merged(inputs), module.eval()(inputs), rtol=1e-5, atol=1e-5)


def test_an_untrained_head_is_exported_as_it_was_drawn(without_pooler: str) -> None:
    module = new_method("HOMLoRA", backbone=partial(TransformerClassifier, name=without_pooler), train_head=False)
    module.configure_model()
    assert all(".lora_" in name for name in module.shared_names())
    module.export_adapter(Path("exported"))
    torch.manual_seed(7)
    checkpoint = transformers.AutoModelForSequenceClassification.from_pretrained(without_pooler, num_labels=CLASSES)
    inputs = new_texts(3).client(1).data[torch.arange(20)][0]
    loaded = PeftModel.from_pretrained(checkpoint, "exported").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, module.eval()(inputs))


def test_a_language_models_head_is_drawn_where_the_files_have_none() -> None:
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False
    )
    transformers.GPT2Model(config).save_pretrained("gpt2")
    transformers.GPT2LMHeadModel(config).save_pretrained("gpt2_with_head")
    assert TransformerLM(name="gpt2").head_names() == {"network.lm_head.weight"}
    assert TransformerLM(name="gpt2_with_head").head_names() == set()


def test_the_fewest_modules_are_saved(without_pooler: str) -> None:
    network = TransformerClassifier(CLASSES, without_pooler).network
    names = {name for name, _ in network.named_parameters()}
    heads = {name for name in names if "pooler" in name or "classifier" in name}
    assert modules_of(heads, network) == ["bert.pooler", "classifier"]
    assert modules_of({"classifier.bias"}, network) == ["classifier"]
    assert modules_of(names, network) == ["bert", "classifier"]
    assert modules_of({"bert.pooler.dense.bias", "bert.pooler.dense.weight", "bert.embeddings.LayerNorm.bias"}, network) == [
        "bert.embeddings.LayerNorm",
        "bert.pooler",
    ]
    root = copy.deepcopy(network)
    root.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(FederationError, match="scale belongs to no layer"):
        modules_of({"scale"}, root)


def test_two_clients_do_not_share_what_was_drawn(without_pooler: str) -> None:
    """The body is in memory once; what is trained is each module's own."""
    method = new_method("HOMLoRA", backbone=partial(TransformerClassifier, name=without_pooler))
    data = new_texts(3)
    one, other = (method.for_client(client) for client in data.clients[:2])
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert same(one.shared_state(), one.shared_state())
    for name in ours:
        assert (ours[name] is theirs[name]) == (name not in one.shared_names()), name
