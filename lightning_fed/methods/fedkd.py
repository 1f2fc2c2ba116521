"""FedKD (Wu et al., Nature Communications 13:2032, 2022, https://doi.org/10.1038/s41467-022-29763-x)."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_fed.core import Broadcast, ClientInfo, ClientUpdate, FederationError, Server, State, WeightedMean, check_fits
from lightning_fed.errors import require
from lightning_fed.methods.families.mutual_learning import SHARED, MutualLearningModule
from lightning_fed.models import Backbone, BackboneFactory, Backbones
from lightning_fed.nn import BufferDict, divergence
from lightning_fed.nn.energy import compressed, compressed_shapes, restored
from lightning_fed.nn.joint_optimizer import Share
from lightning_fed.options import ClosedUnitInterval, NonNegativeFloat, PositiveInt
from lightning_fed.tensors import second_names

MENTEE, CHANGE = "mentee/", "change/"
"""What names on the wire begin with: of the whole mentee, and of what has changed in it."""


class FedKD(MutualLearningModule):
    r"""A large private mentor and a small shared mentee distil each other; low-rank changes of the mentee travel.

    With t the mentor, s the mentee, and the batch's :math:`a = \mathrm{CE}_t + \mathrm{CE}_s`, a client minimises at once

    .. math:: L_t = \mathrm{CE}_t + \frac{\mathrm{KL}(p_s \Vert p_t)}{a} + H, \quad
        L_s = \mathrm{CE}_s + \frac{\mathrm{KL}(p_t \Vert p_s)}{a} + H, \quad H = \frac{\mathrm{MSE}(h_t, W h_s)}{a},

    each for its own network, with the other one's probabilities, and a, as constants: poor networks distil little. h is
    the input of the head, W a private matrix, which learns from H once.

    A client sends the change of its mentee in a turn; the server sends the mean of the changes, with equal weights. Each matrix
    travels as the leading singular values and vectors that hold a share e of its energy, with e growing from round to round, or
    in full if that is not larger. A client that has missed a round, or takes part for the first time, gets the
    whole mentee. A client predicts with its mentor. Monitored: accuracy after aggregation (it equals that before).

    Args:
        backbone: the clients' mentors; client ``k`` gets entry ``k mod len(list)``.
        num_classes: number of classes; None: as many as the data have.
        mentee: the shared network; None: the first of ``backbone``. pFedLoRA's paper: the smallest, CNN-5.
        energy_start: e before the first round; the authors' code: 0.95.
        energy_end: e from round ``energy_rounds`` on; the authors' code: 0.98.
        energy_rounds: number of rounds over which e grows: set it to the rounds of the federation. (It is not taken from there, so
            that a run can be continued for longer.)
        distillation: weight of the KL terms; the paper: 1.
        hidden: weight of H; the paper: 1. With 0 there is no W.
        detach: whether each network learns from its own loss only, as above. If not, :math:`L_t + L_s` is minimised as written,
            through a and through both networks' probabilities, and with H twice, as in the authors' code.
        mentee_optimizer: optimizer of the mentee. Default: the same as ``optimizer``.
        projection_optimizer: optimizer of W. Default: the same as ``optimizer``.
        **kwargs: see :class:`.FederatedModule`; ``optimizer`` is the mentor's.
    """

    dynamic_payload = True
    needs_cross_entropy = (
        "it divides what its networks teach each other by their cross-entropies: use CrossEntropyLoss (label smoothing, class "
        "weights), or FML."
    )

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        mentee: BackboneFactory | None = None,
        energy_start: ClosedUnitInterval = 0.95,
        energy_end: ClosedUnitInterval = 0.98,
        energy_rounds: PositiveInt = 100,
        distillation: NonNegativeFloat = 1.0,
        hidden: NonNegativeFloat = 1.0,
        detach: bool = True,
        mentee_optimizer: OptimizerCallable | None = None,
        projection_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, num_classes, mentee, mentee_optimizer, **kwargs)
        for name, share in (("energy_start", energy_start), ("energy_end", energy_end)):
            if not 0 < share <= 1:
                raise FederationError(f"{name} is {share}: give a share of the energy in (0, 1].")
        self.energy = partial(energy_in_round, start=energy_start, end=energy_end, rounds=energy_rounds)
        self.distillation = distillation
        self.hidden = hidden
        self.detach = detach
        self.projection_optimizer = projection_optimizer or self.optimizer
        self._change: State = {}

    def build(self) -> None:
        """Build mentor, mentee and, drawn after them, W."""
        super().build()
        self.projection: nn.Linear | None = None
        if self.hidden > 0:
            self.projection = nn.Linear(self.shared.head.in_features, self.backbone.head.in_features, bias=False)
        left_out = self.find_frozen() | second_names(self).keys()
        mentee = {name: tensor for name, tensor in self.shared.state_dict().items() if f"{SHARED}{name}" not in left_out}
        self.before = BufferDict(mentee, persistent=False)  # the mentee at the start of the turn

    def learned(self) -> State:
        """The mentee without its frozen tensors."""
        own = self.shared.state_dict()
        return {name: own[name] for name in self.before}

    def shared_names(self) -> set[str]:
        """Empty: only changes of the mentee travel. The common mentee that they are added to stays with the client."""
        return set()

    def buffer_names(self) -> set[str]:
        """Those of the mentee, whole or as changes."""
        return {f"{kind}{name}" for kind in (MENTEE, CHANGE) for name, _ in self.shared.named_buffers()}

    def payload(self) -> State:
        """The change of the mentee; empty before the client has trained."""
        return self._change

    def load_payload(self, payload: State) -> None:
        """Load the whole mentee, or add a change to the client's one."""
        own = self.learned()
        received = {name.removeprefix(MENTEE).removeprefix(CHANGE): tensor for name, tensor in payload.items()}
        changes = any(name.startswith(CHANGE) for name in payload)
        check_fits(received, compressed_shapes(received, own) if changes else own, f"What was sent to {type(self).__name__}")
        mentee = changed(own, restored(received, own)) if changes else received
        self.shared.load_state_dict(mentee, strict=False)
        self.before.update(mentee)
        self._change = {}

    def after_training(self, sums: State) -> None:
        """Compute the change of the mentee, and reset the client's copy to the common mentee."""
        before = dict(self.before.items())
        change = {name: t - before[name] if t.is_floating_point() else t.clone() for name, t in self.learned().items()}
        sent = compressed(change, self.energy(self.rounds_before + 1))
        self._change = {f"{CHANGE}{name}": tensor for name, tensor in sent.items()}
        self.shared.load_state_dict(before, strict=False)

    def export_state(self, private: bool = True) -> State:
        """Of the server: the mentee."""
        return super().export_state() if private else {name: t for name, t in self.state_dict().items() if name.startswith(SHARED)}

    def shares(self) -> list[Share]:
        """The two networks, and W with its own optimizer."""
        return super().shares() + ([(self.projection_optimizer, list(self.projection.parameters()))] if self.projection else [])

    def client_loss(self, batch: Any) -> Tensor:
        """Sum of both networks' losses on a batch; see the class. Terms with weight 0 are left out."""
        x, y = self.unpack(batch)
        (h_t, mentor), (h_s, mentee) = self.both(lambda network: self.hidden_and_logits(network, x))
        loss = own = self.criterion(mentor, y) + self.criterion(mentee, y)
        scale = (own.detach() if self.detach else own).clamp(min=torch.finfo(own.dtype).eps)
        if self.distillation > 0:
            peers = (mentor.detach(), mentee.detach()) if self.detach else (mentor, mentee)
            loss = loss + self.distillation * (divergence(peers[1], mentor) + divergence(peers[0], mentee)) / scale
        if self.projection is not None and h_t is not None:
            times = 1 if self.detach else 2
            loss = loss + times * self.hidden * mse_loss(self.projection(h_s), h_t) / scale
        return loss

    def hidden_and_logits(self, network: Backbone, x: Any) -> tuple[Tensor | None, Tensor]:
        """Input ``(B, D)`` of a network's head, if it is needed, and logits ``(B, C)``."""
        return (None, network(x)) if self.projection is None else network.encode_and_classify(x)

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        state = {f"{MENTEE}{name}": t.detach().to("cpu", copy=True) for name, t in self.learned().items()}
        return MenteeServer(state, [client.id for client in clients], self.energy)


class MenteeServer(Server):
    """Holds the mentee, and the version of it that each client has.

    Args:
        state: the initial mentee, under its names on the wire.
        clients: ids of all clients.
        energy: the share of the energy to send, by round.
    """

    def __init__(self, state: State, clients: Sequence[int], energy: Callable[[int], float]) -> None:
        super().__init__(state, "uniform")
        self.energy = energy
        self.version = 0  # number of merged changes
        self.merged = 0  # the round of the last merge
        self.holds = dict.fromkeys(clients, -1)  # the version that each client keeps
        self.mean = {name.removeprefix(MENTEE): torch.zeros_like(tensor) for name, tensor in state.items()}
        self._change: State | None = None  # the mean change, in the form that is sent

    def broadcast(self, client: ClientInfo) -> Broadcast:
        """The last change, to a client that has the version before it; otherwise the whole mentee."""
        if self.holds[client.id] != self.version - 1 or self.version == 0:
            return self.evaluation_broadcast(client)
        return Broadcast({f"{CHANGE}{name}": tensor for name, tensor in self.change().items()})

    def evaluation_broadcast(self, client: ClientInfo) -> Broadcast:
        return Broadcast(self.state)

    def change(self) -> State:
        """The mean of the last changes, in the form that is sent."""
        if self._change is None:
            self._change = compressed(self.mean, self.energy(self.merged))
        return self._change

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        """Changes of all tensors, in full or as factors of any rank."""
        came = {name.removeprefix(CHANGE): tensor for name, tensor in update.state.items()}
        return {f"{CHANGE}{name}": tensor for name, tensor in compressed_shapes(came, self.mean).items()}

    def aggregate(self, updates: Iterable[ClientUpdate]) -> dict[str, float]:
        """Merge a round's changes; returns ``server/energy``, the share that is sent."""
        mean, arrived = WeightedMean(), []
        for update in updates:
            sent = {name.removeprefix(CHANGE): tensor for name, tensor in update.state.items()}
            mean.add(restored(sent, self.mean), 1)
            arrived.append(update.client)
        if arrived:
            self.holds |= dict.fromkeys(arrived, self.version)
            self.version, self.merged = self.version + 1, self.round
            self.mean, self._change = mean.result(), None
            mentee = {name.removeprefix(MENTEE): tensor for name, tensor in self.state.items()}
            mentee = changed(mentee, restored(self.change(), mentee))
            self.state = {f"{MENTEE}{name}": tensor for name, tensor in mentee.items()}
        return {"server/energy": self.energy(self.round)}

    def state_dict(self) -> State:
        """The mentee, its last change, and each client's version."""
        means = {f"{CHANGE}{name}": tensor for name, tensor in self.mean.items()}
        counts = {"version": self.version, "merged": self.merged, "holds": list(self.holds.values())}
        return self.state | means | {name: torch.tensor(value) for name, value in counts.items()}

    def load_state_dict(self, state: State) -> None:
        """Continue from :meth:`state_dict`. Raises :class:`FederationError` if clients hold versions that do not exist."""
        version, holds = int(state["version"]), state["holds"].tolist()
        require(min(holds) >= -1 and max(holds) < version, f"Clients held changes {holds[:20]}, of which there were {version}.")
        self.state = {name: state[name] for name in self.state}
        self.mean, self._change = {name: state[f"{CHANGE}{name}"] for name in self.mean}, None
        self.version, self.merged = version, int(state["merged"])
        self.holds = dict(zip(self.holds, holds, strict=True))


def energy_in_round(round: int, start: float, end: float, rounds: int) -> float:
    r""":math:`e = e_{start} + \frac{t}{T} (e_{end} - e_{start})`, and :math:`e_{end}` from round T on.

    >>> [round(energy_in_round(number, 0.95, 0.98, 3), 2) for number in (1, 2, 3, 4)]
    [0.96, 0.97, 0.98, 0.98]
    """
    return end if round >= rounds else start + round / rounds * (end - start)


def changed(state: State, change: State) -> State:
    """Add a change to a state; counters are replaced."""
    return {name: t + change[name] if t.is_floating_point() else change[name].clone() for name, t in state.items()}
