"""Fine-tuning with low-rank adapters (LoRA, Hu et al., ICLR 2022) on one frozen network that all clients share in memory."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassMatthewsCorrCoef

from lightning_fed.errors import FederationError
from lightning_fed.exchange import State
from lightning_fed.models.transformer import SharedTransformer, Transformer, TransformerFactory
from lightning_fed.module import FederatedModule, Phase

COMMON, CLIENT = "common", "client"
"""Names of the adapters that are averaged and that stay with a client."""


def default_adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with learning rate 1e-3, which the experiments of PF2LoRA use for most tasks."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class LoRAModule(FederatedModule):
    """What federated LoRA methods have in common: a frozen network, and the adapter ``common`` that is averaged.

    Each adapted matrix W becomes :math:`W + s BA` with A ``(r, in)`` random and B ``(out, r)`` zero at first; peft does it. The
    network is loaded once; all modules share its tensors. Clients do ``local_steps`` steps per round; the moments of their AdamW
    stay with them between their turns. The classification head, which is new, is trained and averaged with the adapter.

    Args:
        backbone: builds the network, given the number of classes: ``TransformerClassifier``.
        num_classes: number of classes.
        r: rank of the adapter.
        lora_alpha: scaling s is ``lora_alpha / r``; None: 1.
        target_modules: names, or a pattern, of the layers that are adapted, as in peft; None: those that peft knows for the
            network, which are the query and value projections.
        lora_dropout: dropout before the adapter.
        train_head: train and average the head; else it stays as it was drawn.
        metric: headline: ``accuracy``, or ``matthews``, Matthews' correlation (CoLA).
        optimizer: of the adapter and the head.
        local_steps: optimizer steps per round.
        gradient_clip: largest gradient norm of a step; None does not clip.
    """

    weighting = "uniform"
    flops_on_meta = False
    alone = None

    def __init__(
        self,
        backbone: TransformerFactory,
        num_classes: PositiveInt = 2,
        r: PositiveInt = 8,
        lora_alpha: PositiveFloat | None = None,
        target_modules: list[str] | str | None = None,
        lora_dropout: ClosedUnitInterval = 0.0,
        train_head: bool = True,
        metric: Literal["accuracy", "matthews"] = "accuracy",
        optimizer: OptimizerCallable = default_adamw,
        local_steps: NonNegativeInt = 10,
        gradient_clip: PositiveFloat | None = None,
    ) -> None:
        super().__init__(backbone, num_classes, optimizer, 0, gradient_clip)  # type: ignore[arg-type]
        self.source = SharedTransformer(backbone)
        self.r = r
        self.scaling = 1.0 if lora_alpha is None else lora_alpha / r
        self.target_modules = target_modules
        self.lora_dropout = lora_dropout
        self.train_head = train_head
        self.headline_metric = self.metric = metric
        self.local_steps = local_steps

    def build(self) -> None:
        """The network and its adapters; their random numbers are drawn after the network's."""
        self.backbone: Transformer = self.source.copy(self.num_classes)  # type: ignore[assignment]
        heads = self.backbone.head_names()
        self._head_layers = sorted({name.removeprefix("network.").rpartition(".")[0] for name in heads})
        self.add_adapters()
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(".lora_" in name or (self.train_head and name in heads))

    def add_adapters(self) -> None:
        """Put adapters on the network. Default: the common one."""
        self.add_adapter(COMMON, self.rank())

    def rank(self) -> int:
        """Rank of the common adapter."""
        return self.r

    def add_adapter(self, name: str, rank: int) -> None:
        """Put another adapter on the network; all that are there act together."""
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        config = LoraConfig(
            r=rank,
            lora_alpha=cast(int, self.scaling * rank),
            target_modules=self.target_modules,
            exclude_modules=self._head_layers,  # a head's layer may be called as one of the body's
            lora_dropout=self.lora_dropout,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # the second adapter beside the first: as intended
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft corrects it for GPT-2's transposed layers
            try:
                inject_adapter_in_model(config, self.backbone.network, name)
            except ValueError as error:
                raise FederationError(f"No adapter can be put on target_modules {self.target_modules}: {error}") from error
        for layer in self.backbone.modules():
            if isinstance(layer, LoraLayer):
                layer.set_adapter(list(layer.lora_A))  # injecting one deactivates those before

    def adapter(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of an adapter by their names in the state dict."""
        return {key: p for key, p in self.named_parameters() if f".lora_A.{name}." in key or f".lora_B.{name}." in key}

    def shared_names(self) -> set[str]:
        """The common adapter and, if it is trained, the head."""
        return super().shared_names() - self.adapter(CLIENT).keys()

    def shared_parameters(self) -> list[nn.Parameter]:
        """What is averaged."""
        shared = self.shared_names()
        return [p for name, p in self.named_parameters() if name in shared]

    def export(self, folder: Path) -> None:
        """Write a peft adapter, which ``PeftModel.from_pretrained(network, folder)`` loads onto the pretrained network.

        It holds the head and, as one adapter, those that act together: of ranks r and r' one of rank r + r', for :math:`BA + DC` is
        the product of the factors side by side. The server's model has the common adapter alone.
        """
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        clean = self.source.copy(self.num_classes)
        heads = clean.head_names()
        prefix = "network."
        layers = {name: layer for name, layer in self.backbone.named_modules() if isinstance(layer, LoraLayer)}
        adapters = [COMMON] if self.client is None else next(iter(layers.values())).active_adapters
        rank = sum(next(iter(layers.values())).r[name] for name in adapters)
        config = LoraConfig(
            r=rank,
            lora_alpha=cast(int, self.scaling * rank),
            target_modules=[name.removeprefix(prefix) for name in layers],
            modules_to_save=sorted({name.removeprefix(prefix).split(".")[0] for name in heads}) or None,
        )
        exported = get_peft_model(clean.network, config)
        own = self.state_dict()
        values = {}
        for name in layers:
            path = f"base_model.model.{name.removeprefix(prefix)}"
            for factor, side in (("lora_A", 0), ("lora_B", 1)):
                parts = [own[f"backbone.{name}.{factor}.{adapter}.weight"] for adapter in adapters]
                values[f"{path}.{factor}.default.weight"] = torch.cat(parts, dim=side)
        for name in heads:
            module, _, rest = name.removeprefix(prefix).partition(".")
            values[f"base_model.model.{module}.modules_to_save.default.{rest}"] = own[f"backbone.{name}"]
        exported.load_state_dict(values, strict=False)
        exported.save_pretrained(str(folder))

    def forward(self, x: Any) -> Tensor:
        """Logits ``(B, C)`` of tokenised texts."""
        return self.backbone(x)

    def phases(self) -> list[Phase]:
        """``local_steps`` steps on the adapter and the head, with moments that persist."""
        return [Phase("local", self.shared_parameters(), self.client_loss, self.optimizer, steps=self.local_steps, persistent=True)]

    def client_loss(self, batch: Any) -> Tensor:
        """Cross-entropy of a batch ``(inputs, labels)``."""
        inputs, labels = batch
        return cross_entropy(self(inputs), labels)

    def loss_at(self, values: State, batch: Any) -> Tensor:
        """The loss of a batch with other values for some parameters, by name in the state dict; differentiable in them."""
        inputs, labels = batch
        return cross_entropy(functional_call(self, values, (inputs,)), labels)

    def gradient_difference(
        self, point: State, direction: Iterable[Tensor], step: float | Tensor, batch: Any, wrt: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        r"""A second derivative times v: :math:`(\nabla F(p + \epsilon v) - \nabla F(p - \epsilon v)) / 2 \epsilon`, both under
        the same dropout.

        Args:
            point: p, values of some parameters by name.
            direction: v, a tensor for each of them.
            step: :math:`\epsilon`.
            batch: of F.
            wrt: what :math:`\nabla` is taken with respect to; None: the point.
        """
        moves = dict(zip(point, direction, strict=True))
        slopes = []
        for signed in (step, -step):
            shifted = {name: (tensor + signed * moves[name]).detach().requires_grad_() for name, tensor in point.items()}
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                slopes.append(gradients(self.loss_at(shifted, batch), shifted.values() if wrt is None else wrt))
        return [(ahead - behind) / (2 * step) for ahead, behind in zip(*slopes, strict=True)]

    def configure_metrics(self) -> MetricCollection:
        """Accuracy and, where it is the headline, Matthews' correlation."""
        metrics: dict[str, Any] = {"accuracy": MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)}
        if self.metric == "matthews":
            metrics["matthews"] = MulticlassMatthewsCorrCoef(self.num_classes)
        return MetricCollection(metrics)


def gradients(loss: Tensor, parameters: Iterable[Tensor], graph: bool = False) -> list[Tensor]:
    """Gradients of a scalar; zeros where it does not depend on a parameter.

    Args:
        loss: a scalar.
        parameters: with respect to what.
        graph: keep the graph, so that the gradients can be differentiated themselves.
    """
    return list(torch.autograd.grad(loss, list(parameters), create_graph=graph, materialize_grads=True))


def attend_with_second_derivatives(backbone: Transformer) -> None:
    """Let a network attend in a way that can be differentiated twice.

    Raises:
        FederationError: if the user chose another way.
    """
    if backbone.attention not in (None, "eager"):
        raise FederationError(
            f"attention is {backbone.attention!r}, which has no second derivative, and exact second-order gradients need one: "
            "leave attention out, or choose finite differences or first-order gradients."
        )
    backbone.network.set_attn_implementation("eager")
