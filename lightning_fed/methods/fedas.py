"""FedAS (Yang, Huang & Ye, CVPR 2024), as in its authors' code: https://github.com/xiyuanyang45/FedAS."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core import ClientInfo, Phase, Server, State, WeightedMean, class_means, class_sums, widened
from lightning_fed.errors import require
from lightning_fed.methods.fedper import FedPer
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeInt, PositiveFloat, PositiveInt

FISHER = "fisher_trace"
"""The name under which the trace of a client's Fisher information travels."""


class FedAS(FedPer):
    r"""FedPer with parameter alignment before local training, and client weights by Fisher information.

    A client keeps its head and, for each class :math:`c`, the mean feature :math:`m_k^c` of its training data under the model at
    the end of its last turn. A turn:

    1. The received body :math:`\phi` is aligned: it minimises the sum over a batch's classes of the mean of
       :math:`(\phi(x) - m_k^{y})^2` over examples and dimensions, in eval mode, with the head frozen. Not in the first turn.
    2. Body and head are trained together, as in FedPer.
    3. A pass over the training data in eval mode computes the new :math:`m_k^c` and the trace :math:`t_k = \sum_b \lVert \nabla L_b
       \rVert^2` over batches :math:`b`, of all trainable parameters; body and trace are sent.

    The server averages bodies in proportion to :math:`t_k`. Batches add similar amounts, so that :math:`t_k` grows with
    the number of examples. A client is evaluated with the model that its next turn would start from: step 1 is done on its training
    data, and its result discarded (``fine_tune/flops``). Monitored: accuracy after aggregation.

    Args:
        backbone: the network of every client.
        num_classes: number of classes; None: as many as the data have.
        alignment_lr: learning rate of step 1, by SGD. The authors' code: 0.01.
        alignment_epochs: epochs of step 1; 0: none. The authors' code: 1.
        weighting: by the trace (``fisher``), the number of ``examples``, or ``uniform``.
        **kwargs: see :class:`.FedPer`.
    """

    needs_classes = "its clients keep the mean features of classes: use FedPer."
    flops_without_values = False  # the phases of a turn depend on whether it is the first
    accumulates = False  # each class of a batch has the same weight in the alignment

    class_means: Tensor
    """:math:`m_k^c`, ``(C, D)``; 0 where the client has no example."""

    known: Tensor
    """Of which classes there is one, ``(C,)``."""

    fisher_trace: Tensor
    """:math:`t_k` of the last pass, a scalar."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        *,
        alignment_lr: PositiveFloat = 0.01,
        alignment_epochs: NonNegativeInt = 1,
        weighting: Literal["fisher", "examples", "uniform"] = "fisher",
        **kwargs: Any,
    ) -> None:
        by_fisher = weighting == "fisher"
        super().__init__(backbone, num_classes, weighting=None if by_fisher else weighting, **kwargs)
        self.alignment_lr = alignment_lr
        self.alignment_epochs = alignment_epochs
        self.by_fisher = by_fisher

    def build(self) -> None:
        """Build the network and buffers for the classes' mean features and the trace."""
        super().build()
        self.register_buffer("class_means", torch.zeros(self.num_classes, self.backbone.head.in_features))
        self.register_buffer("known", torch.zeros(self.num_classes, dtype=torch.bool))
        self.register_buffer("fisher_trace", torch.zeros(()), persistent=False)

    def shared_names(self) -> set[str]:
        """Names in the body."""
        return super().shared_names() - {"class_means", "known"}

    def payload(self) -> State:
        """The trace, on its way up."""
        return {FISHER: self.fisher_trace} if self.by_fisher else {}

    def phases(self) -> list[Phase]:
        """The alignment, then FedPer's phases."""
        return [*self.evaluation_phases(), *super().phases()]

    def evaluation_phases(self) -> list[Phase]:
        """Step 1; none for a client without mean features."""
        if not self.alignment_epochs or not self.known.any():
            return []
        private = self.backbone.last_layers(self.private_layers)
        learning = {id(p) for p in self.learning_parameters(self.backbone)}
        body = [p for name, p in self.backbone.named_parameters() if name not in private and id(p) in learning]
        if not body:
            return []
        return [
            Phase(
                "alignment",
                body,
                self.alignment_loss,
                partial(torch.optim.SGD, lr=self.alignment_lr),
                self.alignment_epochs,
                eval_modules=[self.backbone],
            )
        ]

    def alignment_loss(self, batch: Any) -> Tensor:
        """Distance of a batch's features from the means of their classes, with equal weight for each class of the batch."""
        x, y = self.unpack(batch)
        features = widened(self.backbone.encode(x))
        apart = (features - self.class_means[y]).square().mean(1) * self.known[y]
        return (apart / torch.bincount(y, minlength=self.num_classes)[y]).sum()

    def post_training_step(self, batch: Any) -> State:
        """The sums of a batch's features by class, and the squared norm of its gradient."""
        x, y = self.unpack(batch)
        with torch.enable_grad():
            learning = self.learning_parameters(self)
            gradients = torch.autograd.grad(self.client_loss(batch), learning, materialize_grads=True)
        trace = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()
        return class_sums(self.backbone.encode(x), y, self.num_classes) | {FISHER: trace}

    def after_training(self, sums: State) -> None:
        """Keep the means, and note the trace."""
        means, examples = class_means(sums)
        self.class_means.copy_(means)
        self.known.copy_(examples > 0)
        self.fisher_trace.copy_(sums[FISHER])

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """FedPer's server, with weights by the trace."""
        server = super().configure_server(clients)
        if self.by_fisher:
            server.combine = mean_by_fisher
        return server


def mean_by_fisher(updates: Iterable[tuple[State, float]], state: State) -> State:
    """The mean weighted by the received traces. A trace of 0 does not count; if none counts, the state does not change.

    Args:
        updates: with weights, which are not used.
        state: the server's.
    """
    mean = WeightedMean()
    for update, _ in updates:
        trace = float(update[FISHER])
        require(
            trace >= 0,
            f"An update says that its {FISHER} is {trace:g}, expected 0 or more: where clients cannot be trusted with their own "
            "weight, set weighting to examples or uniform.",
        )
        if trace:
            mean.add(update, trace)
    result = mean.result()
    return result and result | {FISHER: state[FISHER]}
