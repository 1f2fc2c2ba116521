"""HeteroFL (Diao, Ding & Tarokh, ICLR 2021, https://arxiv.org/abs/2010.01264)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from lightning_fed.core import ClientInfo, FederationError, Server, State
from lightning_fed.methods.families.model_sizes import Assignment, SizedModule, SizedServer
from lightning_fed.models import Backbone, BackboneFactory, backbone_of
from lightning_fed.nn.norms import scale_activations
from lightning_fed.options import PositiveFloat, PositiveInt


class HeteroFL(SizedModule):
    r"""Clients train narrower versions of the global network, which have the leading channels of every hidden layer.

    A client of width :math:`s` gets the first :math:`\mathrm{round}(sK)` channels of each hidden layer with :math:`K` channels, and
    about :math:`s^2` of all parameters. The server averages each entry over the clients that cover it, regardless of their numbers
    of examples; entries that no client covers in a round do not change. Batch norm is static, the loss masked and the activations
    of narrow networks scaled up: see :class:`.SizedModule` and :func:`lightning_fed.nn.scale_activations`.

    Readings. The authors round up; here, as in Table 2 of the FedHM paper, numbers of channels are rounded. The text of that
    paper says 0.64 and 0.35, but the sizes in the table are those of 0.62 (ResNet-18) and 0.40 (ResNet-34).

    Args:
        backbone: the global network; takes ``width`` as an argument, as the ResNets and CNNs of this library do.
        num_classes: number of classes; None: as many as the data have.
        widths: relative to the global network, in (0, 1]; client ``k`` has entry ``k mod len(list)``.
        assignment: ``"fixed"``, or ``"redrawn"``: each round, every client gets one of the widths at random.
        masked: whether to mask absent classes.
        scaler: whether to divide activations by the width in training.
        **kwargs: see :class:`.SizedModule`. The paper: 5 ``epochs`` per round. ``gradient_clip`` in the authors' code: 1.
    """

    def __init__(
        self,
        backbone: BackboneFactory,
        num_classes: PositiveInt | None = None,
        widths: Sequence[PositiveFloat] = (1.0, 0.5, 0.25, 0.125, 0.0625),
        assignment: Assignment = "fixed",
        masked: bool = True,
        scaler: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, widths, num_classes, assignment, masked, **kwargs)
        if any(not 0 < width <= 1 for width in widths):
            raise FederationError(f"widths is {list(widths)}: give numbers in (0, 1], relative to the global network.")
        self.scaler = scaler

    def build(self) -> None:
        self.backbone = self.of_width(self.model_size)
        if self.scaler and self.model_size is not None:
            scale_activations(self.backbone, 1 / self.model_size)

    def with_initial_weights(self, network: State, what: str = "The network") -> Self:
        """Refused: a network has one width."""
        raise FederationError(f"{what} has one width, but clients of {type(self).__name__} have several: leave init_from out.")

    def continued_names(self) -> set[str]:
        """None if each round may have another width."""
        return super().continued_names() if self.assignment == "fixed" else set()

    def network_factory(self) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
        factory, given = super().network_factory()
        return factory, given if self.model_size is None else given | {"width": own_width(factory) * self.model_size}

    def of_width(self, width: float | None) -> Backbone:
        """The network in a width relative to its own; None: its own width."""
        [factory] = self.networks.factories
        if width is None:
            return backbone_of(factory, self.num_classes)
        try:
            return backbone_of(factory, self.num_classes, width=own_width(factory) * width)
        except (TypeError, FederationError) as error:
            raise FederationError(
                f"{type(self).__name__} needs a backbone that takes a width, as ResNet18 does. {error}"
            ) from error

    def shapes(self, width: float) -> dict[str, torch.Size]:
        """Shapes of the shared tensors in a width; no values are computed."""
        with torch.device("meta"):
            wrapper = nn.ModuleDict({"backbone": self.of_width(width)})
        narrow = wrapper.state_dict()
        return {name: narrow.get(name, tensor).shape for name, tensor in self.state_dict().items() if name in self._shared}

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """A server that averages each entry over the clients that cover it."""
        self.refuse_frozen("cuts narrower networks out of one")
        return HeteroFLServer(self, clients)


def own_width(factory: Callable[..., nn.Module]) -> float:
    """The width of a network in the configuration."""
    return float(getattr(factory, "keywords", {}).get("width", 1.0))


class HeteroFLServer(SizedServer):
    """Versions are the leading indices of every dimension.

    Args:
        method: the method, built.
        clients: all clients.
    """

    version_name = "width"

    def __init__(self, method: HeteroFL, clients: Sequence[ClientInfo]) -> None:
        super().__init__(method.shared_state(), clients, method, method.head_names())
        self.shapes = {width: method.shapes(width) for width in self.model_sizes if width is not None}

    def version(self, size: float | None) -> State:
        """The leading part; views, no copies."""
        return self.state if size is None else narrowed(self.state, self.shapes[size])


def narrowed(state: State, shapes: Mapping[str, torch.Size]) -> State:
    """The leading indices of every dimension of each tensor, as many as in ``shapes``."""
    return {name: tensor[tuple(slice(size) for size in shapes[name])] for name, tensor in state.items()}
