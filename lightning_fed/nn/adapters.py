"""Additions to a frozen transformer: adapters after its layers, prompt tokens in its blocks, and prefixes of keys and values."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Adapter(nn.Module):
    r""":math:`h + W_{up}\, \mathrm{GELU}(W_{down} h + b) + b'`.

    Args:
        width: length d of h.
        hidden: length of the hidden layer.
        bias: whether there are b and b'.
    """

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(width, hidden, bias)
        self.up = nn.Linear(hidden, width, bias)
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)

    def forward(self, h: Tensor) -> Tensor:
        """Maps ``(…, d)`` to the same shape, in the precision of the input."""
        added: Tensor = self.up(gelu(self.down(h.to(self.down.weight.dtype))))
        return h + added.to(h.dtype)


def adapted(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: apply the layer's adapter to its output. The hook looks the adapter up on the layer instead of keeping it,
    because networks are copied.
    """
    return layer.adapter(output)  # type: ignore[operator]


class Prompt(nn.Module):
    """Inserts tokens after the first one of a sequence, in place of some.

    Args:
        tokens: initial values, ``(p, d)``.
        replaced: number of tokens after the first that are dropped.
    """

    def __init__(self, tokens: Tensor, replaced: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(tokens)
        self.replaced = replaced

    def forward(self, x: Tensor) -> Tensor:
        """``(B, L - replaced + p, d)`` of ``(B, L, d)``."""
        tokens = self.tokens.to(x.dtype).expand(len(x), -1, -1)  # x comes from a frozen network, which may have a lower precision
        return torch.cat([x[:, :1], tokens, x[:, 1 + self.replaced :]], dim=1)


def prompted(block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook: add the block's prompt to its input. The hook looks the prompt up on the block instead of keeping it,
    because networks are copied.
    """
    hidden_states, *others = args
    return (block.prompt(hidden_states), *others)  # type: ignore[operator]


class Prefix(nn.Module):
    """A prefix of trainable keys and values.

    Args:
        keys: initial values, ``(length, d)``.
        values: the same.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys = nn.Parameter(keys)
        self.values = nn.Parameter(values)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Keys and values, each ``(length, d)``."""
        return self.keys, self.values


class ReparametrizedPrefix(nn.Module):
    """A prefix of keys and values computed by trainable maps from fixed embeddings.

    Args:
        length: tokens of the prefix.
        width: length d of a key.
        hidden: length of the hidden layer.
    """

    embeddings: Tensor

    def __init__(self, length: int, width: int, hidden: int) -> None:
        super().__init__()
        # Drawn from their own random stream: they are never sent, so every client must draw the same.
        embeddings = torch.randn(length, width, generator=torch.Generator().manual_seed(0), device="cpu")
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.key_maps, self.value_maps = (
            nn.Sequential(nn.Linear(width, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, width, bias=False)) for _ in range(2)
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Keys and values, each ``(length, d)``."""
        return self.key_maps(self.embeddings), self.value_maps(self.embeddings)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface, with the module's prefix before keys and values.

    Args:
        module: the attention module, which has the prefix.
        query: ``(B, heads, L, d / heads)``.
        key: the same.
        value: the same.
        attention_mask: None; images have no padding.
        dropout: of the attention.
        scaling: of the products of queries and keys.
        **kwargs: other arguments of the interface, not used here.

    Returns:
        ``(B, L, heads, d / heads)``, and no weights.
    """
    batch, heads = key.shape[:2]
    keys, values = (
        torch.cat([part.to(own.dtype).unflatten(-1, (heads, -1)).transpose(0, 1).expand(batch, -1, -1, -1), own], dim=2)
        for part, own in zip(module.prefix(), (key, value), strict=True)  # type: ignore[operator]
    )
    output = scaled_dot_product_attention(query, keys, values, attention_mask, dropout, scale=scaling)
    return output.transpose(1, 2), None
