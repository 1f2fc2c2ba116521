"""Networks that answer with a span: what they predict, and every LoRA method on them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import TINY_TRANSFORMER, new_federation, new_trainer
from tiny_texts import save_tokenizer, write_squad
from torch import Tensor
from torch.nn.functional import cross_entropy

import lightning_fed.methods
from lightning_fed.data import BySimilarity, SQuAD
from lightning_fed.data.batches import EXAMPLE
from lightning_fed.data.text.question_answering import OFFSETS
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, HOMLoRA
from lightning_fed.models import TransformerQA

tiny_qa = partial(TransformerQA, config=TINY_TRANSFORMER)

Inputs = dict[str, Tensor]


class Fixed(TransformerQA):
    """Gives the logits that it was given."""

    logits: Tensor

    def forward(self, inputs: Inputs) -> Tensor:
        return self.logits


def fixed(logits: Tensor, max_answer_length: int) -> TransformerQA:
    network = Fixed(config=TINY_TRANSFORMER, max_answer_length=max_answer_length)
    network.logits = logits
    return network


def windows(number: int, length: int) -> Inputs:
    """CLS, a question of up to three tokens, SEP, a context of at least one token, SEP, padding."""
    asked = torch.randint(1, 4, (number, 1))
    begin, end = asked + 2, length - 1 - torch.randint(0, length - 6, (number, 1))
    places = torch.arange(length)
    context = (places >= begin) & (places < end)
    characters = torch.randint(1, 9, (number, length)).cumsum(dim=1)
    offsets = torch.stack([characters, characters + 1], dim=-1) * context[..., None]
    ids = torch.randint(5, 30, (number, length))
    mask = (places <= end).long()
    return {"input_ids": ids * mask + 1 - mask, "attention_mask": mask, OFFSETS: offsets.int(), EXAMPLE: torch.arange(number)}


# ------------------------------------------------------------------------------------------------------------ the network


def test_logits_of_start_and_end_and_their_loss() -> None:
    network, inputs = tiny_qa().eval(), windows(5, 12)
    theirs = network.network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    taken: list[str] = []
    network.network.register_forward_pre_hook(lambda _, args, named: taken.extend(named), with_kwargs=True)
    logits = network(inputs)
    assert taken == ["input_ids", "attention_mask"]  # most networks would overlook what is not theirs
    assert logits.shape == (5, 12, 2)
    assert torch.equal(logits[..., 0], theirs.start_logits)
    assert torch.equal(logits[..., 1], theirs.end_logits)
    start, end = torch.randint(0, 12, (2, 5))
    loss = (cross_entropy(theirs.start_logits, start) + cross_entropy(theirs.end_logits, end)) / 2
    torch.testing.assert_close(cross_entropy(logits, torch.stack([start, end], dim=1)), loss)


def test_the_head_has_two_outputs() -> None:
    with torch.device("meta"):
        network = TransformerQA(config=TINY_TRANSFORMER | {"hidden_size": 768})
    parameters = dict(network.named_parameters())
    assert {name.split(".")[1] for name in network.head_names()} == {"qa_outputs"}
    assert sum(parameters[name].numel() for name in network.head_names()) == 1538
    assert (network.measures, network.metrics("f1")) == (("f1", "exact_match"), {})


def test_nonsense_is_refused() -> None:
    with pytest.raises(FederationError, match="num_classes=3, but a span has 2"):
        tiny_qa(3)
    with pytest.raises(FederationError, match="max_answer_length=0"):
        tiny_qa(max_answer_length=0)
    t5 = {"model_type": "t5", "vocab_size": 30, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8, "d_kv": 4}
    with pytest.raises(FederationError, match="T5ForQuestionAnswering has no decoder_start_token_id"):
        TransformerQA(config=t5)
    inputs = {"input_ids": torch.tensor([[5, 6, 1]]), "attention_mask": torch.ones(1, 3).long()}
    assert TransformerQA(config=t5 | {"decoder_start_token_id": 0})(inputs).shape == (1, 3, 2)


# ------------------------------------------------------------------------------------------------------------ prediction


def best_span(logits: Tensor, offsets: Tensor, longest: int) -> list[float]:
    """One window, by a double loop."""
    length, best = len(logits), None
    for start in range(length):
        for end in range(start, min(start + longest, length)):
            if offsets[start, 1] == 0 or offsets[end, 1] == 0:
                continue
            score = (logits[start, 0] + logits[end, 1]).item()
            if best is None or score > best[2]:
                best = [float(offsets[start, 0]), float(offsets[end, 1]), score]
    assert best is not None
    return [*best, (logits[0, 0] + logits[0, 1]).item()]


@pytest.mark.parametrize("longest", [1, 3, 50])
@pytest.mark.parametrize("levels", [3, 1000])  # few levels: many ties
def test_the_best_span_is_that_of_a_double_loop(longest: int, levels: int) -> None:
    inputs = windows(60, 16)
    logits = torch.randint(-levels, levels, (60, 16, 2)) / 8
    found = fixed(logits, longest).predict(inputs, torch.zeros(60, 2))
    expected = [best_span(logits[row], inputs[OFFSETS][row], longest) for row in range(60)]
    assert torch.equal(found, torch.tensor(expected))


def test_half_precision_is_left_before_scores_are_added() -> None:
    logits = torch.zeros(1, 12, 2, dtype=torch.bfloat16)
    logits[0, 6], logits[0, 0] = 256.0, torch.tensor([256.0, 1.0])
    found = fixed(logits, 30).predict(windows(1, 12) | {OFFSETS: torch.ones(1, 12, 2).cumsum(2).int()}, torch.zeros(1, 2))
    assert found.dtype == torch.float32
    assert found.tolist() == [[1, 2, 512, 257]]  # bfloat16 has no 257


def test_a_window_without_context_has_the_lowest_score() -> None:
    inputs = windows(1, 12)
    found = fixed(torch.ones(1, 12, 2), 30).predict(inputs | {OFFSETS: torch.zeros(1, 12, 2).int()}, torch.zeros(1, 2))
    assert found.tolist() == [[0, 0, -torch.inf, 2]]


# ------------------------------------------------------------------------------------------------------------ federations


def new_squad(version: Any = "1.1", **options: Any) -> SQuAD:
    own = {
        "batch_size": 4,
        "eval_batch_size": 5,
        "num_clients": 2,
        "test_share": 0.2,
        "val_share": 0.0,
        "max_length": 12,
        "stride": 2,
    }
    own |= {"partition": BySimilarity(sorted_fraction=0.5)} | options
    return SQuAD(version, write_squad(Path("squad"), version), tokenizer=save_tokenizer(Path("tokenizer")), **own)


@pytest.mark.parametrize(
    "name", mostly_slow(["PF2LoRA", "HOMLoRA", "HETLoRA", "PerFedAvgLoRA", "CentralizedLoRA"], often={"PF2LoRA", "HETLoRA"})
)
def test_every_lora_method_answers_questions(name: str) -> None:
    method = getattr(lightning_fed.methods, name)(tiny_qa, optimizer=partial(torch.optim.AdamW, lr=0.02), steps=2)
    federation = new_federation(2)
    history = federation.fit(method, new_squad("2.0", max_length=9))
    metrics = {"f1", "exact_match", "has_answer_f1", "has_answer_exact_match", "no_answer_f1", "no_answer_exact_match"}
    if name == "PerFedAvgLoRA":
        metrics |= {f"adapted_{metric}" for metric in metrics}
    measured = {key.removeprefix("after/test_").removesuffix("/mean") for key in history[-1] if key.startswith("after/test_")}
    assert {key for key in measured if "/" not in key} == metrics
    assert all(0 <= history[-1][f"after/test_{metric}/mean"] <= 1 for metric in metrics)
    assert history[-1]["compute/flops"] > 0
    if name != "PF2LoRA":  # it has no model of its own to be measured on the server
        assert 0 <= history[-1]["global/test_f1"] <= 1
    assert federation.run.metric == ("adapted_f1" if name == "PerFedAvgLoRA" else "f1")


def test_a_method_that_trains_the_whole_network_is_measured_as_in_fine_tuning() -> None:
    network, data = tiny_qa(), new_squad("1.1")
    ours, theirs = new_federation(1), new_federation(1)
    ours.fit(FedAvg(network, 2, epochs=0), data)
    theirs.fit(HOMLoRA(network, 2, steps=0), data)
    assert ours.run.metric == theirs.run.metric == "f1"
    for client, result in theirs.run.results.items():
        assert ours.run.results[client] == {name: value for name, value in result.items() if not name.startswith("rank/")}


def test_spans_are_no_rows_of_a_table(tmp_path: Path) -> None:
    federation, model, data = new_federation(1, run_dir=tmp_path), HOMLoRA(tiny_qa(), 2, steps=0), new_squad("1.1")
    federation.fit(model, data)
    with pytest.raises(FederationError, match="TransformerQA answers with texts or spans of them, which do not fit into a table"):
        federation.predict(model, data, tmp_path / "p.csv")


def test_it_learns_to_answer() -> None:
    """Alone, as any module of Lightning: what the dog does is not what the cat does."""
    network = partial(
        TransformerQA, config=TINY_TRANSFORMER | {"hidden_size": 32, "intermediate_size": 32, "initializer_range": 0.2}
    )
    method = HOMLoRA(network, metric="exact_match", optimizer=partial(torch.optim.AdamW, lr=0.03), steps=None, epochs=20)
    client = new_squad(max_length=20).client(0)
    trainer = new_trainer(max_epochs=20, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    before = trainer.test(method, client, verbose=False)[0]
    trainer.fit(method, client)
    after = trainer.test(method, client, verbose=False)[0]
    assert before["test/exact_match"] <= 0.61  # one and the same answer to both
    assert after["test/exact_match"] == after["test/f1"] == 1
