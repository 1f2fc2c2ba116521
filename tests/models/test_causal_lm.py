"""Causal language models of any size: what they compute of a batch, how they are loaded, and when they generate."""

import math
import pickle
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY_BERT, new_federation, new_trainer
from tiny_chats import MARKED, TINY_MODELS, chats, save_chat_tokenizer, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightning_fed.methods
from lightning_fed.core import ClientInfo, ClientUpdate, flops
from lightning_fed.core.flops import _count, _train
from lightning_fed.data import Instructions
from lightning_fed.deployment.site import OneClient, Site
from lightning_fed.deployment.wire import VerbSettings
from lightning_fed.engines import Processes
from lightning_fed.engines.preflight.mixed_tokens import refuse_mixed_tokens
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.methods import Ditto, FedAvg, FedExLoRA, HOMLoRA, PF2LoRA
from lightning_fed.models import Adapters, CausalLM
from lightning_fed.models.adapter_files import merged_weights
from lightning_fed.models.adapters import COMMON

tiny = partial(CausalLM, config=TINY_MODELS["llama"])


def new_data(tmp_path: Path, **options: Any) -> Instructions:
    path = write_lines(tmp_path / "chats.jsonl", chats(6, 2))
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    return Instructions(path, tokenizer, **{"num_clients": 2, "batch_size": 4, "test_share": 0.3, "eval_batch_size": 2} | options)


def batch_of(data: Instructions) -> Any:
    return next(iter(data.client(0).test_dataloader()))


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_logits_of_what_is_learned_are_those_of_the_whole(kind: str, tmp_path: Path) -> None:
    network = CausalLM(config=TINY_MODELS[kind]).eval()
    for side in ("right", "left"):
        inputs, targets = batch_of(new_data(tmp_path, padding=side))
        whole = network(inputs)  # (B, V, L)
        selected, learned = network.select_learned(inputs, targets)
        torch.testing.assert_close(network(selected), whole.transpose(1, 2)[targets != -100])
        assert torch.equal(learned, targets[targets != -100])
    assert whole.shape == (*targets.shape[:1], 264, *targets.shape[1:])


def test_batches_as_collators_of_the_library_make_them(tmp_path: Path) -> None:
    inputs, targets = batch_of(new_data(tmp_path))
    labels = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=-100)
    module = FedAvg(tiny, 1)
    module.configure_model()
    names = ("input_ids", "attention_mask")
    batch = {name: inputs[name] for name in names} | {"labels": labels}
    torch.testing.assert_close(module.client_loss(batch), module.backbone.network(**batch).loss)


def test_checkpointing_computes_the_same_gradients(tmp_path: Path) -> None:
    batch, gradients = batch_of(new_data(tmp_path)), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        backbone = partial(tiny, gradient_checkpointing=checkpointing)
        module = FedAvg(backbone, 1, adapters=Adapters(r=2, target_modules="all-linear"))
        module.configure_model()
        module.client_loss(batch).backward()
        gradients.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert pickle.loads(pickle.dumps(module.backbone)).network.is_gradient_checkpointing  # it reaches worker processes


def test_fedex_lora_corrects_the_mean_in_the_transposed_layers_of_gpt2() -> None:
    model = FedExLoRA(partial(CausalLM, config=TINY_MODELS["gpt2"]), 1, r=2, target_modules="all-linear")
    model.configure_model()
    clients = [ClientInfo(k, 8, 0, 2, ()) for k in range(2)]
    server = model.configure_server(clients)
    torch.manual_seed(0)
    updates = [ClientUpdate(k, 1, {name: torch.randn_like(tensor) for name, tensor in server.state.items()}) for k in range(2)]
    weights = []
    for update in updates:
        model.load_shared_state(update.state)
        weights.append(merged_weights(model.backbone))
    server.aggregate(iter(updates))
    client = model.for_client(clients[0])
    client.load_broadcast(server.broadcast(clients[0]))
    merged = merged_weights(client.backbone)
    assert len(merged) == 8
    for name, weight in merged.items():
        torch.testing.assert_close(weight, (weights[0][name] + weights[1][name]) / 2, msg=name)


@pytest.mark.parametrize("method", ["APFL", "PerFedAvg", "PerFedAvgLoRA", "PF2LoRA"])
def test_checkpointing_is_refused_where_a_network_computes_with_other_values(method: str, tmp_path: Path) -> None:
    """In the backward pass it would compute with its own: gradients were others, or zero."""
    adapters = {"adapters": Adapters(r=2, target_modules="all-linear")} if method in ("APFL", "PerFedAvg") else {"r": 2}
    model = getattr(lightning_fed.methods, method)(partial(tiny, gradient_checkpointing=True), 1, **adapters)
    with pytest.raises(FederationError, match=r"The network has gradient_checkpointing, .*: leave gradient_checkpointing out\."):
        new_federation(1).fit(model, new_data(tmp_path))


@pytest.mark.parametrize("options", [{"padding": "left"}, {"packing": True}, {"accumulate": 2}], ids=str)
def test_flops_are_counted_without_values_and_with_them_alike(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(options)
    model = HOMLoRA(tiny, 1, r=2, accumulate=options.pop("accumulate", 1))
    model.configure_model()
    model.phase = model.phases()[0]
    batches = [batch for batch, _ in zip(new_data(tmp_path, **options).client(0).train_dataloader(), range(2), strict=False)]
    step = batches * 2 if model.accumulate > 1 else batches[0]
    with_values = _count(model, step, _train, math.inf)
    monkeypatch.setattr(flops, "_real_copy", None)
    assert _count(model, step, _train, 0) == with_values > 0


def test_flops_of_a_mixture_are_those_of_the_experts_that_a_token_has() -> None:
    """They are chosen by values, and computed by a fused kernel."""
    costs, (width, inner, layers) = [], (16, 24, 2)
    sizes = {"vocab_size": 8, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 2} | sizes
    inputs = {"input_ids": torch.arange(8).view(2, 4), "attention_mask": torch.ones(2, 4).long()}
    for chosen in (1, 2):
        model = FedAvg(partial(CausalLM, config=mixture | {"num_experts_per_tok": chosen}), 1)
        model.configure_model()
        model.phase = model.phases()[0]
        costs.append(_count(model, (inputs, torch.arange(8).view(2, 4)), _train, 0))
    assert costs[1] - costs[0] == 3 * layers * (2 * 8 * 3 * width * inner)  # of three matrices, forward and twice backward


def test_weights_of_half_precision_train_adapters_of_single_precision(tmp_path: Path) -> None:
    tiny().network.bfloat16().save_pretrained(tmp_path / "model")
    backbone = partial(CausalLM, name=str(tmp_path / "model"))
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        module = HOMLoRA(partial(backbone, dtype=dtype), 1, r=2)
        module.configure_model()
        assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in module.parameters() if not p.requires_grad} == {expected}
        assert module.client_loss(batch_of(new_data(tmp_path))).dtype == torch.float32
    assert tiny(dtype="bfloat16").network.dtype == torch.bfloat16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantization": ({"name": "owner/model", "quantization": "nf4"}, "quantization is 'nf4', which takes a GPU, and there is none"),
    "config": ({"config": TINY_MODELS["llama"], "quantization": "int8"}, "quantization is for models that are loaded"),
    "code": (
        {"name": "owner/model", "trust_remote_code": True},
        "runs code of owner/model, which may change: give owner/model@rev",
    ),
    "examples": ({"config": TINY_MODELS["llama"], "generate_examples": -1}, "generate_examples"),
    "kind": ({"config": {"model_type": "t5", "d_ff": 24}}, "model_type 't5', of which AutoModelForCausalLM has no network"),
    "encoder": ({"config": TINY_BERT}, "BertLMHeadModel reads texts in both directions"),
}


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_what_cannot_be_loaded_is_one_line(wrong: str) -> None:
    options, said = REFUSED[wrong]
    with pytest.raises(FederationError, match=said) as error:
        CausalLM(**options)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bitsandbytes quantises on a GPU")
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantised_network_trains_adapters(quantization: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    tiny(config=TINY_MODELS["llama"] | {"hidden_size": 64, "intermediate_size": 128}).network.save_pretrained(tmp_path / "model")
    data, backbone = new_data(tmp_path), partial(CausalLM, name=str(tmp_path / "model"), quantization=quantization)
    federation = new_federation(1)
    federation.fit(HOMLoRA(backbone, 1, r=2, target_modules="all-linear"), data)
    assert federation.run.history[-1]["after/test_perplexity/mean"] > 0


def test_generation_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many answers of each client as wanted."""
    scored, score = [], Instructions.score

    def noting(data: Instructions, answers: Any) -> dict[str, float]:
        scored.append(sum(len(rows) for rows, _ in answers))
        return score(data, answers)

    monkeypatch.setattr(Instructions, "score", noting)
    federation = new_federation(1, trainer=new_trainer)
    federation.fit(FedAvg(tiny(generate_examples=3, max_new_tokens=5), 1, epochs=0, metric="exact_match"), new_data(tmp_path))
    assert federation.run.metric == "exact_match"
    assert federation.run.model.higher_is_better
    assert {"test/exact_match", "test/perplexity", "val/exact_match"} <= federation.run.results[0].keys()
    assert max(scored) == 3
    with pytest.raises(FederationError, match=r"metric is 'exact_match', which is of generated answers: set .* generate_examples"):
        FedAvg(tiny, 1, metric="exact_match").configure_model()


@pytest.mark.parametrize(("ends", "options"), [([0, 1, 2], {}), (None, {"end_token_ids": [1, 2]})], ids=["of the config", "given"])
def test_several_tokens_end_an_answer(ends: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """The first of them pads, where there is no other token for that."""
    network = CausalLM(config=TINY_MODELS["llama"] | {"eos_token_id": ends}, generate_examples=3, max_new_tokens=4, **options)
    assert network.end_tokens == (ends or [1, 2])
    answers = network.predict(*network.select_learned(*batch_of(new_data(tmp_path))))
    assert answers is not None
    assert len(answers) == 2


def test_generation_in_vain_is_said_before_the_first_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fit(network: Any, **options: Any) -> None:
        new_federation(1).fit(FedAvg(network, 1, epochs=0), new_data(tmp_path, **options))

    said = r"learned to end with token 2, but generation only stops at 0: set end_token_ids to \[2, 0\]"
    for ends in (None, [2, 0]):
        fit(partial(tiny, generate_examples=1, max_new_tokens=1, end_token_ids=ends))
        assert bool(re.search(said, capsys.readouterr().out)) == (ends is None)
    with pytest.raises(FederationError, match="learn=all trains on whole rows: set learn to answers"):
        fit(partial(tiny, generate_examples=1), learn="all")
    data = new_data(tmp_path, learn="all")
    data.setup()
    spec = WorkerSpec(FedAvg(partial(tiny, generate_examples=1), 1), OneClient(data, 0, 0), new_trainer, 0)
    with pytest.raises(FederationError, match="set learn to answers"):
        Site(spec, 0, VerbSettings.of({}), tmp_path)


@pytest.mark.parametrize("side", ["right", "left"])
def test_prompts_without_room_for_answers_are_refused_before_the_first_round(side: str, tmp_path: Path) -> None:
    """In the batches of which texts are generated: of test data, and of validation data if these are measured."""
    of_data: dict[str, Any] = {"num_clients": 1, "val_share": 0.3, "padding": side}
    _, validation, test = (rows.tolist() for rows in new_data(tmp_path, **of_data).client(0).splits)

    def new(row: int, limit: int) -> tuple[FedAvg, Instructions]:
        """With a long prompt in this row."""
        data, records = new_data(tmp_path, **of_data), chats(6)
        records[row]["messages"][0]["content"] = "x" * 220
        write_lines(tmp_path / "chats.jsonl", records)
        data.setup()
        return FedAvg(partial(tiny, generate_examples=limit, max_new_tokens=20), 1, epochs=0), data

    def fit(row: int, limit: int, **options: Any) -> None:
        new_federation(1, run_dir=tmp_path / "runs", **options).fit(*new(row, limit))

    said = "A prompt of 239 tokens and max_new_tokens=20 do not fit in the network's 256 positions"
    for row, limit, options in ((test[1], 1, {}), (test[2], 3, {}), (validation[0], 1, {"trainer": new_trainer})):
        with pytest.raises(FederationError, match=said):
            fit(row, limit, **options)
    assert not (tmp_path / "runs").exists()
    method, data = new(test[1], 1)
    with pytest.raises(FederationError, match=said):
        Site(WorkerSpec(method, OneClient(data, 0, 0), new_trainer, 0), 0, VerbSettings.of({}), tmp_path)
    if side == "right":
        for row in (test[2], validation[0]):
            fit(row, 2)  # nothing is generated of these


@pytest.mark.parametrize("official", [False, True])
def test_tokens_that_a_network_does_not_know_are_refused_before_the_first_round(official: bool, tmp_path: Path) -> None:
    """With a test set of their own, or a share of all."""
    path = write_lines(tmp_path / "test.jsonl", chats(2)) if official else None
    small = partial(CausalLM, config=TINY_MODELS["gpt2"] | {"vocab_size": 200})
    with pytest.raises(FederationError, match="but the network knows 0 to 199"):
        new_federation(1).fit(FedAvg(small, 1), new_data(tmp_path, test_path=path))
    short = partial(CausalLM, config=TINY_MODELS["gpt2"] | {"n_positions": 32})
    with pytest.raises(FederationError, match="but the network has positions for 32"):
        new_federation(1).fit(FedAvg(short, 1), new_data(tmp_path, test_path=path))


BLOOM = {"model_type": "bloom", "vocab_size": 264, "hidden_size": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
XLNET = {"model_type": "xlnet", "vocab_size": 264, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
ROBERTA = TINY_BERT | {"model_type": "roberta", "is_decoder": True, "vocab_size": 264, "max_position_embeddings": 256}
MIXES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "later tokens": (XLNET, {}, "XLNetLMHeadModel sees the tokens that it is to predict"),
    "packed rows": (BLOOM, {"packing": True}, "BloomForCausalLM does not keep packed rows apart"),
    "padding": (ROBERTA, {"padding": "left"}, "RobertaForCausalLM takes padding on the left for text"),
}


@pytest.mark.parametrize("mixed", MIXES)
def test_a_network_that_mixes_tokens_is_refused_before_the_first_round(mixed: str, tmp_path: Path) -> None:
    config, options, said = MIXES[mixed]
    network, data = partial(CausalLM, config=config), new_data(tmp_path, **options)
    with pytest.raises(FederationError, match=said):
        new_federation(1, run_dir=tmp_path / "runs").fit(FedAvg(network, 1), data)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(FederationError, match=said):
        Site(WorkerSpec(FedAvg(network, 1), OneClient(data, 0, 0), new_trainer, 0), 0, VerbSettings.of({}), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_a_look_for_mixed_tokens_leaves_no_trace(kind: str, dtype: Any, tmp_path: Path) -> None:
    """In networks that mix none, with adapters or without."""
    for options in ({"packing": True}, {"padding": "left"}):
        data = new_data(tmp_path, **options)
        for method in (FedAvg, HOMLoRA):
            of_method = {"adapters": Adapters(target_modules="all-linear")} if method is FedAvg else {}
            module = method(partial(CausalLM, config=TINY_MODELS[kind], dtype=dtype), 1, **of_method)
            module.configure_model()
            module.train()
            module.backbone.network.lm_head.eval()
            stream, before = torch.get_rng_state(), [dict(vars(part)) for part in module.modules()]
            refuse_mixed_tokens(module, data)
            assert torch.equal(torch.get_rng_state(), stream)
            assert [dict(vars(part)) for part in module.modules()] == before


@pytest.mark.parametrize(
    "config",
    [XLNET | {"vocab_size": 1}, XLNET | {"initializer_range": 0.0}, TINY_MODELS["llama"] | {"num_key_value_heads": 3}],
    ids=["one token", "constant logits", "a pass that fails"],
)
def test_a_network_that_shows_nothing_is_not_refused(config: dict[str, Any], tmp_path: Path) -> None:
    module = FedAvg(partial(CausalLM, config=config), 1)
    module.configure_model()
    refuse_mixed_tokens(module, new_data(tmp_path, packing=True))


def test_answers_continue_the_first_question(tmp_path: Path) -> None:
    for side in ("right", "left"):
        data = new_data(tmp_path, padding=side)
        network = tiny(generate_examples=9, max_new_tokens=4).eval()
        inputs, targets = batch_of(data)
        answers = network.predict(*network.select_learned(inputs, targets))
        assert answers is not None
        for row, answer in zip(inputs["example"].tolist(), answers, strict=True):
            ids, learned = data._rows.row(row)  # type: ignore[union-attr]
            prompt = torch.tensor(ids[: learned.argmax()].astype("int64"))[None]
            expected = network.network.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]  # type: ignore[operator]
            assert answer[: len(expected)].tolist() == expected.tolist()


@pytest.mark.often(1)
@pytest.mark.parametrize("method", [HOMLoRA, PF2LoRA])
def test_exports_are_what_peft_and_transformers_load(method: Any, tmp_path: Path) -> None:
    """The server's and each client's adapter, and a merged network, with the tokenizer and the template that was given."""
    from peft import AutoPeftModelForCausalLM, PeftModel

    tiny().network.save_pretrained(tmp_path / "model")
    data = new_data(tmp_path, template=MARKED.replace("assistant\\n", "assistant\\n\\n"))
    federation = new_federation(1, run_dir=tmp_path / "runs", checkpoint_every=1)
    options: dict[str, Any] = {"r": 2, "target_modules": "all-linear", "optimizer": partial(torch.optim.AdamW, lr=0.1)}
    module = method(partial(CausalLM, name=str(tmp_path / "model")), 1, **options)
    federation.fit(module, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what peft says of itself is nothing that who exports can change
        for whose, place in ((None, "server"), ("all", "clients"), (1, "one")):
            federation.export(module, data, tmp_path / place, client=whose)
    federation.export(module, data, tmp_path / "merged", client=1, merged=True)
    inputs = {name: tensor for name, tensor in batch_of(data)[0].items() if name != "example"}

    def logits(network: Any) -> torch.Tensor:
        with torch.no_grad():
            answered: torch.Tensor = network.eval()(**inputs).logits
        return answered

    close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    clean = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = logits(clean)
    for client in range(2):
        expected = logits(federation.client_module(client).backbone.network)
        close(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "clients" / str(client))), expected)
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected)
    close(logits(PeftModel.from_pretrained(clean, tmp_path / "one")), expected)
    assert not torch.allclose(expected, before, atol=1e-3)
    of_server = logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "server"))
    assert torch.allclose(of_server, expected, atol=1e-4) == (method is HOMLoRA)  # nothing stays with its clients
    assert AutoTokenizer.from_pretrained(tmp_path / "one").chat_template == data.template


def test_exports_of_half_precision_load_in_it(tmp_path: Path) -> None:
    """With float32 files and another ``dtype``; merged, the adapted weights are in the file in float32."""
    from peft import AutoPeftModelForCausalLM

    tiny().network.save_pretrained(tmp_path / "model")
    module = HOMLoRA(partial(CausalLM, name=str(tmp_path / "model"), dtype="bfloat16"), 1, r=2, target_modules="all-linear")
    module.configure_model()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    module.export_adapter(tmp_path / "adapter")
    module.export_merged(tmp_path / "merged")
    inputs = {name: tensor for name, tensor in batch_of(new_data(tmp_path))[0].items() if name != "example"}
    with torch.no_grad():
        expected = module.backbone.network.eval()(**inputs).logits
        of_peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype="bfloat16").eval()
        assert torch.equal(of_peft(**inputs).logits, expected)
    layer = "model.layers.0.mlp.up_proj"
    adapted = module.backbone.network.get_submodule(layer)
    exact = adapted.get_base_layer().weight + adapted.get_delta_weight(COMMON)
    for dtype in (torch.float32, torch.bfloat16):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype)
        assert torch.equal(merged.get_submodule(layer).weight, exact.to(dtype))


@pytest.mark.often(1)
@pytest.mark.parametrize("method", [FedAvg, Ditto])
def test_workers_end_as_one_process_does(method: Any, two_workers: Processes, tmp_path: Path) -> None:
    """The rows are mapped by each; what is counted of a step depends on no batch's targets."""
    ends = []
    for engine in (None, two_workers):
        federation = new_federation(2, **({} if engine is None else {"engine": engine}))
        federation.fit(method(tiny, 1, adapters=Adapters(r=2, target_modules="all-linear")), new_data(tmp_path))
        ends.append({name: value for name, value in federation.run.history[-1].items() if not name.startswith("seconds")})
    assert ends[0] == ends[1]
