"""Fine-tuning with low-rank adapters (LoRA, Hu et al., ICLR 2022) on one frozen network that all clients share in memory."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fed.core import RANK, FederationError, State
from lightning_fed.errors import refuse_given
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.models.adapter_files import merged_weights, save_adapter, save_merged
from lightning_fed.models.adapters import COMMON, Adapters, adapted_layers, adapter_names, factor_of, is_linear
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.rank import effective_rank
from lightning_fed.options import ClosedUnitInterval, PositiveFloat, PositiveInt

CLIENT = "client"
"""The name of the adapter that stays with a client; the one that is averaged has the usual one, :data:`.COMMON`."""


class LoRAModule(AdapterModule):
    """Base of federated LoRA methods: a frozen network, and the adapter ``common``, which is averaged.

    Each adapted matrix W becomes :math:`W + s BA` with A ``(r, in)`` random and B ``(out, r)`` zero at first, through peft. The
    moments of a client's AdamW stay with it between its turns.

    Args:
        backbone: builds the network, given the number of classes.
        num_classes: number of classes; None: as many as the data have.
        r: rank of the adapter.
        lora_alpha: scaling s is ``lora_alpha / r``; None: 1.
        target_modules: names, or a pattern, of the adapted layers, as in peft; None: those that the network or peft
            knows, which are the query and value projections.
        lora_dropout: dropout before the adapter.
        persistent: whether the optimizer's moments stay with the client between its turns; otherwise each turn starts without any.
        **kwargs: see :class:`lightning_fed.methods.families.adapter_module.AdapterModule`.
    """

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        r: PositiveInt = 8,
        lora_alpha: PositiveFloat | None = None,
        target_modules: list[str] | str | None = None,
        lora_dropout: ClosedUnitInterval = 0.0,
        persistent: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, persistent=persistent, **kwargs)
        self.r = r
        self.scaling = 1.0 if lora_alpha is None else lora_alpha / r
        self.target_modules = target_modules
        self.lora_dropout = lora_dropout

    def attach(self) -> None:
        """Put adapters on the network. Default: the common one."""
        self.add_adapter(COMMON, self.rank())

    def rank(self) -> int:
        """Rank of the common adapter."""
        return self.r

    def adapted_layers(self) -> list[str] | str | None:
        """Names, or a pattern, of the layers that get adapters; None: see :class:`.Adapters`."""
        return self.target_modules

    def add_adapter(self, name: str, rank: int) -> None:
        """Put another adapter on the network; all its adapters act together."""
        Adapters(rank, self.scaling * rank, self.adapted_layers(), self.lora_dropout).add_to(self.backbone, name)

    def adapter(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of an adapter by their names in the state dict."""
        own = {f"backbone.{key}" for key in adapter_names(self.backbone, "A", name) | adapter_names(self.backbone, "B", name)}
        return {key: p for key, p in self.named_parameters() if key in own}

    def linear_layers(self, changes: bool = False) -> dict[str, Any]:
        """The adapted layers by name, for methods that are defined for linear layers.

        Args:
            changes: whether the method also changes their own weights, which cannot be quantised then.

        Raises:
            FederationError: if another layer is adapted.
        """
        layers, method = adapted_layers(self), type(self).__name__
        for name, layer in layers.items():
            base = layer.get_base_layer()
            if not is_linear(base):
                raise FederationError(
                    f"{name} is a {type(base).__name__}, but {method} adapts linear layers: name such in target_modules."
                )
            if changes and not base.weight.is_floating_point():
                raise FederationError(
                    f"{name} is quantised, and {method} changes its weight: load the network without quantization."
                )
        return layers

    def refuse_embeddings(self, why: str) -> None:
        """Raise :class:`FederationError` if an embedding is adapted, whose B is random and A zero at first.

        Args:
            why: what the method does, for which the initial B must be zero.
        """
        for path, layer in adapted_layers(self).items():
            if layer.lora_embedding_A:
                raise FederationError(
                    f"{path} is an embedding, whose A is zero at first, and {type(self).__name__} {why}: leave it out of "
                    "target_modules."
                )

    def shared_names(self) -> set[str]:
        """The common adapter and, if it is trained, the head."""
        return super().shared_names() - self.adapter(CLIENT).keys()

    def export_adapter(self, folder: Path, private: bool = True) -> None:
        """Write a peft adapter, which ``PeftModel.from_pretrained(network, folder)`` loads onto the pretrained network.

        Args:
            folder: to write to.
            private: with the client's own adapter; otherwise only the common one, as on the server.
        """
        save_adapter(folder, self.backbone, self.without_adapters(), self._acting(private))

    def export_merged(self, folder: Path, private: bool = True) -> None:
        """Write the whole network, with its adapters added to the weights, in the format of the transformers library.

        Args:
            folder: to write to.
            private: see :meth:`export_adapter`.
        """
        weights = {name.removeprefix("backbone."): weight for name, weight in self.effective_weights(private).items()}
        save_merged(folder, self.backbone, self.without_adapters(), weights)

    def effective_weights(self, private: bool = True) -> State:
        """The adapted matrices with the adapters' products added, by layer; ``private``: see :meth:`export_adapter`."""
        return {f"backbone.{name}": weight for name, weight in merged_weights(self.backbone, self._acting(private)).items()}

    def adapter_ranks(self) -> dict[str, int]:
        """The :func:`lightning_fed.nn.rank.effective_rank` of the sum of all adapters' products, by name of the layer."""
        return {
            name: effective_rank(side_by_side(layer, "B", active), side_by_side(layer, "A", active))
            for name, layer in adapted_layers(self).items()
            if (active := layer.active_adapters)
        }

    def inspect(self) -> dict[str, float]:
        """``rank/<layer>`` of :meth:`adapter_ranks`."""
        return {f"{RANK}{layer}": float(rank) for layer, rank in self.adapter_ranks().items()}

    def _acting(self, private: bool = True) -> list[str]:
        """Names of the adapters that act together, or of the common one only."""
        layer = next(iter(adapted_layers(self.backbone).values()), None)
        return list(layer.active_adapters) if layer is not None and private else [COMMON]


def refuse_persistent(method: str, given: Mapping[str, Any]) -> None:
    """Refuse ``persistent`` among the arguments of a method whose optimizers are new in each round."""
    refuse_given(method, given, "persistent", "its optimizers are new in each round")


def side_by_side(layer: Any, factor: Literal["A", "B"], adapters: Iterable[str]) -> Tensor:
    """Concatenated A ``(r, in)`` or B ``(out, r)`` of a layer's adapters that act together; r is the sum of their ranks, and ``in``
    includes the kernel of a convolution.
    """
    factors = (factor_of(layer, factor, adapter).flatten(1) for adapter in adapters)
    return torch.cat([*factors], dim=int(factor == "B"))
