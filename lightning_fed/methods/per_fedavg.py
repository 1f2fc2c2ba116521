"""Per-FedAvg (Fallah, Mokhtari & Ozdaglar, NeurIPS 2020, https://arxiv.org/abs/2002.07948), Algorithm 1."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchmetrics import Metric, MetricCollection

from lightning_fed.core import State
from lightning_fed.errors import require
from lightning_fed.methods.families.second_order import SecondOrderModule, attend_with_second_derivatives, gradients
from lightning_fed.models import Backbones, Transformer
from lightning_fed.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class PerFedAvg(SecondOrderModule):
    r"""Model-agnostic meta-learning of a common model from which one gradient step leads to a good personal one.

    The objective is :math:`\min_w \frac{1}{N} \sum_k f_k(w - \alpha \nabla f_k(w))`. A step of a client has batches :math:`D, D',
    D''`, independent if the client has enough batches (with a single batch they are the same examples):

    1. :math:`\tilde w = w - \alpha \nabla F(w; D)`.
    2. :math:`G = [I - \alpha \nabla^2 F(w; D'')]\, \nabla F(\tilde w; D')`.
    3. The optimizer steps w, at its value before step 1, along G.

    The trained parameters travel, FedAvg's or those of ``adapters``, and are averaged with equal weights; nothing is private.
    Batch-norm statistics move once per step, by :math:`D'`. Monitored: the adapted model, after one step of rate :math:`\alpha` on
    a batch of the client's own training data (``adapted_accuracy``), in eval mode, while training adapts in train mode; the
    received model is reported too (``accuracy``).

    Args:
        backbone: the network that every client trains. The attention of one of the transformers library becomes ``eager`` with
            ``hessian: exact``.
        num_classes: number of classes; None: as many as the data have.
        adaptation_lr: :math:`\alpha`. pFedMe's authors, comparing with it on MNIST, found 0.03, with an lr of 0.003.
        hessian: ``exact`` differentiates through step 1; ``finite_difference`` (Hessian-free): :math:`G = g - \alpha (\nabla F(w +
            \delta g; D'') - \nabla F(w - \delta g; D'')) / 2 \delta` with :math:`g = \nabla F(\tilde w; D')`; ``first_order``: G
            is g.
        delta: :math:`\delta` of finite differences.
        batches: 2, with D'' = D, or 3.
        steps: optimizer steps per round, each of so many batches; None: ``epochs`` epochs, whose last batches may not fill a step.
            A client that cannot fill a single step ends the run with a message. pFedMe's authors: 20.
        **kwargs: see :class:`.FederatedModule`; ``gradient_clip`` limits G. ``fine_tuning`` is refused: the step is the method's.
    """

    weighting: Literal["examples", "uniform"] = "uniform"

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        adaptation_lr: NonNegativeFloat = 0.03,
        hessian: Literal["exact", "finite_difference", "first_order"] = "exact",
        delta: PositiveFloat = 1e-3,
        batches: Literal[2, 3] = 2,
        steps: NonNegativeInt | None = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, steps=steps, **kwargs)
        self.adaptation_lr = adaptation_lr
        self.hessian = hessian
        self.delta = delta
        self.batches_per_step = batches
        self._values: State = {}  # of the adapted model that is evaluated

    def choose_monitor(self) -> str:
        """That of the adapted model."""
        return f"adapted_{super().choose_monitor()}"

    def build(self) -> None:
        """Build a network that can be differentiated as often as needed."""
        super().build()
        if self.hessian == "exact" and isinstance(self.backbone, Transformer):
            attend_with_second_derivatives(self.backbone)

    def compute_gradients(self, batch: Any) -> Tensor:
        """Set G; returns the loss of the adapted model."""
        support, query, curvature = (*batch, batch[0])[:3]
        point = self.learnable()
        exact = self.hessian == "exact"
        chained = exact and curvature is support
        adapted = self.adapted(point, support, graph=chained)
        loss = self.loss_at(adapted, query)
        grads = gradients(loss, (point if chained else adapted).values())
        if self.hessian == "finite_difference" or (exact and not chained):
            if exact:
                product = self.gradient_product(point, grads, curvature)
            else:
                product = self.gradient_difference(point, grads, self.delta, curvature)
            grads = [g - self.adaptation_lr * h for g, h in zip(grads, product, strict=True)]
        own = dict(self.named_parameters())
        for name, grad in zip(point, grads, strict=True):
            own[name].grad = grad.detach()
        return loss.detach()

    def loss_at(self, values: State, batch: Any, moves_statistics: bool = True) -> Tensor:
        """See :meth:`.SecondOrderModule.loss_at`; with ``hessian: exact`` by kernels of attention that have a second derivative."""
        with sdpa_kernel(SDPBackend.MATH) if self.hessian == "exact" else nullcontext():
            return super().loss_at(values, batch, moves_statistics)

    def learnable(self) -> State:
        """Trainable tensors by name, separate from the parameters themselves."""
        return {name: p.detach().requires_grad_() for name, p in self.named_parameters() if name in self._shared}

    def adapted(self, point: State, batch: Any, graph: bool = False) -> State:
        """One step of gradient descent from a point."""
        grads = gradients(self.loss_at(point, batch, moves_statistics=False), point.values(), graph)
        stepped = {name: x - self.adaptation_lr * g for (name, x), g in zip(point.items(), grads, strict=True)}
        return stepped if graph else {name: tensor.detach().requires_grad_() for name, tensor in stepped.items()}

    # ------------------------------------------------------------------------------------------------------------ measuring

    def configure_metrics(self) -> MetricCollection:
        """Metrics of the received and of the adapted model."""
        plain = super().configure_metrics()
        both: dict[str, Metric | MetricCollection] = {
            f"{prefix}{name}": metric.clone() for prefix in ("", "adapted_") for name, metric in plain.items()
        }
        return MetricCollection(both, compute_groups=False)

    def on_validation_start(self) -> None:
        self._adapt()

    def on_test_start(self) -> None:
        self._adapt()

    def on_predict_start(self) -> None:
        self._adapt()

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Outputs of the adapted model, which is monitored."""
        with self._holding(self._values):
            return super().predict_step(batch, batch_idx)

    def _adapt(self) -> None:
        """Take one step on the first batch of the client's training data, in a random order; none without training data."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        require(
            data is not None,
            f"{type(self).__name__} adapts to training data before it is evaluated, but got data loaders: give the Trainer a "
            "datamodule, such as data.client(k) or LightningDataModule.from_datasets(train, val, test).",
        )
        with torch.inference_mode(False), torch.enable_grad():
            first = next(iter(data.train_dataloader()), None)
            if first is None:
                self._values = self.learnable()
                return
            batch = self.trainer.precision_plugin.convert_input(first)
            batch = self.trainer.strategy.batch_to_device(batch)  # also calls the transfer hooks
            self._values = self.adapted(self.learnable(), batch)

    def update_metrics(self, metrics: MetricCollection, batch: Any) -> None:
        """Add a batch to both kinds of metrics."""
        inputs, targets = self.unpack(batch)
        for prefix, values in (("", {}), ("adapted_", self._values)):
            with self._holding(values):
                measured = [m for name, m in metrics.items(keep_base=True) if name.startswith("adapted_") == bool(prefix)]
                seen = self.task.measured(self(inputs), targets) if measured else ()
                for metric in measured:
                    metric.update(*seen)
                self.answers.add(self.predictor, inputs, targets, prefix)

    @contextmanager
    def _holding(self, values: State) -> Iterator[None]:
        """With other values for some parameters."""
        own = {name: p.detach().clone() for name, p in self.named_parameters() if name in values}
        self.load_state_dict(values, strict=False)
        yield
        self.load_state_dict(own, strict=False)
