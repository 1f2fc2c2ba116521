"""Cox's partial likelihood (Cox, JRSS B 1972), the loss for risks learned from times to an event."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_fed.errors import require

Ties = Literal["breslow", "efron", "order"]
"""What is done about several events at one time."""


class CoxLoss(nn.Module):
    r"""The negative log partial likelihood of a batch, averaged over all examples, including those without an event:
    :math:`\frac1B \sum_{i: e_i} \left(\log \sum_{j: t_j \ge t_i} e^{s_j} - s_i\right)`.

    It depends only on differences of risks. An example without a competitor, the last one observed, has a term and a gradient of
    exactly 0, and so have all examples of a batch without events: optimizers that divide by the size of a gradient (Adam) would
    turn a rounding error into a step. A batch of B needs memory for :math:`B^2` numbers.

    Args:
        ties: with several events at one time, ``breslow`` lets each compete with all of them, ``efron`` with a share that decreases
            from one to the next, and ``order`` with those before it in the batch, as in FLamby's loss.
    """

    def __init__(self, ties: Ties = "breslow") -> None:
        super().__init__()
        require(ties in get_args(Ties), f"CoxLoss got ties={ties!r}: give one of {', '.join(get_args(Ties))}.")
        self.ties = ties

    def forward(self, risks: Tensor, targets: Tensor) -> Tensor:
        """The loss.

        Args:
            risks: ``(B,)``, larger for an earlier expected event.
            targets: ``(B, 2)``: whether there was an event (0: the example was observed until then without one), and the time.
        """
        event, time = targets[:, 0] > 0, targets[:, 1]
        later, same = time > time[:, None], time == time[:, None]  # (i, j): j is observed longer than i, as long as i
        first = torch.ones_like(same).tril()  # j is not after i in the batch
        weights = (later | (same & first if self.ties == "order" else same)).to(risks.dtype)
        if self.ties == "efron":
            tied = same & event & event[:, None]
            place = (tied & first).sum(dim=1) - 1  # of an event among those of its time
            share = 1 - place / tied.sum(dim=1).clamp(min=1)
            weights = torch.where(tied, share[:, None].to(risks.dtype), weights)
        differences = risks - risks[:, None]
        terms = torch.where(weights > 0, differences + weights.log(), -torch.inf).logsumexp(dim=1)
        return torch.where(event, terms, 0.0).mean()
