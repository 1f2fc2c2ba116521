"""Inputs by name, batches of texts, tokenizers, and texts in one's own files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import BERT_INPUTS, IDS, save_tokenizer
from torch import Tensor

from lightning_fed.data import IID, InMemory, SharedTensors, TextClassification
from lightning_fed.data.text.classification import CHUNK, Examples
from lightning_fed.errors import FederationError

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path / "tokenizer")


class Given(TextClassification):
    """Texts that are already there."""

    num_classes = 2

    def __init__(self, train: Examples, test: Examples = ([], []), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.given = train, test

    def examples(self) -> tuple[Examples, Examples]:
        return self.given


def ids(*words: str) -> list[int]:
    return [IDS[word] for word in words]


def growing(count: int) -> dict[str, Tensor]:
    """Example n has n + 1 tokens, all of them n + 1."""
    lengths = torch.arange(1, count + 1)[:, None]
    mask = (torch.arange(count) < lengths).long()
    return {"input_ids": mask * lengths, "attention_mask": mask, "number": lengths}


# --------------------------------------------------------------------------------------------------------- inputs by name


def test_batches_are_cut_to_the_longest_text_and_a_multiple_of_eight() -> None:
    data = SharedTensors(growing(30), torch.zeros(30))
    for longest, columns in ((1, 8), (8, 8), (9, 16), (16, 16), (17, 24), (25, 30), (30, 30)):
        inputs, labels = data[torch.tensor([0, longest - 1])]
        assert len(labels) == 2
        assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, columns)
        assert inputs["input_ids"].sum() == 1 + longest**2  # no token is lost
        assert inputs["number"].tolist() == [[1], [longest]]
        assert all(tensor.is_contiguous() for tensor in inputs.values())


def test_padding_in_front_and_texts_without_tokens_stay_whole() -> None:
    front = {name: tensor.flip(1) for name, tensor in growing(30).items()}
    assert SharedTensors(front, torch.zeros(30))[torch.tensor([3])][0]["input_ids"].shape == (1, 30)
    nothing = {"attention_mask": torch.zeros(2, 30, dtype=torch.bool)}
    assert SharedTensors(nothing, torch.zeros(2))[torch.tensor([0])][0]["attention_mask"].shape == (1, 8)


def test_inputs_without_a_mask_are_not_cut() -> None:
    inputs, _ = SharedTensors({"a": torch.ones(4, 30), "b": torch.ones(4)}, torch.zeros(4))[torch.tensor([0, 2])]
    assert inputs["a"].shape == (2, 30)
    assert inputs["b"].shape == (2,)


def named(**options: Any) -> InMemory:
    """Two inputs, the second of which is the negative of the first."""
    numbers = torch.arange(120.0)[:, None]
    train, test = ({"x": part, "y": -part} for part in (numbers[:100], numbers[100:]))
    labels = torch.arange(120) % 2
    return InMemory(train, labels[:100], 2, test, labels[100:], partition=IID(), num_clients=2, **options)


@pytest.mark.parametrize("split", ["pooled", "official"])
def test_a_federation_of_inputs_by_name(split: Any) -> None:
    data = named(split=split)
    for client in range(2):
        for indices, loader in zip(
            data.client(client).splits,
            (data.client(client).train_dataloader(), data.client(client).val_dataloader(), data.client(client).test_dataloader()),
            strict=True,
        ):
            batches = list(loader)
            seen = torch.cat([inputs["x"] for inputs, _ in batches]).flatten()
            assert torch.equal(seen.long().sort().values, indices)
            assert all(torch.equal(inputs["x"], -inputs["y"]) for inputs, _ in batches)
            assert all(torch.equal(inputs["x"].flatten() % 2, labels) for inputs, labels in batches)


def test_inputs_by_name_are_not_normalized() -> None:
    client = named().client(0)
    batch = next(iter(client.train_dataloader()))
    assert client.on_after_batch_transfer(batch, 0) is batch


def test_inputs_that_do_not_belong_together_are_refused() -> None:
    ones, labels = torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(FederationError, match="training set are a, b, those of the test set a: give the same kind"):
        InMemory({"a": ones, "b": ones}, labels, 2, {"a": ones}, labels).setup()
    with pytest.raises(FederationError, match=r"one row per example each, but have \[4, 3\] rows"):
        InMemory({"a": ones, "b": ones[:3]}, labels, 2).setup()


# ------------------------------------------------------------------------------------------------------------------ texts


def test_texts_become_ids_padded_to_the_longest_of_both_sets(tokenizer: str) -> None:
    data = Given(([("the dog",), ("the zebra barks",)], [1, 0]), ([("cat",)], [1]), tokenizer=tokenizer)
    inputs, labels, test_inputs, test_labels = data.load()
    assert isinstance(inputs, dict)
    assert isinstance(test_inputs, dict)
    assert list(inputs) == list(test_inputs) == BERT_INPUTS
    assert inputs["input_ids"].tolist() == [
        ids("[CLS]", "the", "dog", "[SEP]", "[PAD]"),
        ids("[CLS]", "the", "[UNK]", "barks", "[SEP]"),
    ]
    assert test_inputs["input_ids"].tolist() == [ids("[CLS]", "cat", "[SEP]", "[PAD]", "[PAD]")]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1] * 5]
    assert labels.tolist() == [1, 0]
    assert test_labels.tolist() == [1]
    assert labels.dtype == inputs["input_ids"].dtype == torch.int64


def test_pairs_share_a_sequence_and_the_longer_text_is_cut(tokenizer: str) -> None:
    pair = ("the dog barks the dog barks", "cat naps")
    inputs, *_ = Given(([pair], [0]), tokenizer=tokenizer).load()
    assert inputs["input_ids"].tolist()[0] == ids("[CLS]", *pair[0].split(), "[SEP]", *pair[1].split(), "[SEP]")
    assert inputs["token_type_ids"].tolist()[0] == [0] * 8 + [1] * 3
    inputs, *_ = Given(([pair], [0]), tokenizer=tokenizer, max_length=7).load()
    assert inputs["input_ids"].tolist()[0] == ids("[CLS]", "the", "dog", "[SEP]", "cat", "naps", "[SEP]")


def test_inputs_are_those_that_the_tokenizer_makes(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "roberta", model_input_names=["input_ids", "attention_mask"])
    inputs, *_ = Given(([("the", "dog")], [0]), tokenizer=folder).load()
    assert list(inputs) == ["input_ids", "attention_mask"]


def test_many_texts_are_tokenised_as_few_are(tokenizer: str) -> None:
    texts = [("dog " * (number % 9),) for number in range(2 * CHUNK)] + [("cat " * 20,)]
    inputs, *_ = Given((texts, [0] * len(texts)), tokenizer=tokenizer).load()
    at_once = transformers.AutoTokenizer.from_pretrained(tokenizer)([text for (text,) in texts], padding=True, return_tensors="pt")
    assert all(torch.equal(inputs[name], at_once[name]) for name in inputs)


def test_batches_of_texts(tokenizer: str) -> None:
    texts = [("dog " * number,) for number in range(1, 21)] * 5
    data = Given((texts, [0, 1] * 50), tokenizer=tokenizer, num_clients=2, partition=IID(), batch_size=4)
    shapes = {tuple(inputs["input_ids"].shape) for inputs, _ in data.client(0).train_dataloader()}
    assert {columns for _, columns in shapes} <= {8, 16, 22}
    assert len(shapes) > 1
    for inputs, _ in data.client(0).train_dataloader():
        assert inputs["token_type_ids"].shape == inputs["attention_mask"].shape == inputs["input_ids"].shape
        assert torch.equal(inputs["attention_mask"] == 0, inputs["input_ids"] == IDS["[PAD]"])


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=rf"load a tokenizer from {tmp_path}.*tokenizer\.json") as caught:
        Given(([("a",)], [0]), tokenizer=str(tmp_path)).load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "revision"), [("roberta-base", None), ("nobody/nothing@v1.0", "v1.0")])
def test_the_hub_is_asked_once_where_the_cache_has_no_tokenizer(
    name: str, revision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library would try for a minute, and say so in twenty lines."""
    asked: list[tuple[bool, str | None]] = []

    def from_pretrained(name: str, revision: str | None = None, local_files_only: bool = False) -> None:
        asked.append((local_files_only, revision))
        raise OSError("We couldn't find it\nin the cache")

    def model_info(api: Any, name: str, revision: str | None, timeout: float) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(FederationError, match=rf"'{name}' is not in the local cache.*no route to host") as caught:
        Given(([("a",)], [0]), tokenizer=name).load()
    assert "\n" not in str(caught.value)
    assert asked == [(True, revision)]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FederationError, match="HF_HUB_OFFLINE forbids asking the hub"):
        Given(([("a",)], [0]), tokenizer=name).load()


def test_a_tokenizer_without_padding_is_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "no-padding", pad_token=None)
    with pytest.raises(FederationError, match="no padding token"):
        Given(([("a",)], [0]), tokenizer=folder).load()


def test_texts_must_be_given(tokenizer: str) -> None:
    with pytest.raises(FederationError, match="Given has no texts"):
        Given(([], []), tokenizer=tokenizer).setup()
    with pytest.raises(NotImplementedError, match="override examples"):
        TextClassification(tokenizer).load()
    with pytest.raises(FederationError, match="max_length=0"):
        TextClassification(tokenizer, max_length=0)
