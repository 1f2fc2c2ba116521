"""A check by numbers that a language model's logits of a token depend on nothing but that token and those before it in its row."""

import torch
from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule, Instructions
from lightning_fed.data.text.token_rows import positions_of
from lightning_fed.errors import FederationError
from lightning_fed.models import TransformerLM
from lightning_fed.models.transformer import Inputs
from lightning_fed.nn.evaluating import evaluating
from lightning_fed.seeding import isolated

LENGTH = 4
"""Tokens of a row."""

SINGLE, HALF = 0.001, 0.2
"""The share of their spread by which logits may differ from rounding, if the network computes in single precision or in less. Other
tokens change them by about their spread; in half precision a mixture of experts may take another expert.
"""


def refuse_mixed_tokens(module: FederatedModule, data: FederatedDataModule) -> None:
    """Refuse language models whose logits of a token also depend on later tokens or, if the data have them, on rows that are packed
    with its own, or on padding on the left. Whether an architecture can keep them apart is not written in its config.

    Each network gets a few tokens, as it is and where it is. One that cannot compute there, because its kernels need a GPU for
    example, is not checked.

    Raises:
        FederationError: says what the network mixes, and what to do.
    """
    for network in module.modules():
        if isinstance(network, TransformerLM):
            with isolated(), torch.no_grad(), evaluating(network):
                _check(network, data)


def _check(network: TransformerLM, data: FederatedDataModule) -> None:
    rows = _rows(network)
    alone = None if rows is None else _logits(network, {"input_ids": rows, "attention_mask": torch.ones_like(rows)})
    if rows is None or alone is None:
        return
    name = type(network.network).__name__
    first, changed, second = alone
    if _differ(network, first[:, :-1], changed[:, :-1]):
        raise FederationError(
            f"{name} sees the tokens that it is to predict: its logits of a token change with later tokens. Choose a causal "
            "language model, or set is_decoder in its config, if it knows that."
        )
    if not isinstance(data, Instructions):
        return
    if data.packing:
        mask = torch.ones_like(rows[::2])
        packed = _logits(network, {"input_ids": rows[::2].reshape(1, -1), "position_ids": positions_of(mask).reshape(1, -1)})
        if packed is not None and _differ(network, second, packed[0, :, LENGTH:]):
            raise FederationError(
                f"{name} does not keep packed rows apart: its logits of a row change with the row before it. Set the data's "
                "packing to false."
            )
    if data.padding == "left":
        mask = torch.cat([torch.zeros_like(rows[:1]), torch.ones_like(rows[:1])], dim=1)
        ids = torch.cat([torch.zeros_like(rows[:1]), rows[:1]], dim=1)
        padded = _logits(network, {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask)})
        if padded is not None and _differ(network, first, padded[0, :, LENGTH:]):
            raise FederationError(
                f"{name} takes padding on the left for text: its logits of a row change with it. Set the data's padding to right."
            )


def _rows(network: TransformerLM) -> Tensor | None:
    """Token ids ``(3, LENGTH)``: a row, the same with another last token, and another row. None: the vocabulary is unknown."""
    size, padding = network.tokens_known[0], getattr(network.network.config, "pad_token_id", None)
    known = [token for token in range(size or 0) if token != padding]  # of which some derive positions
    if len(known) < 2:
        return None
    spread = [known[step * (len(known) - 1) // (2 * LENGTH)] for step in range(2 * LENGTH + 1)]
    row = spread[1 : LENGTH + 1]
    return torch.tensor([row, [*row[:-1], spread[0]], spread[LENGTH + 1 :]])


def _logits(network: TransformerLM, inputs: Inputs) -> Tensor | None:
    """Logits ``(B, V, L)``; None if the network cannot compute them here."""
    device = next(network.parameters()).device
    try:
        return network({name: tensor.to(device) for name, tensor in inputs.items()}).cpu().double()
    except Exception:  # of any code; if it also fails in training, the first step explains it
        return None


def _differ(network: TransformerLM, expected: Tensor, got: Tensor) -> bool:
    """Whether logits ``(V, L)`` differ by more than rounding. Only their differences within a vocabulary count, as in softmax.
    Logits that are not finite, or all alike, do not differ.
    """
    rounding = max(torch.finfo(p.dtype).eps for p in network.parameters() if p.is_floating_point())
    is_single = rounding <= torch.finfo(torch.float32).eps and torch.get_float32_matmul_precision() == "highest"
    spread = expected - expected.mean(dim=0)
    error = got - got.mean(dim=0) - spread
    return bool(error.norm() > (SINGLE if is_single else HALF) * spread.norm() + rounding * expected.norm())
