"""How far one prediction is from another."""

from torch import Tensor
from torch.nn.functional import kl_div


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
