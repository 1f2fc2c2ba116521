"""Second-order gradients, for methods whose step differentiates through another step."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_fed.core import FederatedModule, FederationError, State
from lightning_fed.models.transformer import Transformer
from lightning_fed.nn.losses import FunctionOf, call_with


class SecondOrderModule(FederatedModule):
    """Base of Per-FedAvg and PF2LoRA: the loss, its gradients and second derivatives, at any point.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    scales_gradients = False

    def loss_at(self, values: State, batch: Any, moves_statistics: bool = True) -> Tensor:
        """:meth:`client_loss` with other values for some parameters, by name in the state dict; differentiable in them.

        Args:
            values: of some parameters.
            batch: of the loss.
            moves_statistics: whether batch norm in train mode updates its running statistics with the batch.
        """
        buffers = {} if moves_statistics else {name: buffer.clone() for name, buffer in self.named_buffers()}
        state = {f"module.{name}": value for name, value in {**buffers, **values}.items()}
        return cast(Tensor, call_with(FunctionOf(self, self.client_loss), state, batch))

    def gradient_product(
        self, point: State, direction: Iterable[Tensor], batch: Any, wrt: Iterable[Tensor] | None = None
    ) -> list[Tensor]:
        r"""A second derivative times v, :math:`\nabla \langle \nabla_p F, v \rangle`; see :meth:`gradient_difference`."""
        grads = gradients(self.loss_at(point, batch, moves_statistics=False), point.values(), graph=True)
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
            wrt: variables of :math:`\nabla`; None: the point.
        """
        moves = dict(zip(point, direction, strict=True))
        grads = []
        for signed in (step, -step):
            shifted = {name: (tensor + signed * moves[name]).detach().requires_grad_() for name, tensor in point.items()}
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                loss = self.loss_at(shifted, batch, moves_statistics=False)
                grads.append(gradients(loss, shifted.values() if wrt is None else wrt))
        return [(ahead - behind) / (2 * step) for ahead, behind in zip(*grads, strict=True)]


def gradients(loss: Tensor, parameters: Iterable[Tensor], graph: bool = False) -> list[Tensor]:
    """Gradients of a scalar; zeros where it does not depend on a parameter.

    Args:
        loss: a scalar.
        parameters: variables of the gradients.
        graph: keep the graph, so that the gradients can be differentiated themselves.
    """
    return list(torch.autograd.grad(loss, list(parameters), create_graph=graph, materialize_grads=True))


def attend_with_second_derivatives(backbone: Transformer) -> None:
    """Set a network's attention to an implementation that can be differentiated twice.

    Raises:
        FederationError: if the user chose another implementation.
    """
    if backbone.attention not in (None, "eager"):
        raise FederationError(
            f"attention is {backbone.attention!r}, which has no second derivative, and exact second-order gradients need one: "
            "leave attention out, or choose finite differences or first-order gradients."
        )
    backbone.network.set_attn_implementation("eager")
