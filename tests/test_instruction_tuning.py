"""Instruction tuning learns what trl's SFTTrainer learns: token ids, masks, losses and weights."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from tiny import new_federation
from tiny_chats import MARKED, TINY_MODELS, UNMARKED, chats, save_chat_tokenizer, write_lines
from tiny_files import REAL, real

from lightning_fed.data import Instructions
from lightning_fed.data.text.chat import TEMPLATES
from lightning_fed.data.text.generation import IGNORED
from lightning_fed.methods import FedAvg, HOMLoRA
from lightning_fed.models import CausalLM

trl = pytest.importorskip("trl", reason="needs trl")
datasets = pytest.importorskip("datasets")

BATCH = 4

CHECKPOINTING = "activation_checkpointing" if hasattr(trl.SFTConfig, "activation_checkpointing") else "gradient_checkpointing"
"""What transformers 5.24 calls otherwise."""


def prompts(copies: int, of_text: bool) -> list[dict[str, Any]]:
    """The conversations as prompts and completions."""
    said = [record["messages"] for record in chats(copies)]
    if of_text:
        return [{"prompt": asked["content"] + " ", "completion": answer["content"]} for asked, answer in said]
    return [{"prompt": [asked], "completion": [answer]} for asked, answer in said]


FORMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "answers": ([{"messages": one["messages"]} for one in chats(2, 2)], {"learn": "answers"}, {"assistant_only_loss": True}),
    "all": ([{"messages": one["messages"]} for one in chats(2, 2)], {"learn": "all"}, {}),
    "messages": (prompts(2, of_text=False), {}, {}),
    "unmarked": (prompts(2, of_text=False), {"template": UNMARKED}, {}),
    "text": (prompts(2, of_text=True), {}, {}),
    "short": (prompts(2, of_text=False), {"max_length": 55}, {"max_length": 55}),
}
"""Records, and how we and trl are told what of them is learned."""


def ours(tmp_path: Path, records: list[Any], **options: Any) -> Instructions:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", options.pop("own", MARKED))
    path = write_lines(tmp_path / "records.jsonl", records)
    defaults: dict[str, Any] = {"num_clients": 1, "val_share": 0, "batch_size": BATCH, "test_share": 0.1}
    data = Instructions(path, tokenizer, **defaults | options)
    data.setup()
    return data


def theirs(tmp_path: Path, network: Any, records: list[Any], template: str = MARKED, tokenizer: Any = None, **options: Any) -> Any:
    """trl's trainer on these records, in this order."""
    tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "tokenizer", template))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    defaults: dict[str, Any] = {
        **{"output_dir": str(tmp_path / "trl"), "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "learning_rate": 1e-2},
        **{"lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "report_to": [], "use_cpu": True},
        **{"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "bf16": False},
        **{"train_sampling_strategy": "sequential", CHECKPOINTING: False},
    }
    config = trl.SFTConfig(**defaults | options)
    return trl.SFTTrainer(network, config, train_dataset=datasets.Dataset.from_list(records), processing_class=tokenizer)


def rows_of(labels: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(labels, mask, strict=True)]


def labels_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Our targets at their own tokens, as the library of theirs has them."""
    return torch.nn.functional.pad(batch["targets"][:, :-1], (1, 0), value=IGNORED)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", FORMS)
def test_token_ids_masks_and_loss_are_those_of_trl(form: str, side: str, tmp_path: Path) -> None:
    records, options, of_trl = FORMS[form]
    data = ours(tmp_path, records, padding=side, **options)
    network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**TINY_MODELS["llama"]))
    module = FedAvg(partial(CausalLM, name=network), 1)
    module.configure_model()
    trainer = theirs(tmp_path, network, records, options.get("template", MARKED), **of_trl)  # which changes the network's forward
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(BATCH)])
    batch = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert data._rows is not None
    own = data._rows.read(torch.arange(BATCH))
    assert rows_of(own["input_ids"], own["attention_mask"]) == rows_of(batch["input_ids"], batch["attention_mask"])
    first = batch["labels"].clone()
    first[:, 0] = IGNORED  # counts for nobody
    assert rows_of(labels_of(own), own["attention_mask"]) == rows_of(first, batch["attention_mask"])
    targets = own.pop("targets")
    torch.testing.assert_close(module.client_loss((own, targets)), network(**batch).loss, rtol=0, atol=2e-6)


def epoch(data: Instructions, module: Any) -> list[int]:
    """Train a client for an epoch; returns the order of its rows."""
    client = data.client(0)
    L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(
        module, client
    )
    order = torch.cat([inputs["example"] for inputs, _ in client.train_dataloader()])
    return order.tolist()


adam = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)


@pytest.mark.often(1)
@pytest.mark.often(3)
@pytest.mark.parametrize(
    ("kind", "accumulate", "packing"),
    [("llama", 1, False), ("gpt2", 4, False), ("qwen", 1, True), ("llama", 4, False), ("qwen", 4, False), ("gpt2", 1, True)],
)
def test_an_epoch_ends_with_the_weights_of_trl(kind: str, accumulate: int, packing: bool, tmp_path: Path) -> None:
    """One client alone, with batches of four rows a step or four of one row each; packed rows are kept apart."""
    records = [{"messages": one["messages"]} for one in chats(4, 2)]
    size = BATCH // accumulate
    data = ours(tmp_path, records, batch_size=size, packing=packing, single_example="keep")
    network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**TINY_MODELS[kind]))
    module = FedAvg(partial(CausalLM, name=network), 1, optimizer=adam, gradient_clip=1.0, accumulate=accumulate)
    order = epoch(data, module)
    steps = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate, "assistant_only_loss": True}
    trainer = theirs(tmp_path, network, [records[row] for row in order], **steps)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == -(-len(order) // BATCH)
    end, moved = module.backbone.network.state_dict(), 0.0
    for name, tensor in network.state_dict().items():
        difference = (end[name] - tensor).abs()
        if name.endswith("c_attn.bias"):
            difference = difference[torch.arange(48) // 16 != 1]  # a bias of keys changes nothing, and Adam steps by its rounding
        assert difference.max() <= 1e-5, name
        moved = max(moved, float((tensor - before[name]).abs().max()))
    assert moved > 1e-2


@pytest.mark.often(1)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_adapters_end_with_the_numbers_of_trl(accumulate: int, tmp_path: Path) -> None:
    """A federation of one client against a trainable peft model that begins with the adapters that the federation begins with."""
    from peft import PeftModel

    records = [{"messages": one["messages"]} for one in chats(4, 2)]
    size = BATCH // accumulate
    data = ours(tmp_path, records, batch_size=size, single_example="keep")
    network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**TINY_MODELS["llama"]))
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "steps": None, "epochs": 1}
    module = HOMLoRA(partial(CausalLM, name=network), 1, optimizer=adam, gradient_clip=1.0, accumulate=accumulate, **options)
    module.client = data.clients[0]
    module.configure_model()
    module.export_adapter(tmp_path / "start")
    order = epoch(data, module)
    module.export_adapter(tmp_path / "end")
    tuned = PeftModel.from_pretrained(network, tmp_path / "start", is_trainable=True)
    steps = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate, "assistant_only_loss": True}
    theirs(tmp_path, tuned, [records[row] for row in order], **steps).train()
    from safetensors.torch import load_file

    start, end = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("start", "end"))
    trained = {name.replace(".default", ""): tensor for name, tensor in tuned.state_dict().items() if ".lora_" in name}
    assert trained.keys() == end.keys()
    assert len(end) == 28
    for name, tensor in trained.items():
        torch.testing.assert_close(end[name], tensor, rtol=0, atol=1e-5)
        assert not torch.equal(end[name], start[name])


@real
@pytest.mark.slow
def test_a_pretrained_llama_learns_from_gsm8k_as_with_trl(tmp_path: Path) -> None:
    """Its tokenizer has neither a template nor a token for padding."""
    folder, lines = f"{REAL}/stories260k", Path(REAL, "instructions/gsm8k/test.jsonl").read_text().splitlines()[:24]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(lines))
    columns: Any = {"user": "question", "assistant": "answer"}
    data = Instructions(str(path), folder, None, columns, "plain", num_clients=1, val_share=0, batch_size=BATCH, max_length=512)
    data.setup()
    module = FedAvg(partial(CausalLM, name=folder), 1, optimizer=partial(adam, lr=1e-3), gradient_clip=1.0)
    order = epoch(data, module)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES["plain"]
    said = [json.loads(lines[row]) for row in order]
    asked = [{"role": "user", "content": one["question"]} for one in said]
    answered = [{"role": "assistant", "content": one["answer"]} for one in said]
    records = [{"messages": list(both)} for both in zip(asked, answered, strict=True)]
    options = {"assistant_only_loss": True, "max_length": 512, "learning_rate": 1e-3}
    theirs(tmp_path, network, records, tokenizer=tokenizer, **options).train()
    torch.testing.assert_close(module.backbone.network.state_dict(), network.state_dict(), rtol=0, atol=1e-5)


def test_what_is_measured_is_the_loss_of_the_answers_tokens(tmp_path: Path) -> None:
    """By default nothing is generated; on demand, to as many examples as asked for."""
    data = ours(tmp_path, chats(6), test_share=0.3, eval_batch_size=3)
    network = partial(CausalLM, config=TINY_MODELS["llama"])
    module = FedAvg(network, 1, epochs=0)
    federation = new_federation(1)
    federation.fit(module, data)
    assert federation.run.metric == "perplexity"
    result = federation.run.results[0]
    trained = federation.client_module(0)
    losses = []
    for inputs, targets in data.client(0).test_dataloader():
        logits = trained.backbone.network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")[targets != IGNORED])
    mean = torch.cat(losses).mean().detach()
    assert result["test/loss"] == pytest.approx(float(mean), rel=1e-5)
    assert result["test/perplexity"] == pytest.approx(float(mean.exp()), rel=1e-5)
    assert not any("exact_match" in name for name in result)
