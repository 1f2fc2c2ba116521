"""A step of DP-SGD: per-example gradients, clipped, summed and noised."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from lightning_fed.core.phased_module import PhasedModule
from lightning_fed.errors import FederationError, require
from lightning_fed.nn.losses import FunctionOf, call_with
from lightning_fed.tensors import State

PerExample = Literal["vmap", "loop"]

MODULE = "module."
"""Prefix of parameter names in a :class:`.FunctionOf`."""


class PrivateGradients:
    r"""Sets the gradients of a step. Each example's gradient, over all parameters of the phase, is scaled down to a norm of at most
    C. The sum gets Gaussian noise of standard deviation zC and is divided by the expected batch size. The gradient of the phase's
    penalty, which depends on no example, is added without noise.

    Args:
        clip: C.
        multiplier: z.
        batch_size: expected batch size, :math:`q n_k`.
        normals: returns so many standard normal numbers for a name. No two calls have the same name.
        per_example: see :class:`.ExampleDP`.
        chunk: see :class:`.ExampleDP`.
    """

    def __init__(
        self,
        clip: float,
        multiplier: float,
        batch_size: int,
        normals: Callable[[str, int], Tensor],
        per_example: PerExample = "vmap",
        chunk: int = 64,
    ) -> None:
        self.clip, self.multiplier, self.batch_size, self.normals = clip, multiplier, batch_size, normals
        self.per_example, self.chunk = per_example, chunk
        self._steps = 0

    def __call__(self, module: PhasedModule, batch: Any) -> Tensor:
        """Set the gradients of the running phase. Returns the mean loss of the examples, 0 for an empty batch.

        Raises:
            FederationError: for a network that ``vmap`` cannot trace, a loss that changes the model, and a precision that scales
                gradients.
        """
        require(
            module.trainer.precision != "16-mixed",
            "privacy of examples got precision 16-mixed, whose gradients are scaled: set the trainer's precision to 32-true or "
            "bf16-mixed.",
        )
        learning = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        strange = [name for name, parameter in learning.items() if not parameter.is_floating_point()]
        require(
            not strange, f"privacy of examples got {next(iter(strange), '')!r}, which is complex: give a network of real numbers."
        )
        total, loss = self.clipped_sum(module, learning, batch)
        for name, parameter in learning.items():
            noise = self.normals(f"{module.phase.name}/{self._steps}/{name}", parameter.numel()).view_as(parameter)
            total[name] += self.multiplier * self.clip * noise.to(total[name])
            parameter.grad = (total[name] / self.batch_size).to(parameter)
        if module.phase.penalty is not None and (penalty := module.phase.penalty()).requires_grad:
            module.manual_backward(penalty)
        self._steps += 1
        return loss

    def clipped_sum(self, module: PhasedModule, learning: dict[str, nn.Parameter], batch: Any) -> tuple[State, Tensor]:
        """Sum of the clipped gradients, by parameter name and at least in float32, and the mean loss. An example whose gradient is
        not finite counts as zero: otherwise it would decide whether the run goes on.
        """
        total = {name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in learning.items()}
        examples, loss, before = extract_batch_size(batch), torch.zeros((), device=module.device), _versions(module)
        each = self._at_once if self.per_example == "vmap" else self._one_by_one
        for gradients, losses in each(module, learning, batch, examples):
            rows = {name: gradient.reshape(len(losses), -1).to(total[name]) for name, gradient in gradients.items()}
            norms = [torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows.values()]
            norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            scale = torch.where(norm.isfinite(), (self.clip / norm).clamp(max=1.0), 0.0)  # a gradient of zero stays one
            for name, row in rows.items():
                total[name] += (scale.to(row) @ row.nan_to_num(0.0, 0.0, 0.0)).view_as(total[name])
            loss = loss + losses.detach().nan_to_num(0.0, 0.0, 0.0).sum() / examples
        require(
            _versions(module) == before,
            f"{type(module).__name__} got privacy of examples, but its loss changes the model: choose a method such as FedAvg, "
            "FedPer or Ditto.",
        )
        return total, loss

    def _at_once(
        self, module: PhasedModule, learning: dict[str, nn.Parameter], batch: Any, examples: int
    ) -> Iterator[tuple[State, Tensor]]:
        """Gradients ``(chunk, …)`` and losses ``(chunk,)`` of one chunk of examples after the other."""
        shell = FunctionOf(module, module.phase.loss)
        values = {f"{MODULE}{name}": parameter.detach() for name, parameter in learning.items()}

        def loss(values: State, example: Any) -> Tensor:
            found: Tensor = call_with(shell, values, tree_map(lambda tensor: tensor.unsqueeze(0), example))
            return found

        gradients_of = vmap(grad_and_value(loss), in_dims=(None, 0), randomness="different")
        # torch warns that it would compute the fused attention of a CPU for one example after the other.
        attention = partial(sdpa_kernel, SDPBackend.MATH) if module.device.type == "cpu" else nullcontext
        for start in range(0, examples, self.chunk):
            part = tree_map(lambda tensor, start=start: tensor[start : start + self.chunk], batch)
            try:
                with attention():
                    gradients, losses = gradients_of(values, part)
            except RuntimeError as error:
                if not any(word in str(error) for word in ("vmap", "functorch", "transform")):
                    raise
                raise FederationError(
                    "vmap cannot compute the gradients of single examples of this network, whose control flow depends on data or "
                    "which changes tensors in place: set privacy.per_example to loop."
                ) from error
            yield {name.removeprefix(MODULE): gradient for name, gradient in gradients.items()}, losses

    def _one_by_one(
        self, module: PhasedModule, learning: dict[str, nn.Parameter], batch: Any, examples: int
    ) -> Iterator[tuple[State, Tensor]]:
        for place in range(examples):
            loss = module.phase.loss(tree_map(lambda tensor, place=place: tensor[place : place + 1], batch))
            found = torch.autograd.grad(loss, list(learning.values()), allow_unused=True, materialize_grads=True)
            yield {name: gradient[None] for name, gradient in zip(learning, found, strict=True)}, loss[None]


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Which tensors are the parameters and buffers, and how often each was modified in place."""
    return [(id(tensor), tensor._version) for tensor in (*module.parameters(), *module.buffers())]
