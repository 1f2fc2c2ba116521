"""What is put on a frozen transformer: adapters behind its layers, tokens before its blocks, keys and values before its own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Adapter(nn.Module):
    r""":math:`h + W_{up}\, \mathrm{GELU}(W_{down} h + b) + b'`.

    Args:
        width: length d of h.
        hidden: length of what is between.
        bias: whether there are b and b'.
    """

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.down = nn.Linear(width, hidden, bias)
        self.up = nn.Linear(hidden, width, bias)
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)

    def forward(self, h: Tensor) -> Tensor:
        """Of and in the shape ``(…, d)``, and in the precision of the input."""
        added: Tensor = self.up(gelu(self.down(h.to(self.down.weight.dtype))))
        return h + added.to(h.dtype)


def adapted(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: a layer's output through the adapter that hangs on the layer. It is found there, and not kept by the hook,
    because networks are copied.
    """
    return layer.adapter(output)  # type: ignore[operator]


class Prompt(nn.Module):
    """Puts tokens behind the first one of a sequence, in the place of some.

    Args:
        tokens: ``(p, d)``, how they start.
        replaced: how many tokens behind the first are dropped.
    """

    def __init__(self, tokens: Tensor, replaced: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(tokens)
        self.replaced = replaced

    def forward(self, x: Tensor) -> Tensor:
        """``(B, L - replaced + p, d)`` of ``(B, L, d)``."""
        tokens = self.tokens.to(x.dtype).expand(len(x), -1, -1)  # of a frozen network, which may be less precise
        return torch.cat([x[:, :1], tokens, x[:, 1 + self.replaced :]], dim=1)


def prompted(block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward pre-hook: a block's input with the prompt that hangs on the block. It is found there, and not kept by the hook,
    because networks are copied.
    """
    hidden_states, *others = args
    return (block.prompt(hidden_states), *others)  # type: ignore[operator]


class Prefix(nn.Module):
    """Keys and values.

    Args:
        keys: ``(length, d)``, how they start.
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
    """Keys and values that maps make of fixed embeddings.

    Args:
        length: tokens of the prefix.
        width: length d of a key.
        hidden: length of what is between.
    """

    embeddings: Tensor

    def __init__(self, length: int, width: int, hidden: int) -> None:
        super().__init__()
        # Drawn on a stream of their own: they are never sent, so that everybody has to know them.
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
    """Attention of transformers' interface, with the prefix that hangs on the module before keys and values.

    Args:
        module: of the network; it has the prefix.
        query: ``(B, heads, L, d / heads)``.
        key: the same.
        value: the same.
        attention_mask: None; images have no padding.
        dropout: of the attention.
        scaling: of the products of queries and keys.
        **kwargs: what else the interface passes, of no use here.

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
