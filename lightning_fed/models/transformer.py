"""Networks of the transformers library, behind the interface of this one."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.data.batches import EXAMPLE
from lightning_fed.errors import FederationError
from lightning_fed.nn.matthews import Matthews

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = dict[str, Tensor]
"""What a tokenizer makes: ``input_ids``, ``attention_mask``, …, each ``(B, L)``."""


class Transformer(nn.Module):
    """A model of the transformers library for a task; a subclass says which.

    Args:
        name: of a model on the Hugging Face hub, or a local folder; its pretrained weights are loaded.
        config: instead of a name, the settings of a model with random weights: ``model_type`` and what its config class takes.
        attention: implementation of attention (``eager``, ``sdpa``, …); None: the library's choice.
        **settings: more settings of the model's config.

    Attributes:
        drawn: names of the parameters that the files of a pretrained model lack, or have in another size. None where there are no
            files: then everything is drawn, and what stands for the pretrained body is frozen all the same.
    """

    auto_class: str
    """The class of transformers that loads a model for the task."""

    measures: tuple[str, ...]
    """Names of the metrics that can be the headline, the usual one first."""

    projections: tuple[str, str, str, str] | None = None
    """Names of the layers in a block that make query, key, value and output of attention, where they are known."""

    def __init__(
        self, name: str | None = None, config: dict[str, Any] | None = None, attention: str | None = None, **settings: Any
    ) -> None:
        super().__init__()
        import transformers

        if (name is None) == (config is None):
            raise FederationError(f"{type(self).__name__} got name={name!r} and config={config!r}: give exactly one.")
        auto = getattr(transformers, self.auto_class)
        if config is not None:
            # In one dict: given **settings, the command line would take the arguments of for_model for ours, and require them.
            made = transformers.AutoConfig.for_model(**(config | settings))
            self.network: PreTrainedModel = auto.from_config(made, attn_implementation=attention)
            self.drawn: frozenset[str] = frozenset()
        else:
            try:
                self.network, found = auto.from_pretrained(
                    name, attn_implementation=attention, output_loading_info=True, **settings
                )
            except OSError as error:
                raise FederationError(
                    f"No model {name!r} could be loaded: give a local folder or a name on the hub. {error}"
                ) from error
            lacking = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
            self.drawn = frozenset(f"network.{key}" for key, _ in self.network.named_parameters() if key in lacking)
        self.train()  # from_pretrained leaves the network in eval mode
        self.attention = attention

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits for tokenised texts, the classes in the second dimension: ``(B, C)``, or ``(B, C, …)`` of several predictions."""
        logits: Tensor = self.network(**{name: tensor for name, tensor in inputs.items() if name != EXAMPLE}).logits
        return logits

    def metrics(self, headline: str) -> dict[str, Metric]:
        """What is measured on logits and targets, batch by batch; ``headline`` says which of :attr:`measures` is used."""
        return {}

    def predict(self, inputs: Inputs, targets: Tensor) -> Tensor | None:
        """What is answered in texts, ``(B, …)``; the data score it, see :meth:`lightning_fed.data.FederatedDataModule.score`.
        Default: nothing is.

        Args:
            inputs: of a batch.
            targets: of a batch; they may say where the question ends, never what is answered.
        """
        return None

    def head_names(self) -> set[str]:
        """Names of the parameters that the task adds to the pretrained model: those outside its body, and in the body those that
        its files lack, which were drawn at random: the pooler of a BERT that was pretrained without one, say.
        """
        prefix = f"network.{self.network.base_model_prefix}."
        return {name for name, _ in self.named_parameters() if not name.startswith(prefix) or name in self.drawn}


class TransformerClassifier(Transformer):
    """A text classifier: pretrained body, new head.

    Args:
        num_classes: outputs of the head.
        name: see :class:`Transformer`.
        config: see :class:`Transformer`.
        attention: see :class:`Transformer`.
        pad_token_id: id of the tokenizer's padding, for networks that name none (GPT-2); None: as the network has it.
        **settings: see :class:`Transformer`.
    """

    auto_class = "AutoModelForSequenceClassification"
    measures = ("accuracy", "matthews")

    def __init__(
        self,
        num_classes: int = 2,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
        pad_token_id: int | None = None,
        **settings: Any,
    ) -> None:
        padding = {} if pad_token_id is None else {"pad_token_id": pad_token_id}
        super().__init__(name, config, attention, num_labels=num_classes, **padding, **settings)
        self.num_classes = num_classes

    def metrics(self, headline: str) -> dict[str, Metric]:
        """Accuracy and, where it is the headline, Matthews' correlation."""
        metrics: dict[str, Metric] = {"accuracy": MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)}
        if headline == "matthews":
            metrics["matthews"] = Matthews(self.num_classes)
        return metrics


NETWORK = "network."
"""What the names of a :class:`Transformer`'s tensors begin with, and those of the network in it do not."""

TransformerFactory = Callable[[int], Transformer]
"""Builds a network for a number of classes; ``TransformerClassifier`` is one."""


class SharedTransformer:
    """Loads a network once and hands out copies that share all of its tensors but the head's.

    Args:
        factory: builds the network.
    """

    def __init__(self, factory: TransformerFactory) -> None:
        self._factory = factory
        self._network: Transformer | None = None

    def copy(self, num_classes: int) -> Transformer:
        """A network whose body is shared and frozen and whose head is its own and is not."""
        if self._network is None:
            self._network = self._factory(num_classes)
            heads = self._network.head_names()
            for name, parameter in self._network.named_parameters():
                parameter.requires_grad_(name in heads)
        shared = {id(parameter): parameter for parameter in self._network.parameters() if not parameter.requires_grad}
        return copy.deepcopy(self._network, memo=shared)
