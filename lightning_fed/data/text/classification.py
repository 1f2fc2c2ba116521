"""Text classification: texts that are tokenized once for all clients."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_fed.data.federated import FederatedDataModule, Pools, pools_of
from lightning_fed.data.hub import from_hub_or_cache
from lightning_fed.data.lines import csv_table, unpacked
from lightning_fed.errors import FederationError, one_line, require
from lightning_fed.options import PositiveInt, require_from

CHUNK = 250
"""Number of texts that are tokenized together and padded to the longest: this saves padding and memory."""

Examples = tuple[list[tuple[str, ...]], list[int]]
"""Texts, one or two per example, and labels from 0."""


class TextClassification(FederatedDataModule):
    """Texts, or pairs of texts, for a pretrained network. A dataset overrides :meth:`examples` and sets ``num_classes``.

    A network gets the tokenizer's output: ``input_ids``, ``attention_mask`` and, if there are any, ``token_type_ids``, each of
    shape (B, L). L is the length of the batch's longest text, rounded up to a multiple of 8.

    Args:
        tokenizer: folder or name on the Hugging Face hub, of a tokenizer or the model that it belongs to.
        max_length: maximum number of tokens of a text or pair of texts. Longer ones are cut at the end, in a pair the longer text.
        **kwargs: see :class:`FederatedDataModule`.
    """

    def __init__(self, tokenizer: str, max_length: PositiveInt = 128, **kwargs: Any) -> None:
        super().__init__(augment="none", **kwargs)
        require_from(1, max_length=max_length)
        self.tokenizer = tokenizer
        self.max_length: int = max_length

    def examples(self) -> tuple[Examples, Examples]:
        """Texts and labels of the training set and of the test set, which may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must override examples().")

    def load(self) -> Pools:
        """Token ids and masks of shape (N, L) and labels of both sets; L is the length of the longest text of all."""
        tokenizer = load_tokenizer(self.tokenizer)
        (train, train_labels), (test, test_labels) = self.examples()
        require(len(train) > 0, f"{type(self).__name__} has no texts to train on: give at least one per client.")
        inputs, labels = tokenised(train + test, tokenizer, self.max_length), torch.tensor(train_labels + test_labels)
        return pools_of(inputs, labels, len(train))


def written_as(path: Path) -> dict[str, Any]:
    """Options of ``csv.reader`` for a file: in ``.tsv`` files, quotation marks are ordinary characters."""
    return {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if unpacked(path).suffix.lower() == ".tsv" else {}


def tokenised(texts: Sequence[tuple[str, ...]], tokenizer: Any, max_length: int) -> dict[str, Tensor]:
    """Token ids and masks of texts, or of pairs of texts (one or two strings per example), padded to the longest of all: the
    outputs of a tokenizer of the transformers library, each of shape (N, L). A text or pair of more than ``max_length`` tokens is
    cut at the end, in a pair the longer text.
    """
    special = tokenizer.num_special_tokens_to_add(pair=bool(texts) and len(texts[0]) == 2)
    require(
        max_length > special,
        f"max_length is {max_length}, but the tokenizer adds {special} tokens to each text, so none of it would be left: raise it.",
    )
    options = {"truncation": True, "max_length": max_length, "padding": True, "padding_side": "right"}
    starts = range(0, len(texts), CHUNK)
    columns = (map(list, zip(*texts[start : start + CHUNK], strict=True)) for start in starts)
    # As dicts: a tokenizer's return value also holds each token as a string.
    chunks = [dict(tokenizer(*texts_of_chunk, **options, return_tensors="pt")) for texts_of_chunk in columns]
    return concatenated(chunks, tokenizer)


def concatenated(chunks: list[dict[str, Tensor]], tokenizer: Any) -> dict[str, Tensor]:
    """Concatenate chunks, with ``input_ids`` ``(B, L)`` of different L, padded on the right to the longest of all: every tensor
    with L columns, by the values of their tokenizer, masks and others with 0.
    """
    padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    longest = max(chunk["input_ids"].shape[1] for chunk in chunks)

    def padded(name: str, chunk: dict[str, Tensor]) -> Tensor:
        tensor, columns = chunk[name], chunk["input_ids"].shape[1]
        if tensor.shape[1:2] != (columns,):
            return tensor
        return pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, longest - columns), value=padding.get(name, 0))

    return {name: torch.cat([padded(name, chunk) for chunk in chunks]) for name in chunks[0]}


def load_tokenizer(name: str, pads: bool = True, ends: bool = False) -> Any:
    """A tokenizer from a folder or, if there is no such folder, from the hub or its local cache by name. With ``pads`` it must have
    a padding token, with ``ends`` a token for the end of a text.
    """
    from transformers import AutoTokenizer

    def load(place: str | Path, **options: Any) -> Any:
        return AutoTokenizer.from_pretrained(place, **options)

    folder = Path(name).expanduser()
    try:
        tokenizer = load(folder) if folder.is_dir() else from_hub_or_cache(load, name)
    except FederationError as error:
        raise FederationError(f"The tokenizer {name} is not a folder, and {error} Set --data.init_args.tokenizer.") from error
    except (OSError, ValueError, ImportError) as error:
        place = folder.absolute() if folder.is_dir() else name
        raise FederationError(
            f"Could not load a tokenizer from {place} ({one_line(error)}): set "
            "--data.init_args.tokenizer to a folder with tokenizer.json or to the name of a model on the hub."
        ) from error
    require(
        not pads or tokenizer.pad_token is not None,
        f"The tokenizer {name} has no padding token, so texts cannot share a batch: set one.",
    )
    require(
        not ends or tokenizer.eos_token_id is not None,
        f"The tokenizer {name} has no token for the end of a text, so no answer could end: set its eos_token.",
    )
    return tokenizer


def read_examples(
    path: Path,
    texts: Sequence[str],
    label: str,
    classes: Sequence[str],
    header: Sequence[str] | None = None,
    skip_short: bool = False,
) -> Examples:
    """The examples of a CSV or TSV file with these columns of texts and of the label, whose values are ``classes``, in the order of
    the labels' numbers. For ``header`` and ``skip_short`` see :func:`.csv_table`.
    """
    examples: Examples = ([], [])
    for where, [*parts, name] in csv_table(path, [*texts, label], header, skip_short, **written_as(path))[1]:
        require(
            name in classes,
            f"{where} has the label {name!r}, expected one of {', '.join(classes)}."
            + ("" if header is None else " These files have no header: take it out, if it is one."),
        )
        examples[0].append(tuple(parts))
        examples[1].append(classes.index(name))
    return examples
