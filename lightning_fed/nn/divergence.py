"""Divergence of one prediction from another."""

from torch import Tensor
from torch.nn.functional import kl_div


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    r""":math:`\mathrm{KL}(\mathrm{softmax}(t) \,\Vert\, \mathrm{softmax}(s))`, summed over the classes, averaged over examples.

    The mean over all entries, torch's default, is smaller by the number of classes.

    Args:
        teacher: logits ``(B, C, …)``, the target. They are not detached.
        student: logits of the same shape.

    >>> import torch
    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[0.25, 0.75]])))
    tensor(0.1438)
    """
    target, guess = (logits.movedim(1, -1).flatten(0, -2).log_softmax(dim=1) for logits in (teacher, student))
    return kl_div(guess, target, log_target=True, reduction="batchmean")
