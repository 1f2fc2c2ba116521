"""Data-to-text generation: texts that are tokenized once for all clients."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fed.data.batches import EXAMPLE, TARGETS
from lightning_fed.data.federated import FederatedDataModule, Pools, pools_of
from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.whole_labels import WholeLabels
from lightning_fed.data.text.classification import CHUNK, load_tokenizer
from lightning_fed.data.text.scores import SCORES, Score, check_scores, score_texts
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt, require_from

IGNORED = -100
"""The target of a token whose successor is not trained; cross-entropy ignores it."""


class Example(NamedTuple):
    """A source and its reference texts.

    Args:
        source: what the text should say (the meaning representation), as one line of text.
        label: what it is about.
        references: reference texts, at least one.
    """

    source: str
    label: str
    references: tuple[str, ...]


class TextGeneration(FederatedDataModule):
    """Data-to-text generation with a causal language model, as in LoRA's experiments with GPT-2 (Hu et al., ICLR 2022). A dataset
    overrides :meth:`examples`.

    A training row is a source and one of its references: source, beginning-of-text token, blank and reference, end-of-text token.
    If a tokenizer has no token for the beginning or for padding, the end-of-text token is used. The targets ``(B, L)`` are already
    shifted: that of a token is the next one. They are those of the reference and its end, and :data:`IGNORED` elsewhere. A test row
    is a source with its first reference, of which the perplexity is measured; generated texts are compared with all references.
    Rows of one source stay together.

    Labels, by which the data are partitioned, say what a source is about. Sizes of clients count rows.

    Args:
        tokenizer: folder or name on the Hugging Face hub, of a tokenizer or the model that it belongs to.
        max_length: maximum number of tokens of a row; longer rows are refused, not cut. LoRA's scripts: 512.
        metrics: scores of generated texts, see :func:`lightning_fed.data.text.scores.score_texts`. None: ``bleu``,
            ``nist``, ``meteor`` (which needs Java), ``ter``, ``rouge_l`` and ``cider``.
        partition: how examples are divided among clients. Default: :class:`WholeLabels`.
        **kwargs: see :class:`FederatedDataModule`. A validation example is a source with all its references: generating for it
            takes as long as for a test example.
    """

    num_classes = 1
    predicts_labels = False

    def __init__(
        self,
        tokenizer: str,
        max_length: PositiveInt = 512,
        metrics: list[Score] | None = None,
        partition: Partitioner | None = None,
        split: Literal["pooled", "official"] = "official",
        **kwargs: Any,
    ) -> None:
        super().__init__(augment="none", partition=WholeLabels() if partition is None else partition, split=split, **kwargs)
        require_from(1, max_length=max_length)
        self.tokenizer = tokenizer
        self.max_length: int = max_length
        self.metrics: Sequence[Score] = SCORES if metrics is None else metrics

    def examples(self) -> tuple[list[Example], list[Example]]:
        """The examples of the training set and of the test set, which may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must override examples().")

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @cached_property
    def labels(self) -> list[str]:
        """The labels, in the order of their numbers."""
        return sorted({example.label for examples in self._examples for example in examples})

    def load(self) -> Pools:
        """Rows ``(N, L)`` and their labels of both sets; L is the length of the longest row of all."""
        check_scores(self.metrics)
        train, test = self._examples
        require(len(train) > 0, f"{type(self).__name__} has no texts to train on: give at least one per client.")
        rows = [(number, text) for number, example in enumerate(train) for text in example.references]
        num_train = len(rows)
        rows += [(len(train) + number, example.references[0]) for number, example in enumerate(test)]
        numbers = {label: number for number, label in enumerate(self.labels)}
        labels = torch.tensor([numbers[example.label] for example in train + test])
        inputs = self._encode([example.source for example in train + test], rows)
        return pools_of(inputs, labels[inputs[EXAMPLE]], num_train)

    def score(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Scores of generated texts against all references; see :func:`lightning_fed.data.text.scores.score_texts`.

        Args:
            answers: for each batch, the numbers of its sources, ``(B,)``, and token ids, ``(B, T)``. A source counts once. Its text
                ends with :attr:`end_token`, even if generation continued.
        """
        both = [pair for numbers, rows in answers for pair in zip(numbers.tolist(), rows.tolist(), strict=True)]
        ids = {number: list(takewhile(lambda token: token != self.end_token, row)) for number, row in both}
        texts = self._tokenizer.batch_decode(list(ids.values()), skip_special_tokens=True)
        train, test = self._examples
        return score_texts(texts, [(train + test)[number].references for number in ids], self.metrics)

    @cached_property
    def _examples(self) -> tuple[list[Example], list[Example]]:
        return self.examples()

    @property
    def end_token(self) -> int:
        """The token that is trained as the end of every text."""
        return int(self._tokenizer.eos_token_id)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer, pads=False, ends=True)

    def _encode(self, sources: list[str], rows: list[tuple[int, str]]) -> dict[str, Tensor]:
        """Token ids, masks and targets."""
        end, begin, padding = (getattr(self._tokenizer, f"{name}_token_id") for name in ("eos", "bos", "pad"))
        begin, padding = (end if token is None else token for token in (begin, padding))
        of_sources, of_references = self._tokens(sources), self._tokens([f" {text}" for _, text in rows])
        ids = [
            torch.tensor([*of_sources[number], begin, *reference, end])
            for (number, _), reference in zip(rows, of_references, strict=True)
        ]
        lengths = torch.tensor([len(row) for row in ids])[:, None]
        longest = int(lengths.max())
        require(
            longest <= self.max_length,
            f"The longest row, a source and its reference, has {longest} tokens, but max_length is {self.max_length}: set "
            f"max_length to at least {longest}.",
        )
        example = torch.tensor([number for number, _ in rows])
        sizes = torch.tensor([len(source) for source in of_sources])[example, None]
        column, input_ids = torch.arange(longest), pad_sequence(ids, batch_first=True, padding_value=padding)
        learned = (column >= sizes) & (column < lengths - 1)
        return {
            "input_ids": input_ids,
            "attention_mask": (column < lengths).long(),
            TARGETS: input_ids.roll(-1, dims=1).where(learned, IGNORED),
            EXAMPLE: example,
        }

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        starts = range(0, len(texts), CHUNK)
        return [ids for start in starts for ids in self._tokenizer(texts[start : start + CHUNK], **options)["input_ids"]]


def reference_of(text: str | None, where: str) -> str:
    """A reference text without blanks around it.

    Raises:
        FederationError: if it is empty; it would be trained as the end of a text. Begins with ``where``, file and line.
    """
    reference = (text or "").strip()
    require(reference != "", f"{where} has an empty reference: fill it in, or take it out.")
    return reference


def grouped(rows: Iterable[tuple[str, str, str]]) -> list[Example]:
    """One example for each source and label, in order of appearance, with all its references."""
    references: dict[tuple[str, str], list[str]] = {}
    for source, label, reference in rows:
        references.setdefault((source, label), []).append(reference)
    return [Example(source, label, tuple(texts)) for (source, label), texts in references.items()]
