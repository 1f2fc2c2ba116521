"""The interface of networks that methods can train, and a wrapper for any other network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import register_type
from torch import Tensor, nn

from lightning_fed.data.batches import EXAMPLE
from lightning_fed.errors import FederationError
from lightning_fed.models.factory import DOTTED, name_of, names_a, network_of
from lightning_fed.options import LARGEST, PositiveInt

POSITIONS = ("position_embeddings", "wpe")
"""What learned embeddings of positions are called in the networks of transformers."""


class TrainableNetwork(nn.Module):
    """A network that a method can train: a :class:`Backbone`, or a :class:`.Transformer`, which cannot be cut in two."""


class Backbone(TrainableNetwork, ABC):
    """A classifier that can be cut in two: an encoder and the layers after it.

    Methods share one side of a cut, replace the head, or attach a branch to the representation at the cut. A subclass sets
    :attr:`head` and implements :meth:`encode` for the default cut ``"features"``, the input of the head.

    Some methods need more. A network that can be made narrower takes ``width`` (1: full width) as an argument and multiplies
    all hidden numbers of channels by it. A network that can be factorized names the layers in :attr:`factorizable`.

    Attributes:
        head: the classifier, ``Linear(feature_dim, num_classes)``.
    """

    head: nn.Linear

    @property
    def factorizable(self) -> list[str]:
        """Names of the layers that low-rank versions of the network factorize. Default: none."""
        return []

    def last_layers(self, count: int) -> set[str]:
        """Names of the tensors in the last layers. A layer is a module with parameters, in sequences and lists each of their
        modules, so that a residual block is one layer. The head is the last.

        Args:
            count: number of layers, from 1 to all of them.

        Raises:
            FederationError: for more layers than the network has, and for a network that does not end in its head.
        """
        if count == 1:
            return self.head_names()
        layers = list(_in_a_row(self, ""))
        if self.get_submodule(layers[-1]) is not self.head:
            raise FederationError(
                f"{type(self).__name__} does not end in its head, so that its last {count} layers cannot be told: give 1, the head."
            )
        if count > len(layers):
            raise FederationError(f"The last {count} layers of {type(self).__name__} were asked for, but it has {len(layers)}.")
        last = {name for name in self.state_dict() if name.startswith(tuple(f"{layer}." for layer in layers[-count:]))}
        return last | self._names(p for name, p in self.named_parameters(remove_duplicate=False) if name in last)

    @property
    def cuts(self) -> Mapping[str, int]:
        """Places where the network can be cut, with the width of the representation there; front to back."""
        return {"features": self.head.in_features}

    @property
    def num_outputs(self) -> int | None:
        """Number of outputs of the head, if known."""
        head = getattr(self, "head", None)
        return head.out_features if isinstance(head, nn.Linear) else None

    def head_names(self) -> set[str]:
        """Names of the head's tensors, within the network: its parameters, and buffers such as those of a spectral norm."""
        return self._names(self.head.state_dict(keep_vars=True).values())

    def _names(self, tensors: Iterable[Tensor]) -> set[str]:
        """Names of tensors in the state dict, of which a tied one has several."""
        own = {id(tensor) for tensor in tensors}
        return {name for name, tensor in self.state_dict(keep_vars=True).items() if id(tensor) in own}

    def task_names(self) -> set[str]:
        """Names of the tensors that the task adds to a pretrained network. Default: those of the head, if it is known."""
        return set() if self.num_outputs is None else self.head_names()

    @abstractmethod
    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        """Representation ``(B, cuts[cut])`` of the images ``x`` ``(B, C, H, W)``."""

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        """Logits ``(B, num_classes)`` from the representation at ``cut``."""
        return self.head(representation)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)``."""
        return self.classify(self.encode(x))

    def encode_and_classify(self, x: Tensor, cut: str = "features") -> tuple[Tensor, Tensor]:
        """Representation at ``cut`` and logits, in one pass."""
        representation = self.encode(x, cut)
        return representation, self.classify(representation, cut)

    @staticmethod
    def wrap(
        network: nn.Module, head: str | None = None, cuts: Mapping[str, int] | None = None, num_classes: int | None = None
    ) -> "Wrapped":
        """A network of any kind as a backbone; it is copied.

        Args:
            network: of torchvision, of transformers, or your own.
            head: name of its last linear layer, as in ``named_modules()``; None: its last linear layer.
            cuts: further places where it can be cut: names of layers, and the number of values of each output per example.
            num_classes: give it a new head for so many classes; None: it keeps its own.
        """
        return Wrapped(num_classes, network, head, dict(cuts or {}), new_head=num_classes is not None)


def tokens_known(network: Any) -> tuple[int | None, int | None]:
    """Size of the vocabulary of a network of transformers, and the longest text in tokens; None: unknown, as of other networks."""
    if not hasattr(network, "get_input_embeddings"):
        return None, None
    positions = next((m for name, m in network.named_modules() if name.endswith(POSITIONS)), None)
    longest, padding = getattr(positions, "num_embeddings", None), getattr(positions, "padding_idx", None)
    if longest is not None and padding is not None:
        longest -= padding + 1  # RoBERTa's numbering of positions
    return getattr(network.get_input_embeddings(), "num_embeddings", None), longest


class Wrapped(Backbone):
    """Wraps a network that does not depend on this package: of torchvision, of transformers, or your own.

    In Python, :meth:`.Backbone.wrap` wraps an existing network. A network without a wrapper (``FedAvg(resnet18)``) gets
    this one with its defaults.

    Args:
        num_classes: outputs of the network; None: as many as it has.
        network: a network, which is copied; its class, or a function that builds it; or the dotted path of one, such as
            ``torchvision.models.resnet18``. Images are passed as one argument, dicts of tensors as keyword arguments.
        head: name of its last linear layer, as in ``named_modules()``; None: the last one with ``num_classes`` outputs.
        cuts: further places where it can be cut: names of layers, and the number of values of each output per example, flattened.
        new_head: build the network with its own number of classes, for example pretrained, and give it a new head.
        settings: other arguments of the function or class, such as ``weights: IMAGENET1K_V1``.
    """

    def __init__(
        self,
        num_classes: PositiveInt | None = 10,
        network: Any = None,
        head: str | None = None,
        cuts: dict[str, int] | None = None,
        new_head: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if network is None:
            raise FederationError("Wrapped got no network: give its dotted path, such as torchvision.models.resnet18.")
        self.network = network_of(network, None if new_head else num_classes, **(settings or {}))
        self.drawn: frozenset[str] = frozenset()  # names of parameters that the files of a pretrained network lack
        self._head = self._found(head, None if new_head else num_classes)
        self._cuts = dict(cuts or {})
        self._num_classes = num_classes
        layers = dict(self.network.named_modules())
        if unknown := [name for name in self._cuts if name not in layers]:
            raise FederationError(f"{name_of(self)} has no layer {unknown[0]!r} to cut at: take a name from its named_modules().")
        if new_head and num_classes is not None:
            self._replace_head(num_classes)

    def _found(self, head: str | None, num_classes: int | None) -> str | None:
        """Name of the head: the given one, if it is one; otherwise the last linear layer with so many outputs."""
        layers = {name: layer for name, layer in self.network.named_modules() if isinstance(layer, nn.Linear)}
        if head is not None and head not in layers:
            raise FederationError(
                f"{name_of(self)} has no linear layer {head!r} to be its head"
                + (f": name one of {', '.join(list(layers)[-3:])}." if layers else ", nor any other.")
            )
        fitting = [name for name, layer in layers.items() if num_classes in (None, layer.out_features)]
        if head is None:
            # Without a linear layer of the right width the head is another layer; or the network is for other classes.
            last = [layer for layer in self.network.modules() if next(layer.parameters(recurse=False), None) is not None][-1:]
            if fitting or not (layers and last and isinstance(last[0], nn.Linear)):
                return fitting[-1] if fitting else None
            head = list(layers)[-1]
        if head not in fitting:
            raise FederationError(
                f"The head {head!r} of {name_of(self)} has {layers[head].out_features} outputs, not {num_classes}: give "
                f"num_classes={layers[head].out_features} if these are what is predicted, another head, or a new one with new_head "
                f"(Backbone.wrap(network, head={head!r}, num_classes={num_classes}))."
            )
        return head

    def _replace_head(self, num_classes: int) -> None:
        old = self.head
        new = nn.Linear(old.in_features, num_classes, old.bias is not None, device=old.weight.device, dtype=old.weight.dtype)
        self.network.set_submodule(str(self._head), new)
        config = getattr(self.network, "config", None)
        if hasattr(config, "num_labels"):
            config.num_labels = num_classes  # type: ignore[union-attr]

    @property
    def tokens_known(self) -> tuple[int | None, int | None]:
        """Size of the vocabulary, and the longest text in tokens; None: unknown."""
        return tokens_known(self.network)

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        """The last linear layer."""
        if self._head is None:
            raise FederationError(
                f"This method needs the head of the network, and {name_of(self)} has no linear layer that is known as such: "
                "name it, Backbone.wrap(network, head='fc') or --model.init_args.backbone Wrapped with head, or use FedAvg."
            )
        return self.network.get_submodule(self._head)  # type: ignore[return-value]

    @property
    def num_outputs(self) -> int | None:
        return None if self._head is None else self.head.out_features

    @property
    def cuts(self) -> Mapping[str, int]:
        """The named cuts, and ``features``, the input of the head, if there is one."""
        return self._cuts | ({} if self._head is None else {"features": self.head.in_features})

    def task_names(self) -> set[str]:
        """See :meth:`.Backbone.task_names`; for models of transformers, all parameters outside the body or missing in its files."""
        body = getattr(self.network, "base_model", self.network)
        if body is self.network:
            return super().task_names()
        own = {id(parameter) for parameter in body.parameters()}
        return {name for name, p in self.named_parameters() if id(p) not in own} | self.drawn

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Logits ``(B, num_classes)`` of images, or of tokenized texts."""
        if isinstance(x, Tensor):
            outputs = self.network(x)
        else:
            outputs = self.network(**{name: tensor for name, tensor in x.items() if name != EXAMPLE})
        logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
        if not isinstance(logits, Tensor):
            raise FederationError(
                f"{name_of(self)} gives a {type(outputs).__name__} without logits: give a network that returns a tensor, or "
                "one of the transformers library for a task (BertForSequenceClassification instead of BertModel)."
            )
        if self._num_classes not in (None, logits.shape[1] if logits.dim() > 1 else 1):
            raise FederationError(
                f"{name_of(self)} gives outputs of shape {tuple(logits.shape)}, but num_classes is {self._num_classes}: give a "
                "network with so many outputs, or its number of outputs as num_classes."
            )
        return logits

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        """Representation ``(B, cuts[cut])``: runs the whole network and keeps the layer's output."""
        return self.encode_and_classify(x, cut)[0]

    def encode_and_classify(self, x: Tensor, cut: str = "features") -> tuple[Tensor, Tensor]:
        """Representation ``(B, cuts[cut])`` and logits ``(B, num_classes)``.

        Raises:
            FederationError: if the representation does not have the stated width, or there are layers after the head.
        """
        if cut != "features" and cut not in self._cuts:
            raise FederationError(f"{name_of(self)} cannot be cut at {cut!r}: name it in cuts, Backbone.wrap(network, cuts=...).")
        seen: dict[str, Any] = {}

        def note(layer: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
            whole = output if isinstance(output, Tensor) else output[0]
            seen.update(representation=args[0] if cut == "features" else whole, logits=output)

        layer = self.head if cut == "features" else self.network.get_submodule(cut)
        with layer.register_forward_hook(note):  # removed after the pass: networks are copied and sent elsewhere
            logits = self(x)
        if "representation" not in seen:
            used = f"{name_of(self)} does not use its layer {cut if cut in self._cuts else self._head!r}"
            if any(hasattr(part, "_orig_mod") for part in self.modules()):  # its compiled code may be from before the hook
                used += ", or torch.compile has left out what looks at it: give the network uncompiled"
            raise FederationError(f"{used}.")
        representation: Tensor = seen["representation"]
        if cut == "features" and seen["logits"] is not logits:
            raise FederationError(
                f"{name_of(self)} has layers after its head {self._head!r}, which methods that use representation and head "
                "separately cannot apply: let the network end with its head."
            )
        if cut != "features":
            representation = representation.flatten(1)
        if representation.dim() != 2 or representation.shape[1] != self.cuts[cut]:
            raise FederationError(
                f"{name_of(self)} has values of shape {tuple(representation.shape[1:])} per example at {cut!r}, expected "
                f"{self.cuts[cut]}: set the cut's width to that, or cut after a pooling layer."
            )
        return representation, logits


def _in_a_row(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if type(child) in (nn.Sequential, nn.ModuleList):
            yield from _in_a_row(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}"


def scaled(channels: int, width: float) -> int:
    """Channels of a layer in a network of a relative width, rounded, at least 1."""
    if not width * channels <= LARGEST:
        raise FederationError(f"width is {width:g}: give a smaller one.")
    return max(1, round(width * channels))


class ImportPath(str):
    """The dotted path of a network's factory other than a :class:`TrainableNetwork`, whose arguments the command line knows."""

    def __new__(cls, path: object) -> "ImportPath":
        """Raises :class:`ValueError` for anything else."""
        if not (isinstance(path, str) and DOTTED.fullmatch(path)) or names_a(TrainableNetwork, path):
            raise ValueError(f"Expected a dotted path, got {path!r}")
        return super().__new__(cls, path)


register_type(ImportPath, lambda given: str(ImportPath(given)), ImportPath)

if TYPE_CHECKING:
    BackboneFactory = Callable[..., nn.Module] | nn.Module | str
else:
    # The types of the command line; narrow, so that its help covers networks that methods can train. The path comes first:
    # jsonargparse cannot write a text as a callable, and does not try the next type.
    BackboneFactory = ImportPath | Callable[[int], TrainableNetwork]
"""Builds a network for a number of classes, as a ``Backbone`` class does; or any other network, see :func:`.backbone_of`."""

# The list comes first: jsonargparse cannot serialise lists for a union in which it comes second.
Backbones = list[BackboneFactory] | BackboneFactory
"""One network for all clients, or several, of which client ``k`` gets entry ``k mod len(list)``."""
