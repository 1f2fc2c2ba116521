"""Data that a network cannot process: a check of tokens before the first turn, and an explanation of a failing first step."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import OutOfMemoryError, Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import ClientDataModule
from lightning_fed.data.batches import Inputs
from lightning_fed.data.lazy import Taken
from lightning_fed.data.text.token_rows import TokenRows
from lightning_fed.errors import FederationError, one_line, place_of

TOKENS = "input_ids"
"""Name of the token ids among the inputs."""


def refuse_unknown_tokens(template: FederatedModule, data: ClientDataModule) -> None:
    """Refuse token ids that a network has no embedding for, and texts longer than its positions. On a GPU neither error says what
    failed, and the example may come up only in a late round.
    """
    images = data.data.images
    inputs = images.inputs if isinstance(images, Taken) else images  # split if the data have their own test set
    tokens = inputs if isinstance(inputs, TokenRows) else tokens_of(images)
    if tokens is None or not len(tokens):
        return
    vocabulary, longest = getattr(getattr(template, "backbone", None), "tokens_known", (None, None))
    lengths = tokens.lengths if isinstance(tokens, TokenRows) else np.full(*tokens.shape)
    flat = tokens.parts["ids"] if isinstance(tokens, TokenRows) else tokens.numpy().reshape(-1)
    if vocabulary is not None and (wrong := (flat < 0) | (flat >= vocabulary)).any():
        row = int(np.searchsorted(np.cumsum(lengths), wrong.argmax(), side="right"))
        raise FederationError(
            f"Example {row} of the data has the token {flat[wrong.argmax()]}, but the network knows 0 to "
            f"{vocabulary - 1}: give the data the tokenizer that belongs to the network."
        )
    if longest is not None and lengths.max() > longest:
        raise FederationError(
            f"The longest text has {lengths.max()} tokens, but the network has positions for {longest}: set the data's "
            f"max_length to at most {longest}."
        )


def tokens_of(inputs: Inputs) -> Tensor | None:
    """Token ids, shape (N, L), if that is what a network takes."""
    tokens = inputs.get(TOKENS) if isinstance(inputs, dict) else inputs
    return tokens if isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.dtype in (torch.int64, torch.int32) else None


@contextmanager
def explained(trainer: L.Trainer, module: FederatedModule, data: ClientDataModule) -> Iterator[None]:
    """A context for a fit. Explains an error in the very first training step: what the network got, and where it failed."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        is_of_shapes = isinstance(error, RuntimeError | IndexError) or _is_of_torch(error)
        if trainer.global_step > 0 or isinstance(error, OutOfMemoryError) or not is_of_shapes:
            raise
        raise FederationError(
            f"the first step failed: {type(getattr(module, 'backbone', module)).__name__}, given {kind_of(data)}, raised "
            f"{one_line(error)!r}{place_of(error)}. Check that the network, the loss and the data belong together."
        ) from error


def _is_of_torch(error: Exception) -> bool:
    """Whether an error was raised in torch, and not in other code."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("torch.")


def kind_of(data: ClientDataModule) -> str:
    """The parts of an example, such as ``torch.uint8 (3, 32, 32)``."""
    inputs, targets = data.data[data.splits[0][:1]]
    parts: dict[str, Any] = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    told = [
        f"{name} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for name, t in (*parts.items(), ("targets", targets))
    ]
    return ", ".join(told)
