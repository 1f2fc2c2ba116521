"""Parts of losses, and a function of a module as a forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div


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
    """A module whose output is a function of another module, such as its loss on a batch, so that ``functional_call`` can compute
    it with other parameters. Their names begin with ``module.``.

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
