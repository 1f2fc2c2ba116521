"""How far one prediction is from another."""

from torch import Tensor
from torch.nn.functional import kl_div


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    r""":math:`\mathrm{KL}(\mathrm{softmax}(t) \,\Vert\, \mathrm{softmax}(s))`, summed over the classes, the mean over the examples. (The
    mean over all entries, which torch's default reduction takes, is as many times smaller as there are classes.)

    Args:
        teacher: logits ``(B, C, …)``, to which the student is drawn. They are not detached.
        student: logits of the same shape.

    >>> import torch
    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[0.25, 0.75]])))
    tensor(0.1438)
    """
    by_example = (logits.movedim(1, -1).flatten(0, -2).log_softmax(dim=1) for logits in (student, teacher))
    return kl_div(*by_example, log_target=True, reduction="batchmean")
