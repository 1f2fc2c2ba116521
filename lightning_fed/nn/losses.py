"""Parts of losses, a function of a module as a forward pass, and a pass with other parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import kl_div

from lightning_fed.errors import FederationError


def mask_absent(logits: Tensor, present: Tensor) -> Tensor:
    r"""Logits with those of absent classes set to 0 (Diao et al., HeteroFL, ICLR 2021).

    Cross-entropy of the result leaves absent classes without gradient. They still count :math:`e^0 = 1` in the denominator, as in
    the authors' code; a mask of :math:`-\infty` would not.

    Args:
        logits: ``(B, C)``.
        present: which classes are there, ``(C,)``, boolean.
    """
    return torch.where(present, logits, 0.0)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    r""":math:`\mathrm{KL}(\mathrm{softmax}(t) \,\Vert\, \mathrm{softmax}(s))`, summed over the classes, the mean over examples.

    The mean over all entries, torch's default, is as many times smaller as there are classes.

    Args:
        teacher: logits ``(B, C, …)``, to which the student is drawn. They are not detached.
        student: logits of the same shape.

    >>> import torch
    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[0.25, 0.75]])))
    tensor(0.1438)
    """
    target, guess = (logits.movedim(1, -1).flatten(0, -2).log_softmax(dim=1) for logits in (teacher, student))
    return kl_div(guess, target, log_target=True, reduction="batchmean")


class FunctionOf(nn.Module):
    """A module whose output is a function of another module, such as its loss on a batch, so that :func:`call_with` can
    compute it with other parameters. Their names begin with ``module.``.

    Args:
        module: the other module.
        function: of its parameters and of the given inputs.
    """

    def __init__(self, module: nn.Module, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, inputs: Any) -> Tensor:
        """The function's value."""
        return self.function(inputs)


def call_with(module: nn.Module, values: Mapping[str, Tensor], *inputs: Any) -> Any:
    """A module's output with other values for some parameters and buffers. A tied one has its value under each of its names.

    Given all names of a layer that has several, torch's ``functional_call`` would leave the values in the layer.

    Args:
        module: it is not changed.
        values: by name; those of tied tensors by at least one of their names.
        *inputs: of the module.

    Raises:
        FederationError: if a network of transformers would recompute its activations with its own values in the backward pass.
    """
    checkpointed = (part.training and getattr(part, "gradient_checkpointing", False) for part in module.modules())
    if torch.is_grad_enabled() and any(checkpointed):
        raise FederationError(
            "The network has gradient_checkpointing, which computes activations again from its own values, but the method trains "
            "it with others: leave gradient_checkpointing out."
        )
    own = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    given = {id(own[name]): value for name, value in values.items()}
    places = {
        name: given[id(tensor)]
        for path, layer in module.named_modules()
        for name, tensor in (*layer.named_parameters(path, False, False), *layer.named_buffers(path, False, False))
        if id(tensor) in given
    }
    return functional_call(module, places, inputs, tie_weights=False)
