"""Fine-tuning with low-rank adapters (LoRA, Hu et al., ICLR 2022) on one frozen network that all clients share in memory."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fed.core import RANK, FederatedModule, FederationError, State
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.models.adapter_files import merged_weights, save_adapter, save_merged
from lightning_fed.models.adapters import COMMON, Adapters, adapted_layers
from lightning_fed.models.transformer import Transformer, TransformerFactory
from lightning_fed.nn.rank import effective_rank
from lightning_fed.options import ClosedUnitInterval, PositiveFloat, PositiveInt

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

        Args:
            folder: to write to.
            private: with the client's own adapter; else the common one alone, which is what the server has.
        """
        save_adapter(folder, self.backbone, self.without_adapters(), self._acting(private))

    def export_merged(self, folder: Path, private: bool = True) -> None:
        """Write the whole network, its adapters added to the weights, as the transformers library saves and loads it.

        Args:
            folder: to write to.
            private: see :meth:`export_adapter`.
        """
        weights = {name.removeprefix("backbone."): weight for name, weight in self.effective_weights(private).items()}
        save_merged(folder, self.backbone, self.without_adapters(), weights)

    def effective_weights(self, private: bool = True) -> State:
        """The adapted matrices with what the adapters add to them, by layer; ``private``: see :meth:`export_adapter`."""
        return {f"backbone.{name}": weight for name, weight in merged_weights(self.backbone, self._acting(private)).items()}

    def adapter_ranks(self) -> dict[str, int]:
        """The :func:`lightning_fed.nn.rank.effective_rank` of what all adapters together add to a matrix, by name of the layer."""
        return {
            name: effective_rank(side_by_side(layer, "lora_B", active), side_by_side(layer, "lora_A", active))
            for name, layer in adapted_layers(self).items()
            if (active := layer.active_adapters)
        }

    def inspect(self) -> dict[str, float]:
        """``rank/<layer>`` of :meth:`adapter_ranks`."""
        return {f"{RANK}{layer}": float(rank) for layer, rank in self.adapter_ranks().items()}

    def _acting(self, private: bool = True) -> list[str]:
        """The adapters that act together, or the common one alone."""
        layer = next(iter(adapted_layers(self.backbone).values()), None)
        return list(layer.active_adapters) if layer is not None and private else [COMMON]

    def loss_at(self, values: State, batch: Any) -> Tensor:
        """:meth:`client_loss` with other values for some parameters, by name in the state dict; differentiable in them."""
        return cast(Tensor, functional_call(LossOf(self), {f"module.{name}": value for name, value in values.items()}, (batch,)))

    def gradient_product(
        self, point: State, direction: Iterable[Tensor], batch: Any, wrt: Iterable[Tensor] | None = None
    ) -> list[Tensor]:
        r"""A second derivative times v, :math:`\nabla \langle \nabla_p F, v \rangle`; see :meth:`gradient_difference`."""
        grads = gradients(self.loss_at(point, batch), point.values(), graph=True)
        inner = torch.stack([(grad * v).sum() for grad, v in zip(grads, direction, strict=True)]).sum()
        return gradients(inner, point.values() if wrt is None else wrt)

    def gradient_difference(
        self, point: State, direction: Iterable[Tensor], step: float | Tensor, batch: Any, wrt: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        r"""The same by finite differences, :math:`(\nabla F(p + \epsilon v) - \nabla F(p - \epsilon v)) / 2 \epsilon`, both under
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


def side_by_side(layer: Any, factor: str, adapters: Iterable[str]) -> Tensor:
    """A ``(r, in)`` or B ``(out, r)`` of adapters of a layer that act together, r being the sum of their ranks."""
    return torch.cat([getattr(layer, factor)[adapter].weight.detach() for adapter in adapters], dim=int(factor == "lora_B"))


class LossOf(nn.Module):
    """A module whose output is the loss of another: what ``functional_call`` needs, which calls ``forward``.

    Args:
        module: the other.
    """

    def __init__(self, module: FederatedModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
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
