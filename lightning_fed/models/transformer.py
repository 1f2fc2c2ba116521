"""Networks of the transformers library, wrapped in the interface of this library."""

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import register_type
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fed.data.batches import EXAMPLE
from lightning_fed.data.hub import from_hub_or_cache
from lightning_fed.errors import FederationError, error_text, one_line
from lightning_fed.formatting import nearest
from lightning_fed.models.backbone import Backbone, TrainableNetwork, tokens_known
from lightning_fed.models.factory import name_of, names_a
from lightning_fed.options import LARGEST, NonNegativeInt, PositiveInt
from lightning_fed.tasks.task import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = str | PreTrainedModel | Callable[[], PreTrainedModel]
else:
    Model = str  # all that the command line has

COUNTED = re.compile(r"^(num|n)_|_size$")
"""Settings that are numbers of things."""

OF_BACKBONES = {name for name in (*vars(Backbone), *Backbone.__annotations__) if not name.startswith("_")}
"""What a network has that can be cut in two."""

Inputs = dict[str, Tensor]
"""What a tokenizer makes: ``input_ids``, ``attention_mask``, …, each ``(B, L)``."""


class Transformer(TrainableNetwork):
    """A model of the transformers library for a task, which a subclass defines.

    Args:
        name: of a model on the Hugging Face hub (``owner/name``, or ``owner/name@revision``), or a local folder, whose pretrained
            weights are loaded. In Python also a model, which is copied, or a function that returns one.
        config: instead of a name, the settings of a model with random weights: ``model_type`` and arguments of its config class.
        attention: implementation of attention (``eager``, ``sdpa``, …); None: the library's choice.
        **settings: more settings of the model's config.

    Attributes:
        drawn: names of the parameters that the files of a pretrained model lack, or have in another size. None without files:
            then all parameters are drawn, and the body is frozen as if it were pretrained.
    """

    auto_class: str
    """The class of transformers that loads a model for the task."""

    measures: tuple[str, ...]
    """Names of the metrics that can be the monitored metric, the usual one first."""

    lower_is_better: tuple[str, ...] = ()
    """Those of them of which less is better, where the data score them."""

    answers_limit: int | None = None
    """How many answers of a client are wanted in texts at each measurement; None: those to all examples."""

    peft_task: str | None = None
    """What peft calls the task, in the configuration of an adapter."""

    counts_flops = False
    """Whether a pass is made to count what it costs, which has to be a function of the shapes alone."""

    projections: tuple[str, str, str, str] | None = None
    """Names of the layers in a block that make query, key, value and output of attention, where they are known."""

    def __init__(
        self, name: Model | None = None, config: dict[str, Any] | None = None, attention: str | None = None, **settings: Any
    ) -> None:
        super().__init__()
        import transformers

        if (name is None) == (config is None):
            raise FederationError(f"{type(self).__name__} got name={name!r} and config={config!r}: give exactly one.")
        auto = getattr(transformers, self.auto_class)
        self.drawn: frozenset[str] = frozenset()
        if name is not None and not isinstance(name, str):
            model: PreTrainedModel = copy.deepcopy(name) if isinstance(name, nn.Module) else name()  # type: ignore[assignment]
            self.network: PreTrainedModel = self._adapted(model, attention, settings)
        elif config is not None:
            self.network = built(auto, config, settings, attention)
        else:
            try:
                load, folder = partial(_loaded, auto, attention, settings), Path(str(name)).expanduser()
                self.network, found = load(str(folder)) if folder.is_dir() else from_hub_or_cache(load, str(name))
            except (OSError, FederationError) as error:
                raise FederationError(
                    f"No model {name!r} could be loaded: give a local folder or a name on the hub; {one_line(error)}"
                ) from error
            lacking = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
            self.drawn = frozenset(f"network.{key}" for key, _ in self.network.named_parameters() if key in lacking)
        self._refuse_missing_start()
        self.train()  # from_pretrained leaves the network in eval mode
        self.attention = attention

    def _refuse_missing_start(self) -> None:
        """T5 and its kin give the text to the decoder too, after a token that only the config knows."""
        if hasattr(self.network, "_shift_right") and getattr(self.network.config, "decoder_start_token_id", None) is None:
            raise FederationError(
                f"{type(self.network).__name__} has no decoder_start_token_id, the token that its decoder starts with: set it in "
                "config, or in the model's config.json. T5's is 0."
            )

    @staticmethod
    def _adapted(model: "PreTrainedModel", attention: str | None, settings: dict[str, Any]) -> "PreTrainedModel":
        """An existing model with these settings, if it supports them."""
        if (wanted := settings.pop("num_labels", None)) not in (None, model.config.num_labels):
            raise FederationError(
                f"{type(model).__name__} has {model.config.num_labels} outputs, but num_classes is {wanted}: load it with "
                f"num_labels={wanted}, or set num_classes to {model.config.num_labels}."
            )
        if attention is not None:
            model.set_attn_implementation(attention)
        for name, value in settings.items():
            if hasattr(model.config, name):
                setattr(model.config, name, value)
        return model

    def __getattr__(self, name: str) -> Any:
        """Refuse methods that cut a network in two, or factorize it, with networks other than classifiers."""
        if name in OF_BACKBONES:
            raise FederationError(
                f"backbone: this method asks for {name!r} of the network, which only classifiers have, such as VisionTransformer, "
                f"ResNet8, MLP or others behind Wrapped: a {name_of(self)} is trained as a whole by FedAvg, or with adapters by "
                "HOMLoRA."
            )
        return super().__getattr__(name)

    @property
    def tokens_known(self) -> tuple[int | None, int | None]:
        """Size of the vocabulary, and the longest text in tokens; None: unknown."""
        return tokens_known(self.network)

    def targets_of(self, inputs: dict[str, Tensor]) -> Tensor:
        """Take the targets out of a batch of Hugging Face's collators. Default: ``labels``."""
        return inputs.pop("labels")

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits for tokenised texts, the classes in the second dimension: ``(B, C)``, or ``(B, C, …)`` of several predictions."""
        logits: Tensor = self.network(**{name: tensor for name, tensor in inputs.items() if name != EXAMPLE}).logits
        return logits

    def metrics(self, monitor: str) -> dict[str, Metric]:
        """Metrics of logits and targets, computed batch by batch; ``monitor`` is one of :attr:`measures`."""
        return {}

    def predict(self, inputs: Inputs, targets: Tensor) -> Tensor | None:
        """Generated answers, ``(B, …)``, which the data score, see :meth:`lightning_fed.data.FederatedDataModule.score`.
        Default: none.

        Args:
            inputs: of a batch.
            targets: of a batch; they may only be used to find the end of the question.
        """
        return None

    def head_names(self) -> set[str]:
        """Names of the parameters that the task adds to the pretrained model: those outside its body, and randomly drawn ones in
        the body that its files lack, such as the pooler of a BERT that was pretrained without one.
        """
        prefix = f"network.{self.network.base_model_prefix}."
        return {name for name, _ in self.named_parameters() if not name.startswith(prefix) or name in self.drawn}


def _loaded(auto: Any, attention: str | None, settings: dict[str, Any], place: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A pretrained model, and what its files lack. The library also looks for an adapter beside it, by default on the hub."""
    own = {"attn_implementation": attention, "output_loading_info": True, "adapter_kwargs": dict(options)}
    loaded: tuple[Any, dict[str, Any]] = auto.from_pretrained(place, **own, **settings, **options)
    return loaded


def built(auto: Any, config: dict[str, Any], settings: dict[str, Any], attention: str | None) -> "PreTrainedModel":
    """A model with random weights.

    Args:
        auto: the class of transformers that builds one for the task.
        config: the user's settings.
        settings: the task's settings.
        attention: implementation of attention.

    Raises:
        FederationError: naming the setting that is unknown, contradicts the task's, or prevents building a model.
    """
    import transformers

    known = transformers.CONFIG_MAPPING
    if (kind := str(config.get("model_type"))) not in known:
        raise FederationError(f"config has model_type {kind!r}, which transformers does not know{nearest(kind, list(known))}.")
    if known[kind] not in auto._model_mapping:
        raise FederationError(f"config has model_type {kind!r}, of which {auto.__name__} has no network: choose another.")
    for name, value in config.items():
        if settings.get(name, value) != value:
            raise FederationError(f"config has {name} {value!r}, but the task has {settings[name]!r}: leave it out.")
        least = 1 if name.endswith(("_layer", "_layers")) else 0  # a transformer needs at least one
        if COUNTED.search(name) and isinstance(value, int) and not least <= value <= LARGEST:  # some fail late, or never
            raise FederationError(f"config has {name} {value}: give a whole number from {least} to {LARGEST}.")

    def build(given: dict[str, Any]) -> "PreTrainedModel":
        with warnings.catch_warnings():  # a size of zero leads to an error anyway
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            made: PreTrainedModel = auto.from_config(transformers.AutoConfig.for_model(**given), attn_implementation=attention)
        return made

    try:
        model = build(config | settings)
    except Exception as error:
        wrong = [f"{name} {config[name]!r}" for name in at_fault(config, lambda given: build(given | settings))]
        what = f"config has {' and '.join(wrong)}" if wrong else "config"
        raise FederationError(f"{what}: no {kind} can be built of it: {error_text(error)}") from error
    default, code = known[kind](), inspect.getsource(sys.modules[type(model).__module__])
    for name in config:  # some are known only to the network
        if name != "model_type" and not hasattr(default, name) and not re.search(rf"\b{re.escape(name)}\b", code):
            question = nearest(name, list(default.to_dict()))
            raise FederationError(f"config has {name!r}, which {type(default).__name__} does not know{question}.")
    return model


def at_fault(config: dict[str, Any], build: Callable[[dict[str, Any]], Any]) -> list[str]:
    """The setting without which a model can be built; if there is no single one, all settings each of which alone prevents it.
    Models are built on the meta device, where they take no memory.
    """

    def fails(given: dict[str, Any]) -> bool:
        try:
            with torch.device("meta"):
                build(given)
        except Exception:
            return True
        return False

    kind, names = {"model_type": config["model_type"]}, [name for name in config if name != "model_type"]
    for wrong in names:
        if not fails({name: value for name, value in config.items() if name != wrong}):
            return [wrong]
    return sorted(name for name in names if fails(kind | {name: config[name]}))


class TransformerClassifier(Transformer):
    """A classifier of texts, or of images: pretrained body, new head. Images must have the network's input size.

    Args:
        num_classes: outputs of the head.
        pad_token_id: id of the tokenizer's padding, for networks without one (GPT-2); None: the network's.
    """

    auto_class = "AutoModelForSequenceClassification"
    measures = ("accuracy", "f1", "matthews")

    def __init__(
        self,
        num_classes: PositiveInt = 2,
        name: Model | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
        pad_token_id: NonNegativeInt | None = None,
        **settings: Any,
    ) -> None:
        padding = {} if pad_token_id is None else {"pad_token_id": pad_token_id}
        super().__init__(name, config, attention, num_labels=num_classes, **padding, **settings)
        self.num_classes = num_classes

    def forward(self, inputs: Inputs | Tensor) -> Tensor:
        """Logits ``(B, num_classes)``."""
        logits: Tensor = self.network(inputs).logits if isinstance(inputs, Tensor) else super().forward(inputs)
        return logits

    def metrics(self, monitor: str) -> dict[str, Metric]:
        """Accuracy, and the monitored metric if it differs: F1 as GLUE scores MRPC and QQP, or Matthews' correlation."""
        known = TASKS["multiclass"].measures
        return {name: known[name](self.num_classes) for name in dict.fromkeys(("accuracy", monitor)) if name in known}


class PretrainedName(str):
    """A name on the hub, a folder or a dotted path, except of a :class:`.TrainableNetwork`: the command line knows
    whether it is a :class:`Transformer`, and its arguments.
    """

    def __new__(cls, name: object) -> "PretrainedName":
        """Raises :class:`ValueError` for anything else."""
        if not isinstance(name, str) or names_a(TrainableNetwork, name):
            raise ValueError(f"Expected the name of a model, got {name!r}")
        return super().__new__(cls, name)


register_type(PretrainedName, lambda given: str(PretrainedName(given)), PretrainedName)

if TYPE_CHECKING:
    TransformerFactory = Callable[..., nn.Module] | nn.Module | str
else:
    TransformerFactory = PretrainedName | Callable[[int], Transformer]  # in this order, see BackboneFactory
"""Builds a network for a number of classes, as ``TransformerClassifier`` does; or what else :func:`.transformer_of` takes."""
