"""The masked cross-entropy of clients that have only some classes (Diao et al., HeteroFL, ICLR 2021)."""

import torch
from torch import Tensor


def mask_absent(logits: Tensor, present: Tensor) -> Tensor:
    r"""Logits with those of absent classes set to 0.

    Cross-entropy of the result leaves absent classes without gradient. They still count :math:`e^0 = 1` in the denominator, as in
    the authors' code; a mask of :math:`-\infty` would not.

    Args:
        logits: ``(B, C)``.
        present: the classes that the client has, ``(C,)``, boolean.
    """
    return torch.where(present, logits, 0.0)
