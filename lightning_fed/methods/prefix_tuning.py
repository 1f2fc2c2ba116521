"""Prefix tuning (Li and Liang, ACL 2021, https://arxiv.org/abs/2101.00190), as in the comparison of FedHM (Section 6.4)."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_fed.core import FederationError, State
from lightning_fed.methods.families.grouped_adapters import GroupTuning
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.adapters import Prefix, ReparametrizedPrefix, attend
from lightning_fed.options import NonNegativeInt, PositiveInt

ATTENTION = "lightning_fed_prefix"
"""The name under which transformers finds :func:`.attend`."""


class PrefixTuning(GroupTuning):
    r"""Clients train a prefix of keys and values in each attention of a frozen vision transformer, and the server averages it.

    In each block, :math:`K \leftarrow [P_K; K]` and :math:`V \leftarrow [P_V; V]`, with :math:`P_K` and :math:`P_V` of shape
    ``(length, d)``; queries do not change, so that a block's output is as long as its input.

    During training, :math:`P = \tanh(E W_{down}^\top) W_{up}^\top`, with maps :math:`W_{down}` ``(hidden, d)`` and
    :math:`W_{up}` ``(d, hidden)`` for the keys and for the values of each block, without biases. The embeddings E of the prefix's
    tokens, ``(length, d)``, are standard normal numbers, the same in every block, client and run, and frozen: they are neither
    trained nor sent. Exported are :math:`P_K` and :math:`P_V`; the maps are dropped.

    ``4 * d * hidden`` values are trained per block; on ViT-S (12 blocks, d = 384) 73,728 with ``hidden`` 4: FedHM's budget. Without
    reparametrization :math:`P_K` and :math:`P_V` themselves are trained, ``2 * length * d`` values per block. Li and Liang have one
    MLP with biases for all blocks, and trained embeddings.

    peft's prefix tuning passes keys and values as those of earlier tokens, which a vision transformer does not accept; the
    library implements it as an attention function of transformers, on top of ``sdpa``. Groups and monitored metric: see
    :class:`.GroupTuning`.

    Args:
        backbone: builds the network, given the number of classes: ``VisionTransformer``.
        num_classes: number of classes; None: as many as the data have.
        hidden: hidden dimensions of the maps; client ``k`` has entry ``k mod len(list)``. FedHM's experiments: 4, 8, 16, 32.
        length: tokens of the prefix; 0 is the plain network. Not stated by FedHM; 32 is its largest ``hidden``: a hidden dimension
            beyond ``length`` does not make P more general.
        reparametrize: whether :math:`P_K` and :math:`P_V` come from maps. If not, ``hidden`` is not used, and has one entry.
        **kwargs: see :class:`.GroupTuning`. FedHM's experiments: Adam, lr 2e-3, one epoch, batches of 64.
    """

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        hidden: Sequence[PositiveInt] = (4,),
        length: NonNegativeInt = 32,
        reparametrize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, sizes=hidden, num_classes=num_classes, **kwargs)
        if not reparametrize and len(hidden) > 1:
            raise FederationError(
                f"hidden is {list(hidden)} with reparametrize false, which has no hidden dimension: leave hidden out, or set "
                "reparametrize."
            )
        self.length = length
        self.reparametrize = reparametrize

    def attach(self) -> None:
        """Put a prefix in the attention of every block."""
        from transformers import AttentionInterface

        if self.backbone.attention not in (None, "sdpa"):
            raise FederationError(f"attention is {self.backbone.attention!r}, but a prefix needs sdpa: leave attention out.")
        config = self.backbone.network.config
        shape, std = (self.length, config.hidden_size), config.initializer_range
        for block in self.blocks("attention.k_proj", "attention.v_proj"):
            block.get_submodule("attention").prefix = (
                ReparametrizedPrefix(*shape, self.size())
                if self.reparametrize
                else Prefix(std * torch.randn(shape), std * torch.randn(shape))
            )
        AttentionInterface.register(ATTENTION, attend)
        self.backbone.network.set_attn_implementation(ATTENTION)

    def export_state(self, private: bool = True) -> State:
        """The state dict of the network without reparametrization, with the same outputs."""
        state = super().export_state(private)
        for name, prefix in self.named_modules():
            if isinstance(prefix, ReparametrizedPrefix):
                for part in prefix.state_dict():
                    del state[f"{name}.{part}"]
                state[f"{name}.keys"], state[f"{name}.values"] = prefix()
        return state
