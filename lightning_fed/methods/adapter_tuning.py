"""Adapter tuning (Houlsby et al., ICML 2019, https://arxiv.org/abs/1902.00751), as in the comparison of FedHM (Section 6.4)."""

from collections.abc import Sequence
from typing import Any, Literal

from lightning_fed.methods.families.grouped_adapters import GroupTuning
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.adapters import Adapter, adapted
from lightning_fed.options import PositiveInt

PLACES = {"attention": ("attention.o_proj",), "mlp": ("mlp",), "both": ("attention.o_proj", "mlp")}
"""The modules of a block behind which adapters are put."""


class AdapterTuning(GroupTuning):
    r"""Clients train bottleneck adapters between the layers of a frozen vision transformer, and the server averages them.

    After the attention's output projection, the MLP, or both, and before the residual sum, h becomes
    :math:`h + W_{up}\, \mathrm{GELU}(W_{down} h + b) + b'`, with :math:`W_{down}` of shape ``(hidden, d)`` and :math:`W_{up}` of
    shape ``(d, hidden)``, which is 0 at first: training starts from the pretrained network. Layer norms stay frozen.

    A block's adapter has ``2 * d * hidden`` trained values, and another ``hidden + d`` with biases. Without biases and with one per
    block, ViT-S (12 blocks, d = 384) has 73,728 with ``hidden`` 8: FedHM's budget. Houlsby et al. have two per block, biases, and
    train the layer norms.

    peft has no such adapters, so the library implements them. Groups and monitored metric: see :class:`.GroupTuning`.

    Args:
        backbone: builds the network, given the number of classes: ``VisionTransformer``.
        num_classes: number of classes; None: as many as the data have.
        hidden: the adapters' hidden dimensions; client ``k`` has entry ``k mod len(list)``. FedHM's experiments: 8, 16, 32, 64.
        placement: ``"attention"``, ``"mlp"`` or ``"both"``, the two adapters per block of Houlsby et al.
        bias: whether adapters have biases.
        **kwargs: see :class:`.GroupTuning`. FedHM's experiments: Adam, lr 2e-3, one epoch, batches of 64.
    """

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        hidden: Sequence[PositiveInt] = (8,),
        placement: Literal["attention", "mlp", "both"] = "mlp",
        bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, sizes=hidden, num_classes=num_classes, **kwargs)
        self.placement = placement
        self.bias = bias

    def attach(self) -> None:
        """Put adapters on every block."""
        places = PLACES[self.placement]
        width = self.backbone.network.config.hidden_size
        for block in self.blocks(*places):
            for place in places:
                layer = block.get_submodule(place)
                layer.adapter = Adapter(width, self.size(), self.bias)
                layer.register_forward_hook(adapted)
