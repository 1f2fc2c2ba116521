"""Fine-tuning with low-rank adapters (LoRA, Hu et al., ICLR 2022) on one frozen network that all clients share in memory."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jsonargparse.typing import ClosedUnitInterval, PositiveFloat
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fed.core import RANK, FederatedModule, FederationError, State, widened
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.models.adapters import COMMON, Adapters
from lightning_fed.models.factory import NETWORK
from lightning_fed.models.transformer import Transformer, TransformerFactory
from lightning_fed.nn.learn_in_float32 import learn_in_float32
from lightning_fed.nn.rank import effective_rank
from lightning_fed.options import PositiveInt

CLIENT = "client"
"""The name of the adapter that stays with a client; the one that is averaged has the usual one, :data:`.COMMON`."""


class LoRAModule(AdapterModule):
    """What federated LoRA methods have in common: a frozen network, and the adapter ``common`` that is averaged.

    Each adapted matrix W becomes :math:`W + s BA` with A ``(r, in)`` random and B ``(out, r)`` zero at first; peft does it. The
    moments of a client's AdamW stay with it between its turns.

    Args:
        backbone: builds the network, given the number of classes.
        num_classes: number of classes; None: as many as the data have.
        r: rank of the adapter.
        lora_alpha: scaling s is ``lora_alpha / r``; None: 1.
        target_modules: names, or a pattern, of the layers that are adapted, as in peft; None: those that the network or peft
            knows, which are the query and value projections.
        lora_dropout: dropout before the adapter.
        persistent: whether the optimizer's moments stay with the client between its turns; else each turn begins with none.
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
        """Names, or a pattern, of the layers that get adapters; None: those that peft knows for the network."""
        if self.target_modules is None and self.backbone.projections is not None:
            query, _, value, _ = self.backbone.projections
            return [query, value]
        return self.target_modules

    def add_adapter(self, name: str, rank: int) -> None:
        """Put another adapter on the network; all that are there act together."""
        Adapters(rank, self.scaling * rank, self.adapted_layers(), self.lora_dropout).add_to(self.backbone, name)

    def adapter(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of an adapter by their names in the state dict."""
        return {key: p for key, p in self.named_parameters() if f".lora_A.{name}." in key or f".lora_B.{name}." in key}

    def shared_names(self) -> set[str]:
        """The common adapter and, if it is trained, the head."""
        return super().shared_names() - self.adapter(CLIENT).keys()

    def export_adapter(self, folder: Path, private: bool = True) -> None:
        """Write a peft adapter, which ``PeftModel.from_pretrained(network, folder)`` loads onto the pretrained network.

        It holds what was drawn rather than pretrained (the head, a pooler) and, as one adapter, those that act together: of ranks r
        and r' one of rank r + r', for :math:`BA + DC` is the product of the factors side by side.

        Args:
            folder: to write to.
            private: with the client's own adapter; else the common one alone, which is what the server has.
        """
        from peft import LoraConfig, get_peft_model

        clean = self.frozen_backbones[0].copy(self.num_classes)
        own = self.state_dict()
        drawn = modules_of({name.removeprefix(NETWORK) for name in clean.head_names()}, clean.network)
        whole = [key for key in clean.network.state_dict() if any(key.startswith(f"{module}.") for module in drawn)]
        layers, adapters = self._adapted(private)
        rank = sum(next(iter(layers.values())).r[name] for name in adapters)
        config = LoraConfig(
            r=rank,
            lora_alpha=cast(int, self.scaling * rank),
            target_modules=[name.removeprefix(NETWORK) for name in layers],
            modules_to_save=drawn or None,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # as above
            exported = get_peft_model(clean.network, config)
        learn_in_float32(exported)
        values: State = {}
        for name, layer in layers.items():
            path = f"base_model.model.{name.removeprefix(NETWORK)}"
            for factor, side in (("lora_A", 0), ("lora_B", 1)):
                parts = [getattr(layer, factor)[adapter].weight.detach() for adapter in adapters]
                values[f"{path}.{factor}.default.weight"] = torch.cat(parts, dim=side)
        for key in whole:
            module = next(module for module in drawn if key.startswith(f"{module}."))
            rest = key.removeprefix(f"{module}.")
            values[f"base_model.model.{module}.modules_to_save.default.{rest}"] = own[f"backbone.{NETWORK}{key}"]
        exported.load_state_dict(values, strict=False)
        # What is new is in modules_to_save; asked to find out about embeddings, peft would look for the network on the hub.
        exported.save_pretrained(str(folder), save_embedding_layers=False)

    def export_merged(self, folder: Path, private: bool = True) -> None:
        """Write the whole network, its adapters added to the weights, as the transformers library saves and loads it.

        Args:
            folder: to write to.
            private: see :meth:`export_adapter`.
        """
        clean, own = self.frozen_backbones[0].copy(self.num_classes), self.state_dict()
        learned = {name: own[f"backbone.{name}"] for name in clean.head_names()}
        learned |= {f"{name.removeprefix('backbone.')}.weight": weight for name, weight in self.effective_weights(private).items()}
        state = {name: learned.get(f"{NETWORK}{name}", tensor).cpu() for name, tensor in clean.network.state_dict().items()}
        clean.network.save_pretrained(str(folder), state_dict=state)

    def effective_weights(self, private: bool = True) -> State:
        """The adapted matrices with what the adapters add to them, by layer; ``private``: see :meth:`export_adapter`."""
        layers, adapters = self._adapted(private)
        return {
            f"backbone.{name}": (layer.get_base_layer().weight + sum(map(layer.get_delta_weight, adapters))).detach()
            for name, layer in layers.items()
        }

    def adapter_ranks(self) -> dict[str, int]:
        """The :func:`lightning_fed.nn.rank.effective_rank` of what all adapters together add to a matrix, by name of the layer."""
        from peft.tuners.lora import LoraLayer

        ranks = {}
        for name, layer in self.named_modules():
            if isinstance(layer, LoraLayer):
                a, b = (
                    [cast(Tensor, factors[adapter].weight).detach() for adapter in layer.active_adapters]
                    for factors in (layer.lora_A, layer.lora_B)
                )
                ranks[name] = effective_rank(torch.cat(b, dim=1), torch.cat(a))
        return ranks

    def inspect(self) -> dict[str, float]:
        """``rank/<layer>`` of :meth:`adapter_ranks`."""
        return {f"{RANK}{layer}": float(rank) for layer, rank in self.adapter_ranks().items()}

    def _adapted(self, private: bool = True) -> tuple[dict[str, Any], list[str]]:
        """The adapted layers, by name within the backbone, and the adapters that act together, or the common one alone."""
        from peft.tuners.lora import LoraLayer

        layers = {name: layer for name, layer in self.backbone.named_modules() if isinstance(layer, LoraLayer)}
        return layers, next(iter(layers.values())).active_adapters if private else [COMMON]

    def loss_at(self, values: State, batch: Any) -> Tensor:
        """:meth:`client_loss` with other values for some parameters, by name in the state dict; differentiable in them."""
        return cast(Tensor, functional_call(LossOf(self), {f"module.{name}": value for name, value in values.items()}, (batch,)))

    def gradient_difference(
        self, point: State, direction: Iterable[Tensor], step: float | Tensor, batch: Any, wrt: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        r"""A second derivative times v: :math:`(\nabla F(p + \epsilon v) - \nabla F(p - \epsilon v)) / 2 \epsilon`, both under
        the same dropout.

        Args:
            point: p, values of some parameters by name.
            direction: v, a tensor for each of them.
            step: :math:`\epsilon`.
            batch: of F.
            wrt: what :math:`\nabla` is taken with respect to; None: the point.
        """
        moves = dict(zip(point, direction, strict=True))
        grads = []
        for signed in (step, -step):
            shifted = {name: (tensor + signed * moves[name]).detach().requires_grad_() for name, tensor in point.items()}
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                grads.append(gradients(self.loss_at(shifted, batch), shifted.values() if wrt is None else wrt))
        return [(ahead - behind) / (2 * step) for ahead, behind in zip(*grads, strict=True)]


def modules_of(parameters: Collection[str], network: nn.Module) -> list[str]:
    """The fewest modules that hold these parameters: a module that has no others rather than its parts, and where it has others the
    module that holds them itself.

    Args:
        parameters: by name.
        network: that has them.

    Raises:
        FederationError: for a parameter of the network itself, which belongs to no module in it.
    """
    found: list[str] = []

    def covered(name: str) -> bool:
        return any(name.startswith(f"{module}.") for module in found)

    for path, module in network.named_modules():  # from the outside to the inside
        own = {f"{path}.{name}" for name, _ in module.named_parameters()}
        if path and own and own <= set(parameters) and not covered(path):
            found.append(path)
    for name in sorted(parameters):
        if not covered(name):
            module_name = name.rpartition(".")[0]
            if not module_name:
                raise FederationError(f"{name} belongs to no layer, and a peft adapter stores whole layers: export with merged.")
            found.append(module_name)
    return sorted(module for module in found if not covered(module))


class Change(nn.Module):
    """A parametrization that adds a constant to a weight, in float32 at least; the sum has the weight's own precision.

    Args:
        weight: of any shape; it is not changed.
    """

    change: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("change", torch.zeros_like(widened(weight)), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """The sum."""
        return (weight + self.change).to(weight.dtype)


class LossOf(nn.Module):
    """A module whose output is the loss of another: what ``functional_call`` needs, which calls ``forward``.

    Args:
        module: the other.
    """

    def __init__(self, module: FederatedModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        return self.module.client_loss(batch)


def gradients(loss: Tensor, parameters: Iterable[Tensor], graph: bool = False) -> list[Tensor]:
    """Gradients of a scalar; zeros where it does not depend on a parameter.

    Args:
        loss: a scalar.
        parameters: with respect to what.
        graph: keep the graph, so that the gradients can be differentiated themselves.
    """
    return list(torch.autograd.grad(loss, list(parameters), create_graph=graph, materialize_grads=True))


def attend_with_second_derivatives(backbone: Transformer) -> None:
    """Let a network attend in a way that can be differentiated twice.

    Raises:
        FederationError: if the user chose another way.
    """
    if backbone.attention not in (None, "eager"):
        raise FederationError(
            f"attention is {backbone.attention!r}, which has no second derivative, and exact second-order gradients need one: "
            "leave attention out, or choose finite differences or first-order gradients."
        )
    backbone.network.set_attn_implementation("eager")
