"""Low-rank adapters (LoRA, Hu et al., ICLR 2022) on any network, through peft, with peft's option names."""

import re
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn

from lightning_fed.errors import FederationError
from lightning_fed.models.backbone import Backbone, Wrapped
from lightning_fed.models.factory import name_of
from lightning_fed.models.transformer import Transformer
from lightning_fed.options import ClosedUnitInterval, PositiveFloat, PositiveInt
from lightning_fed.tensors import widened

COMMON = "common"
"""The name of the adapter that a network has if it has one."""

ALL_LINEAR = "all-linear"
"""As ``target_modules``: every linear layer but the heads and, as in peft, what makes words of a language model's features."""


A_SLIP = 100
"""How many times as many numbers as the matrix that it adapts an adapter has, if nobody meant it."""


@dataclass(frozen=True)
class Adapters:
    r"""Low-rank adapters on a network whose own weights are frozen: each adapted matrix W becomes :math:`W + s BA` with A
    ``(r, in)`` random and B ``(out, r)`` zero at first. They learn in float32, and so do the head and ``modules_to_save``.

    Names and defaults are those of peft's ``LoraConfig``.

    Args:
        r: rank of the adapters; or a list, of which client ``k`` has entry ``k mod len(list)``, for methods whose clients may have
            different networks.
        lora_alpha: the scale s is ``lora_alpha / r``.
        target_modules: names, or endings of names, of the adapted layers (linear ones, convolutions, embeddings), or a pattern
            of whole names; ``all-linear``: every linear layer but the heads and the output layer of a language model. None: query
            and value projections, if the network or peft knows them.
        lora_dropout: dropout before the adapters.
        use_rslora: let the scale be :math:`\mathrm{lora\_alpha} / \sqrt{r}` (Kalajdzievski 2023).
        layers_to_transform: indices of the blocks whose layers are adapted; None: all.
        modules_to_save: names, or endings of names, of further layers that are trained as a whole.
    """

    r: list[PositiveInt] | PositiveInt = 8
    lora_alpha: PositiveFloat = 8
    target_modules: list[str] | str | None = None
    lora_dropout: ClosedUnitInterval = 0.0
    use_rslora: bool = False
    layers_to_transform: list[int] | int | None = None
    modules_to_save: list[str] | None = None

    @property
    def ranks(self) -> list[int]:
        """The clients' ranks; client ``k`` has entry ``k mod len(list)``."""
        return self.r if isinstance(self.r, list) else [self.r]

    def add_to(self, network: Backbone | Transformer, name: str = COMMON, place: int = 0) -> None:
        """Add adapters to a network, in place, next to existing ones. They require gradients, and so do all parameters that did.

        Args:
            network: in which only heads and further modules require gradients, see :class:`.FrozenBackbone`.
            name: of these adapters.
            place: index of their rank.

        Raises:
            FederationError: if no layer has such a name, or one cannot have such adapters.
        """
        from peft import LoraConfig, inject_adapter_in_model

        inner = inside(network)
        frozen = {id(parameter) for parameter in network.parameters() if not parameter.requires_grad}
        learning = [path for path, p in inner.named_parameters() if p.requires_grad and ".lora_" not in path]
        heads = sorted({path.rpartition(".")[0] for path in learning})
        attentions = tuple(f"{path}." for path, layer in network.named_modules() if isinstance(layer, nn.MultiheadAttention))
        rank = self.ranks[place % len(self.ranks)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second adapter is intended
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft corrects it for GPT-2's transposed layers
            try:
                config = LoraConfig(
                    r=rank,
                    lora_alpha=cast(int, self.lora_alpha),
                    target_modules=self._targets(network, heads),
                    # Of a list, peft would also exclude layers of the body whose names end like a head's.
                    exclude_modules="|".join(map(re.escape, heads)) or None,
                    lora_dropout=self.lora_dropout,
                    use_rslora=self.use_rslora,
                    layers_to_transform=self.layers_to_transform,
                )
                inject_adapter_in_model(config, inner, name)
            except (ValueError, re.error) as error:
                why = str(error).partition(". ")[0].rstrip(".")
                raise FederationError(
                    f"No adapter can be put on target_modules {self.target_modules} of {name_of(network)}: {why}. Name layers in "
                    f"target_modules as in the network's named_modules(): {_some(adaptable(inner, heads))}."
                ) from error
        for path, layer in adapted_layers(network).items():
            if f"{path}.".startswith(attentions):
                raise FederationError(
                    f"No adapter can be put on {path} of {name_of(network)}: PyTorch's MultiheadAttention reads the weights of its "
                    f"layers, past their adapters. Name other layers in target_modules: {_some(adaptable(inner, heads))}."
                )
            layer.set_adapter(list(layer.r))  # adding an adapter deactivates earlier ones
            rows, columns = _shape(layer.get_base_layer())
            if rank * (rows + columns) > A_SLIP * rows * columns:  # a rank beyond the smaller side has no further use, but works
                raise FederationError(
                    f"Adapters of rank {rank} were asked for, but the layer {path} of {name_of(network)} is {rows} x {columns}: "
                    f"give up to {min(rows, columns)}, or leave the layer out of target_modules."
                )
        for key in adapter_names(network, "A", name) | adapter_names(network, "B", name):
            factor = network.get_parameter(key)
            factor.data = widened(factor.data)  # also one that a method freezes
        for parameter in network.parameters():
            parameter.requires_grad_(id(parameter) not in frozen)
        _call_every_layer(network)

    def _targets(self, network: Backbone | Transformer, heads: Collection[str]) -> list[str] | str | None:
        """Names, or endings of names, for peft: whole names where blocks are chosen, as versions of peft differ in which blocks
        they find.
        """
        inner: Any = inside(network)
        wanted = self.target_modules
        if wanted == ALL_LINEAR:
            has_words = hasattr(inner, "get_output_embeddings")
            output = inner.get_output_embeddings() if has_words else None  # which peft leaves out, too
            wanted = [path for path, layer in adaptable(inner, heads).items() if is_linear(layer) and layer is not output]
        elif wanted is None and isinstance(network, Transformer) and network.projections is not None:
            query, _, value, _ = network.projections
            wanted = [query, value]
        if self.layers_to_transform is None or not isinstance(wanted, list):
            return wanted
        blocks = [self.layers_to_transform] if isinstance(self.layers_to_transform, int) else self.layers_to_transform
        paths = [path for path in adaptable(inner, heads) if f".{path}".endswith(tuple(f".{ending}" for ending in wanted))]
        within = [path for path in paths if (block := re.search(r"\.(\d+)\.", path)) and int(block[1]) in blocks]
        return within if paths else wanted


def inside(network: Backbone | Transformer) -> nn.Module:
    """The network of another library inside a wrapper; otherwise the network itself."""
    return network.network if isinstance(network, Wrapped | Transformer) else network


def adapted_layers(network: nn.Module) -> dict[str, Any]:
    """The layers that have adapters, by name: peft's ``LoraLayer``."""
    from peft.tuners.lora import LoraLayer

    return {path: layer for path, layer in network.named_modules() if isinstance(layer, LoraLayer)}


def adapter_names(network: nn.Module, factor: Literal["A", "B"], name: str = COMMON) -> set[str]:
    """Names of one factor's tensors within a network: A, ``(r, in)``, or B, ``(out, r)``."""
    return {
        f"{path}.{place}.{name}{end}"
        for path, layer in adapted_layers(network).items()
        for place, end in ((f"lora_{factor}", ".weight"), (f"lora_embedding_{factor}", ""))
        if name in getattr(layer, place)
    }


def factor_of(layer: Any, factor: Literal["A", "B"], name: str) -> Tensor:
    """A, ``(r, in)``, or B, ``(out, r)``, of an adapted layer, without gradient; those of a convolution have its kernel, too."""
    embeds = name in layer.lora_embedding_A
    found = getattr(layer, f"lora_embedding_{factor}")[name] if embeds else getattr(layer, f"lora_{factor}")[name].weight
    return cast(Tensor, found.detach())


def adaptable(network: nn.Module, heads: Collection[str] = ()) -> dict[str, nn.Module]:
    """The layers that could have adapters, by name."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
    adapted = adapted_layers(network)  # another adapter adapts the whole layer
    layers = dict(network.named_modules())
    found = {
        path: adapted[path].get_base_layer() if path in adapted else layer
        for path, layer in layers.items()
        if path in adapted or isinstance(layer, kinds) or is_linear(layer)
    }
    # MultiheadAttention reads the weights of its layers and does not call them.
    closed = tuple(f"{path}." for path, layer in layers.items() if path in adapted or isinstance(layer, nn.MultiheadAttention))
    return {path: layer for path, layer in found.items() if path not in heads and not path.startswith(closed)}


def _call_every_layer(network: nn.Module) -> None:
    """Let PyTorch's encoder layers call their adapted layers in eval mode, too, where a fused kernel reads the layers' weights."""
    for part in network.modules():
        if isinstance(part, nn.TransformerEncoder | nn.TransformerEncoderLayer) and adapted_layers(part):
            if isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False  # which only the kernel takes
            else:
                part.activation_relu_or_gelu = 0  # no activation that the kernel knows


def named(network: nn.Module, endings: Collection[str]) -> dict[str, nn.Module]:
    """The layers of a network with these names or endings of names.

    Raises:
        FederationError: for a name that no layer has.
    """
    modules = dict(network.named_modules())
    found = {path: module for path, module in modules.items() if any(f".{path}".endswith(f".{ending}") for ending in endings)}
    for ending in endings:
        if not any(f".{path}".endswith(f".{ending}") for path in found):
            layers = {path for path, module in modules.items() if any(True for _ in module.parameters(recurse=False))}
            raise FederationError(
                f"modules_to_save names {ending!r}, but {name_of(network)} has no such layer: name some of {_some(layers)}."
            )
    return found


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is linear, possibly transposed or quantised."""
    kinds = (kind.__name__ for kind in type(layer).__mro__)  # parametrizations make a subclass
    return isinstance(layer, nn.Linear) or "Conv1D" in kinds  # transformers' own, of GPT-2


def _shape(layer: Any) -> tuple[int, int]:
    weight: Tensor = layer.weight
    # The weight of a quantised layer has another shape.
    return getattr(layer, "out_features", weight.shape[0]), getattr(layer, "in_features", weight[0].numel())


def _some(layers: Iterable[str]) -> str:
    """Endings of some layers' names, without the indices of their blocks."""
    ends = list(dict.fromkeys(re.sub(r"^.*\.\d+\.", "", path) for path in layers))
    return ", ".join(ends[:8]) + ", …" * (len(ends) > 8)
