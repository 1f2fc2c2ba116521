"""A small Transformer that classifies sequences of token ids."""

import torch
from torch import Tensor, nn

from lightning_fed.errors import FederationError
from lightning_fed.models.backbone import Backbone
from lightning_fed.options import ClosedUnitInterval, PositiveInt


class TextTransformer(Backbone):
    """Token and learned position embeddings, Transformer encoder layers, the mean over the tokens, a linear head.

    Args:
        num_classes: outputs of the head.
        vocab_size: number of token ids. Padding (id 0, or what a tokenizer's mask says) is neither attended to nor averaged.
        max_length: longest sequence.
        width: width of the embeddings.
        heads: attention heads.
        layers: encoder layers.
        dropout: dropout of the encoder layers.
    """

    def __init__(
        self,
        num_classes: PositiveInt = 4,
        vocab_size: PositiveInt = 10000,
        max_length: PositiveInt = 64,
        width: PositiveInt = 128,
        heads: PositiveInt = 4,
        layers: PositiveInt = 2,
        dropout: ClosedUnitInterval = 0.1,
    ) -> None:
        super().__init__()
        if width % heads:
            raise FederationError(f"TextTransformer got width={width} and heads={heads}: give a width that heads divides.")
        self.tokens = nn.Embedding(vocab_size, width, padding_idx=0)
        self.positions = nn.Embedding(max_length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    @property
    def tokens_known(self) -> tuple[int, int]:
        """Size of the vocabulary, and the longest text in tokens."""
        return self.tokens.num_embeddings, self.positions.num_embeddings

    def encode(self, x: Tensor | dict[str, Tensor], cut: str = "features") -> Tensor:
        """Mean representation ``(B, width)`` of token ids ``(B, L)``, or of a tokenizer's ``input_ids`` and ``attention_mask``."""
        x, padding = (x, x == 0) if isinstance(x, Tensor) else (x["input_ids"], x["attention_mask"] == 0)  # (B, L)
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))  # (B, L, width)
        # PyTorch's fused kernel for eval mode gives NaN for a text of padding alone, whose mean is 0 whatever it attends to.
        hidden = self.encoder(hidden, src_key_padding_mask=padding & ~padding.all(dim=1, keepdim=True))
        present = (~padding).unsqueeze(-1)
        return (hidden * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
