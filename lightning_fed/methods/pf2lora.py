"""PF2LoRA (Hao, Wu, Payani, Lee & Liu 2025, https://arxiv.org/abs/2503.03920)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core import PRIVATE_SHARE, State
from lightning_fed.methods.families.lora import CLIENT, LoRAModule, side_by_side
from lightning_fed.methods.families.second_order import SecondOrderModule, attend_with_second_derivatives, gradients
from lightning_fed.models.adapters import COMMON, adapted_layers
from lightning_fed.models.transformer import TransformerFactory
from lightning_fed.nn.rank import product_norm
from lightning_fed.options import NonNegativeFloat, PositiveInt


class PF2LoRA(LoRAModule, SecondOrderModule):
    r"""Two-level LoRA with a common adapter, which is averaged, and a smaller private one, which stays with the client.

    A client's weights are :math:`W + BA + D_k C_k` with the common :math:`x = (A, B)` and the private :math:`y_k = (C_k, D_k)`.
    The problem is bilevel: :math:`\min_x \frac{1}{M} \sum_k f_k(x, y_k^*(x))` with :math:`y_k^*(x) \in \arg\min_y f_k(x, y)`. A
    step of a client (Algorithm 1):

    1. :math:`y^+ = y - \alpha \nabla_y F(x, y; \pi)`.
    2. :math:`G = \nabla_x F(x, y^+; \xi) - \alpha \nabla_x \langle \nabla_y F(x, y; \zeta), v \rangle` with the constant
       :math:`v = \nabla_y F(x, y^+; \tilde\xi)`: the gradient through step 1.
    3. AdamW updates x with G; then :math:`y \leftarrow y^+`.

    The minus sign is that of eq. (4), Algorithm 1 and the lemmas; eq. (6) of the paper has a plus by mistake. The head belongs to
    x. Monitored: accuracy after aggregation, of the averaged x with the client's own y.

    Args:
        backbone: builds the network, given the number of classes: ``TransformerClassifier``. Its attention becomes ``eager`` if
            second derivatives are needed, because PyTorch's fused attention has none.
        num_classes: number of classes; None: as many as the data have.
        client_r: rank of the private adapter. The paper: 2 (DeBERTa-v3: 4), with an ``r`` of 8 (GPT-2: 4).
        client_lr: :math:`\alpha`, of plain gradient descent on y. The paper: 1e-3 for most of GLUE, with which y may stay close to
            zero: choose it on validation data, and check ``adapter/private_share/mean``.
        hypergradient: ``exact`` differentiates through step 1; ``finite_difference`` replaces the second term by a difference of
            two gradients; ``first_order`` leaves it out; ``none`` takes the gradients of x and y at the same point, the paper's
            ablation without a second level.
        batches: number of batches per step: 1 for everything, 2 (π = ζ and ξ = ξ̃, the paper's pseudo-code) or 4 (Algorithm 1);
            always 1 with ``hypergradient: none``.
        **kwargs: see :class:`.LoRAModule`. ``optimizer`` is of x and the head, ``gradient_clip`` limits G, not
            the step of y; ``lora_alpha``, which the paper does not state, scales both adapters alike. The paper: AdamW, lr 1e-3
            for most of GLUE, 10 ``steps``.
    """

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt | None = None,
        client_r: PositiveInt = 2,
        client_lr: NonNegativeFloat = 1e-3,
        hypergradient: Literal["exact", "finite_difference", "first_order", "none"] = "exact",
        batches: Literal[1, 2, 4] = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.client_r = client_r
        self.client_lr = client_lr
        self.hypergradient = hypergradient
        self.batches_per_step = 1 if hypergradient == "none" else batches

    def attach(self) -> None:
        """Add the common and the private adapter."""
        super().attach()
        self.add_adapter(CLIENT, self.client_r)
        if self.hypergradient == "exact":
            attend_with_second_derivatives(self.backbone)

    def inspect(self) -> dict[str, float]:
        """The ranks, and ``private_share/<layer>`` of each layer, see :meth:`private_shares`."""
        return super().inspect() | {f"{PRIVATE_SHARE}{layer}": share for layer, share in self.private_shares().items()}

    def private_shares(self) -> dict[str, float]:
        r"""The private adapter's share of what is added to a matrix, by name of the layer: :math:`\lVert DC \rVert_F / (\lVert BA
        \rVert_F + \lVert DC \rVert_F)`, 0 while nothing is added. If it is near 0, ``client_lr`` is too small for y to matter.
        """
        shares = {}
        for name, layer in adapted_layers(self).items():
            common, private = (
                product_norm(side_by_side(layer, "B", [kind]), side_by_side(layer, "A", [kind])) for kind in (COMMON, CLIENT)
            )
            shares[name] = private / (common + private) if private else 0.0
        return shares

    def compute_gradients(self, batch: Any) -> Tensor:
        """Set the gradients of x and step y; returns the loss of x at the new y."""
        lower, upper, upper_private, mixed = spread(batch, self.batches_per_step)
        common = self.phase.parameters
        adapter = self.adapter(CLIENT)
        private = {name: p.detach().requires_grad_() for name, p in adapter.items()}
        exact = self.hypergradient == "exact"
        one_graph = exact and mixed is lower and upper_private is upper
        if self.hypergradient == "none":
            loss = self.loss_at(private, lower)
            grads = gradients(loss, [*common, *private.values()])
            gradient, stepped = grads[: len(common)], self._step(private, grads[len(common) :])
        else:
            stepped = self._step(private, gradients(self.loss_at(private, lower), private.values(), graph=one_graph))
            if not one_graph:
                stepped = {name: tensor.detach().requires_grad_() for name, tensor in stepped.items()}
            loss = self.loss_at(stepped, upper)
            if one_graph or self.hypergradient == "first_order":
                gradient = gradients(loss, common)  # through step 1 if its graph was kept
            else:
                grads = gradients(loss, [*common, *stepped.values()])
                gradient, direction = grads[: len(common)], grads[len(common) :]
                if upper_private is not upper:
                    direction = gradients(self.loss_at(stepped, upper_private), stepped.values())
                if exact:  # ∇_x ⟨∇_y F(x, y), v⟩
                    terms = self.gradient_product(private, direction, mixed, common)
                else:
                    norm = torch.stack([v.square().sum() for v in direction]).sum().sqrt()
                    epsilon = 0.01 / norm.clamp(min=1e-12)  # along v = 0 the difference is 0 for any step
                    terms = self.gradient_difference(private, direction, epsilon, mixed, common)
                for grad, term in zip(gradient, terms, strict=True):
                    grad -= self.client_lr * term
        for parameter, grad in zip(common, gradient, strict=True):
            parameter.grad = grad.detach()
        with torch.no_grad():
            for name, parameter in adapter.items():
                parameter.copy_(stepped[name])
        return loss.detach()

    def _step(self, private: State, grads: Sequence[Tensor]) -> State:
        return {name: tensor - self.client_lr * grad for (name, tensor), grad in zip(private.items(), grads, strict=True)}


def spread(batch: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """The batches π, ξ, ξ̃ and ζ of a step with 1, 2 or 4 batches."""
    if count == 1:
        return batch, batch, batch, batch
    if count == 2:
        inner, outer = batch
        return inner, outer, outer, inner
    return tuple(batch)
