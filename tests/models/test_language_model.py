"""Language models: what they predict, how that is measured, and that every LoRA method trains one."""

import math
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from often import mostly_slow
from tiny import new_federation
from tiny_texts import TINY_GPT2, save_word_tokenizer, write_e2e
from torch import Tensor
from torch.nn.functional import cross_entropy

import lightning_fed.methods
from lightning_fed.cli.dry_run import read
from lightning_fed.core import FineTuning
from lightning_fed.core.flops import _count, _train
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import E2E
from lightning_fed.data.batches import EXAMPLE
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.data.text.generation import IGNORED
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, HOMLoRA, PF2LoRA
from lightning_fed.models import Adapters, TransformerLM
from lightning_fed.models.adapters import adapted_layers

END = 0
tiny_lm = partial(TransformerLM, config=TINY_GPT2, num_beams=3, max_new_tokens=12)


def batch_of(*prompts: list[int], rest: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    """Prompts that end with END, so many more tokens, and padding."""
    length = max(map(len, prompts)) + rest + 2
    ids, targets = torch.full((len(prompts), length), END), torch.full((len(prompts), length), IGNORED)
    for row, prompt in enumerate(prompts):
        size = len(prompt) + 1
        ids[row, : size - 1] = torch.tensor(prompt)
        ids[row, size : size + rest] = 7
        targets[row, size - 1 : size + rest] = torch.tensor([7] * rest + [END])
    mask = (torch.arange(length) < torch.tensor([len(prompt) + 2 + rest for prompt in prompts])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, EXAMPLE: torch.arange(len(prompts))}, targets


PROMPTS = ([5, 9, 11, 3], [8], [12, 30, 5, 2, 9, 9, 4], [21, 4])


@torch.no_grad()
def greedy(network: TransformerLM, prompt: list[int], no_repeat: int = 0) -> list[int]:
    """The most probable token after the prompt, and so on, with nothing but the network; no n-gram of the answer comes twice."""
    answer: list[int] = []
    while len(answer) < network.max_new_tokens and answer[-1:] != [END]:
        logits = network.network(torch.tensor([[*prompt, END, *answer]])).logits[0, -1]
        for begin in range(len(answer) - no_repeat + 1 if no_repeat else 0):
            if answer[begin : begin + no_repeat - 1] == answer[len(answer) - no_repeat + 1 :]:
                logits[answer[begin + no_repeat - 1]] = -torch.inf
        answer.append(int(logits.argmax()))
    return answer


def padded(answers: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, answers))
    return [answer + [END] * (longest - len(answer)) for answer in answers]


# ----------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("no_repeat", [0, 2, 3])
def test_answers_are_those_of_each_prompt_alone(no_repeat: int) -> None:
    network = tiny_lm(num_beams=1, no_repeat_ngram_size=no_repeat).eval()
    expected = [greedy(network, prompt, no_repeat) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert network.predict(*batch_of(*PROMPTS)).tolist() == padded(expected)


def test_beams_find_answers_that_are_more_probable() -> None:
    network = tiny_lm(num_beams=8, length_penalty=0.0, no_repeat_ngram_size=0).eval()

    @torch.no_grad()
    def log_probability(prompt: list[int], answer: list[int]) -> float:
        ids = torch.tensor([[*prompt, END, *answer]])
        logits = network.network(ids).logits[0, len(prompt) : -1]
        end = answer.index(END) + 1 if END in answer else len(answer)
        return -cross_entropy(logits[:end], ids[0, len(prompt) + 1 :][:end], reduction="sum").item()

    found = network.predict(*batch_of(*PROMPTS)).tolist()
    alone = [network.predict(*batch_of(prompt))[0].tolist() for prompt in PROMPTS]
    assert found == padded(alone)
    better = [
        log_probability(prompt, answer) - log_probability(prompt, greedy(network, prompt))
        for prompt, answer in zip(PROMPTS, found, strict=True)
    ]
    assert min(better) >= -1e-4
    assert max(better) > 0.1


def test_a_length_penalty_favours_long_answers() -> None:
    lengths = []
    for length_penalty in (-3.0, 3.0):
        torch.manual_seed(1)
        network = tiny_lm(config=TINY_GPT2 | {"vocab_size": 4}, length_penalty=length_penalty, no_repeat_ngram_size=0).eval()
        answers = network.predict(*batch_of([1, 2], [3], [2, 2, 1], [1, 1, 3, 2], rest=0))
        lengths.append((answers != END).sum().item())
    assert lengths[0] < lengths[1]


def test_targets_say_where_a_prompt_ends_and_nothing_else() -> None:
    network = tiny_lm().eval()
    expected = network.predict(*batch_of(*PROMPTS))
    assert expected.shape[0] == len(PROMPTS)
    assert expected.shape[1] <= 12
    inputs, targets = batch_of(*PROMPTS, rest=5)
    inputs["input_ids"] = torch.where(targets.roll(1, 1) == IGNORED, inputs["input_ids"], 3)
    targets = torch.where(targets == IGNORED, IGNORED, 3)
    assert torch.equal(network.predict(inputs, targets), expected)


def test_rows_of_one_prompt_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny_lm().eval()
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0])
    expected = network.predict(*batch_of(*PROMPTS[:2]))[[0, 1, 0, 0]]
    sizes, generate = [], network.network.generate
    monkeypatch.setattr(network.network, "generate", lambda **given: sizes.append(len(given["inputs_embeds"])) or generate(**given))
    assert torch.equal(network.predict(*batch_of(*prompts)), expected)
    assert sizes == [2]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_nothing_is_warned_of(num_beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    for level in ("warning", "warning_once"):
        monkeypatch.setattr(transformers.generation.utils.logger, level, lambda *message: said.append(message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_lm(num_beams=num_beams).eval().predict(*batch_of(*PROMPTS))
    assert said == []


def test_what_does_not_fit_is_refused() -> None:
    network = tiny_lm(max_new_tokens=60)
    with pytest.raises(FederationError, match="prompt of 8 tokens and max_new_tokens=60 do not fit in the network's 64 positions"):
        network.predict(*batch_of(*PROMPTS))
    network.predict(*batch_of([4, 4, 4]))
    for option, value in (("num_beams", 0), ("max_new_tokens", 0), ("no_repeat_ngram_size", -1)):
        with pytest.raises(FederationError, match=f"Got {option}={value}: give a whole number from"):
            tiny_lm(**{option: value})


# ------------------------------------------------------------------------------------------------------- logits, perplexity


def test_the_vocabulary_is_the_second_dimension() -> None:
    network = tiny_lm().eval()
    inputs, targets = batch_of(*PROMPTS)
    logits = network(inputs)
    assert logits.shape == (len(PROMPTS), 40, targets.shape[1])
    alone = network.network(torch.tensor([[*PROMPTS[1], END, 7, 7]])).logits
    torch.testing.assert_close(logits[1, :, :4].T, alone[0])


def test_logits_of_a_network_in_half_precision_are_in_single() -> None:
    network = tiny_lm().bfloat16().eval()
    assert network(batch_of(*PROMPTS)[0]).dtype == torch.float32


def test_an_unlikely_token_does_not_make_the_perplexity_infinite() -> None:
    [(_, perplexity)] = tiny_lm().metrics("bleu").items()
    perplexity.update(torch.tensor([[200.0, 0.0]] * 50), torch.tensor([1] + [0] * 49))
    assert perplexity.compute().item() == pytest.approx(math.exp(200 / 50))


def test_perplexity_is_that_of_the_targets() -> None:
    network = tiny_lm().eval()
    assert network.measures[0] == "bleu"
    metrics = network.metrics("bleu")
    assert list(metrics) == ["perplexity"]
    losses = []
    for prompts in (PROMPTS[:3], PROMPTS[3:]):
        inputs, targets = batch_of(*prompts)
        metrics["perplexity"].update(network(inputs), targets)
        for ids, row in zip(inputs["input_ids"], targets, strict=True):
            probabilities = network.network(ids[None]).logits[0].log_softmax(dim=-1)
            losses += [-probabilities[column, row[column]] for column in range(len(row)) if row[column] != IGNORED]
    assert len(losses) == 3 * len(PROMPTS)
    torch.testing.assert_close(metrics["perplexity"].compute(), torch.stack(losses).mean().exp())


# ------------------------------------------------------------------------------------------------------------------ methods

METHODS = ["PF2LoRA", "HOMLoRA", "HETLoRA", "PerFedAvgLoRA", "CentralizedLoRA"]


def tiny_e2e(folder: Path, **options: Any) -> E2E:
    tokenizer = save_word_tokenizer(folder / "tokenizer")
    options = {"num_clients": 2, "val_share": 0, "batch_size": 4, "metrics": ["bleu", "rouge_l", "ter"]} | options
    return E2E(write_e2e(folder / "e2e"), tokenizer=tokenizer, **options)


@pytest.mark.parametrize("name", mostly_slow(METHODS, often={"PF2LoRA"}))
def test_every_lora_method_trains_one(name: str, tmp_path: Path) -> None:
    options = {"r_min": 2, "r_max": 4} if name == "HETLoRA" else {"r": 2}
    backbone = partial(tiny_lm, config=TINY_GPT2 | {"n_layer": 1}, max_new_tokens=3)
    adam = partial(torch.optim.AdamW, lr=0.01)  # larger steps overshoot from some initial weights
    method = getattr(lightning_fed.methods, name)(backbone, 1, optimizer=adam, steps=3, **options)
    federation = new_federation(2, evaluate_every=1)
    federation.fit(method, tiny_e2e(tmp_path))
    prefix = "adapted_" if name == "PerFedAvgLoRA" else ""
    assert federation.run.metric == f"{prefix}bleu"
    first, last = federation.run.history
    assert 1 < last[f"after/test_{prefix}perplexity/mean"] < first[f"after/test_{prefix}perplexity/mean"]
    for score in ("bleu", "rouge_l"):
        assert 0 <= last[f"after/test_{prefix}{score}/mean"] <= 1
    assert last[f"after/test_{prefix}ter/mean"] >= 0
    assert "after/test_accuracy/mean" not in last


@pytest.mark.parametrize("end", [0, 5])
def test_a_network_that_does_not_stop_where_answers_end_is_named(
    end: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = tiny_lm(config=TINY_GPT2 | {"n_layer": 1, "eos_token_id": end}, max_new_tokens=1)
    new_federation(1).fit(HOMLoRA(network, 1, r=2, steps=0), tiny_e2e(tmp_path))
    said = "learned to end with token 0, but generation only stops at 5: set eos_token_id in its config to 0 to stop at"
    assert (said in capsys.readouterr().out) == (end == 5)


WHOLE = ["Ditto", "FML", "FedAMP", "FedAvg", "FedAvgFT", "FedBN", "FedCAC", "FedDecomp", "FedProx", "PFedSD", "SCAFFOLD"]
"""Methods that train a whole network of any kind."""


@pytest.mark.often(1)
@pytest.mark.parametrize("name", mostly_slow(WHOLE, often={"FedAvg", "Ditto", "PFedSD"}))
def test_a_method_that_trains_the_whole_network_answers_and_is_measured_as_in_fine_tuning(name: str, tmp_path: Path) -> None:
    """By texts and by the perplexity of the tokens that are targets."""
    network, data = tiny_lm(config=TINY_GPT2 | {"n_layer": 1}, max_new_tokens=3), tiny_e2e(tmp_path)
    ours, theirs = new_federation(1), new_federation(1)
    no_steps = {"lora_epochs": 0, "global_epochs": 0} if name == "FedDecomp" else {"epochs": 0, "fine_tuning": FineTuning(epochs=0)}
    ours.fit(getattr(lightning_fed.methods, name)(network, 1, **no_steps), data)
    theirs.fit(HOMLoRA(network, 1, r=2, steps=0), data)
    assert ours.run.metric == theirs.run.metric == "bleu"
    for client, result in theirs.run.results.items():
        assert ours.run.results[client] == pytest.approx({n: v for n, v in result.items() if not n.startswith("rank/")}, rel=1e-5)


@pytest.mark.parametrize("name", mostly_slow(WHOLE, often={"FedAvg", "Ditto", "PFedSD"}))
def test_whatever_the_method_a_token_is_to_predict_the_one_that_follows(name: str) -> None:
    """In batches as the library's collators make them; and where there is no target, nothing is to be predicted."""
    network = tiny_lm()
    ids = torch.tensor([[5, 9, 11, 3], [8, 2, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids.masked_fill(ids.eq(0), IGNORED)}
    module = getattr(lightning_fed.methods, name)(network, 1)
    module.configure_model()
    expected = network.eval().network(**batch).loss
    module.eval()
    torch.testing.assert_close(FederatedModule.client_loss(module, batch), expected)
    bare = getattr(lightning_fed.methods, name)(network.network, 1)
    bare.configure_model()
    torch.testing.assert_close(FederatedModule.client_loss(bare.eval(), batch), expected)
    module.update_metrics(module.test_metrics, batch)
    torch.testing.assert_close(module.test_metrics.compute(), {"test/perplexity": expected.exp()})
    module.phase = module.phases()[0]
    costs = [_count(module, batch, _train, small) for small in (0, math.inf)]
    assert costs[0] == costs[1] > 0  # without values, and with them


def test_the_command_line_takes_one_where_a_whole_network_is_trained(tmp_path: Path) -> None:
    """Whoever has networks of the library as options, and whoever has any; another name's error tells of both."""
    name = "model.init_args.backbone"
    args = ["fit", "--data=E2E", f"--data.init_args.root={write_e2e(tmp_path)}", "--data.init_args.tokenizer=gpt2"]
    given = [f"--{name}=TransformerLM", f"--{name}.init_args.name=gpt2", f"--{name}.init_args.num_beams=3"]
    for method in ("FedAvg", "HOMLoRA"):
        assert re.search(r"num_beams'?: 3", str(read(method, [*args, f"--model={method}", *given])))
    with pytest.raises(FederationError, match=r"no 'TransformerML' .did you mean TransformerLM.*known are CNN, .*TransformerQA"):
        read("FedAvg", [*args, "--model=FedAvg", f"--{name}=TransformerML"])


def test_all_linear_layers_are_adapted_but_what_makes_words_as_in_peft() -> None:
    from peft import LoraConfig, get_peft_model

    network = partial(tiny_lm, config=TINY_GPT2 | {"tie_word_embeddings": False})
    module = FedAvg(network, 1, adapters=Adapters(r=2, target_modules="all-linear"))
    module.configure_model()
    theirs = get_peft_model(network().network, LoraConfig(r=2, target_modules="all-linear", fan_in_fan_out=True))
    expected = {name.removeprefix("base_model.model.") for name in adapted_layers(theirs)}
    assert {name.removeprefix("backbone.network.") for name in adapted_layers(module)} == expected
    second = PF2LoRA(network, 1, r=2, client_r=1, target_modules="all-linear")  # on layers that have one
    second.configure_model()
    assert {name.removeprefix("backbone.network.") for name in adapted_layers(second)} == expected


CUT = ["FedHM", "FedKD", "FedPer", "FedProto", "FedRep", "FedRoD", "LGFedAvg", "PFedLoRA"]
"""Methods that ask for a part of a network that only classifiers have."""


@pytest.mark.parametrize("name", CUT)
def test_methods_that_cut_networks_say_which_they_need(name: str) -> None:
    options: dict[str, Any] = {"ratios": [0.5]} if name == "FedHM" else {}
    module = getattr(lightning_fed.methods, name)(tiny_lm(), 1, **options)
    with pytest.raises(FederationError, match=r"backbone: .* only classifiers have, such as .*: a GPT2LMHeadModel is trained as"):
        module.for_client(ClientInfo(0, 1, 0, 0, (1,), model_size=0.5 if options else None)).shared_names()


@pytest.mark.parametrize("name", ["DSFL", "FD", "FedDF", "FedET", "SplitMix"])
def test_methods_that_mix_what_is_said_of_examples_need_classifiers(name: str) -> None:
    with pytest.raises(FederationError, match=f"backbone: {name} .*, but a GPT2LMHeadModel answers with texts: give a classifier"):
        getattr(lightning_fed.methods, name)(tiny_lm, 1).configure_model()


@pytest.mark.parametrize("name", ["FedAvg", "HOMLoRA", "PerFedAvgLoRA"])
def test_the_network_knows_of_which_scores_less_is_better(name: str) -> None:
    for metric, more in (("ter", False), ("perplexity", False), ("bleu", True)):
        module = getattr(lightning_fed.methods, name)(tiny_lm(), 1, metric=metric)
        module.configure_model()
        assert module.monitor.removeprefix("adapted_") == metric
        assert module.higher_is_better == more
    with pytest.raises(FederationError, match="metric is 'accuracy', but what can be measured is bleu, nist, meteor"):
        getattr(lightning_fed.methods, name)(tiny_lm(), 1, metric="accuracy").configure_model()


@pytest.mark.parametrize("tied", [True, False])
def test_the_pretrained_head_stays_as_it_is(tied: bool, tmp_path: Path) -> None:
    module = HOMLoRA(partial(tiny_lm, config=TINY_GPT2 | {"tie_word_embeddings": tied}), 1, r=2)
    module.configure_model()
    network = module.backbone.network
    assert (network.lm_head.weight is network.transformer.wte.weight) == tied
    assert module.backbone.head_names() == set()
    learned = {name for name, p in module.named_parameters() if p.requires_grad}
    assert learned == module.shared_names()
    assert learned
    assert all(".lora_" in name for name in learned)


def test_its_adapters_can_be_exported(tmp_path: Path) -> None:
    from peft import PeftModel

    torch.manual_seed(1)
    module = PF2LoRA(tiny_lm, 1, r=2)
    module.configure_model()
    with torch.no_grad():
        for name in sorted(module.shared_names() | module.private_names()):
            module.get_parameter(name).normal_(std=0.3)
    module.eval()
    module.export_adapter(tmp_path)
    inputs, _ = batch_of(*PROMPTS)
    clean = module.networks.frozen[0].copy(1).network
    loaded = PeftModel.from_pretrained(clean, tmp_path).eval()
    texts = {name: tensor for name, tensor in inputs.items() if name != EXAMPLE}
    torch.testing.assert_close(loaded(**texts).logits.transpose(1, 2), module(inputs), rtol=1e-4, atol=1e-5)
