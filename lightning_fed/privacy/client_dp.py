"""Differential privacy of clients: DP-FedAvg (McMahan et al. 2018, https://arxiv.org/abs/1710.06963)."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from jsonargparse.typing import ClosedUnitInterval, PositiveFloat
from torch import Tensor

from lightning_fed.core.client_state import flatten
from lightning_fed.errors import require
from lightning_fed.options import require_positive
from lightning_fed.privacy.accounting import epsilon, noise_multiplier
from lightning_fed.privacy.mechanism import DifferentialPrivacy, Mechanism
from lightning_fed.privacy.noise import Noise
from lightning_fed.tensors import State

log = logging.getLogger(__name__)

NoiseKind = Literal["seeded", "secret"]

NORM_NOISE = 20
"""Of how many expected participants one is the standard deviation of the noise on how many were clipped (Andrew et al.)."""


@dataclass(frozen=True)
class AdaptiveClip:
    r"""A clip norm that follows the clients' norms (Andrew et al. 2021, https://arxiv.org/abs/1905.03871):
    :math:`C \leftarrow C e^{-\eta (\tilde b - \gamma)}`, :math:`\tilde b` being the noisy share of changes that were not clipped.

    Args:
        start: the first round's clip norm, :math:`C`.
        quantile: :math:`\gamma`, the share of changes that is to stay as it is; the paper has 0.5.
        lr: :math:`\eta`; the paper has 0.2.
    """

    start: PositiveFloat
    quantile: ClosedUnitInterval = 0.5
    lr: PositiveFloat = 0.2

    def __post_init__(self) -> None:
        require_positive(start=self.start, lr=self.lr)
        require(0 <= self.quantile <= 1, f"Got quantile={self.quantile}: give a share from 0 to 1.")


@dataclass(frozen=True, kw_only=True)
class ClientDP(DifferentialPrivacy):
    r"""Whether one client took part at all cannot be told from what the server sends, up to ε and δ.

    A client's change of all that it sends, as one vector, is scaled down to a norm of at most C; the server adds up the changes,
    adds Gaussian noise of standard deviation zC once, and divides by the number of participants to be expected. All clients count
    the same.

    Args:
        clip: C, or how it is found.
        delta: δ, below one over the number of clients.
        epsilon: ε that all rounds may cost together, from which z follows; or give ``noise_multiplier``.
        noise_multiplier: z; 0 clips alone.
        noise: of the run's seed (``seeded``), which is a simulation, or of a ``secret`` key, from which the cohorts are drawn, too.
        key: the key's file, outside of the run's folder; made when there is none.
    """

    clip: PositiveFloat | AdaptiveClip
    noise: NoiseKind = "seeded"
    key: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(clip=None if isinstance(self.clip, AdaptiveClip) else self.clip)
        require(self.noise in get_args(NoiseKind), f"Got noise={self.noise!r}: give seeded or secret.")
        require(
            (self.noise == "secret") == (self.key is not None),
            f"Got noise={self.noise} with key={self.key}: secret noise is of a key's file, seeded noise has none.",
        )

    def mechanism(self, clients: int, rate: float, rounds: int, noise: Noise) -> "GaussianMechanism":
        """What a run does.

        Args:
            clients: how many may take part, N.
            rate: with which probability each does, q; 1: all do.
            rounds: how many there will be.
            noise: where it comes from.

        Raises:
            FederationError: for a δ that says nothing, and for a z that adaptive clipping cannot have.
        """
        require(
            self.delta < 1 / clients,
            f"privacy.delta is {self.delta:g} with {clients} clients: give less than 1/{clients}, or one client may be published.",
        )
        multiplier = self.noise_multiplier
        if multiplier is None:
            assert self.epsilon is not None
            log.info(f"Looking for the noise with which {rounds} rounds cost ε = {self.epsilon:g}; this may take a minute.")
            multiplier = noise_multiplier(rate, self.epsilon, rounds, self.delta)
        return GaussianMechanism(self.clip, multiplier, clients, rate, self.delta, noise)


class GaussianMechanism(Mechanism):
    r"""Clips changes, sums them, adds noise, divides by the expected number of participants qN; keeps the ledger.

    With :class:`AdaptiveClip` the numbers of clipped changes have noise of their own, :math:`\sigma_b = qN / 20`, and the changes
    get :math:`z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}` in place of z: both together cost what z costs.

    Args:
        clip: see :class:`ClientDP`.
        multiplier: z.
        clients: N.
        rate: q.
        delta: δ.
        noise: where it comes from.
    """

    def __init__(
        self, clip: float | AdaptiveClip, multiplier: float, clients: int, rate: float, delta: float, noise: Noise
    ) -> None:
        self.adaptive = clip if isinstance(clip, AdaptiveClip) else None
        self.clip_norm = clip.start if isinstance(clip, AdaptiveClip) else clip
        self.multiplier, self.rate, self.delta, self.noise = multiplier, rate, delta, noise
        self.expected = rate * clients
        self.norm_noise = self.expected / NORM_NOISE
        self.rounds = 0  # that have been paid for
        self._unclipped = 0.0  # of a round, each less 1/2
        if self.adaptive is not None:
            require(
                0 < multiplier < 2 * self.norm_noise,
                f"Adaptive clipping got a noise multiplier of {multiplier:g} with about {self.expected:g} participants: it needs "
                f"one above 0 and below {2 * self.norm_noise:g}; draw larger cohorts, or give a clip norm.",
            )

    @property
    def update_multiplier(self) -> float:
        r"""What the changes get of z, :math:`z_\Delta`."""
        if self.adaptive is None:
            return self.multiplier
        return (self.multiplier**-2 - (2 * self.norm_noise) ** -2) ** -0.5

    def combine(self, updates: Iterable[tuple[State, float]], state: State) -> State:
        """Where the server is, and the sum of clipped changes over qN, however many came, in float64. Nobody is a round, too."""
        self._unclipped = 0.0
        start = flatten(state).double()
        total = torch.zeros_like(start)
        for update, _ in updates:
            change = flatten({name: update[name] for name in state}).double().sub_(start)
            norm = float(torch.linalg.vector_norm(change))
            total.add_(change, alpha=min(1.0, self.clip_norm / norm) if norm else 1.0)
            self._unclipped += (norm <= self.clip_norm) - 0.5
        parts = total.div_(self.expected).add_(start).split([tensor.numel() for tensor in state.values()])
        return {name: part.view_as(tensor) for (name, tensor), part in zip(state.items(), parts, strict=True)}

    def add_noise(self, combined: State, state: State, clients: int) -> State:
        """The noise, once; with the round it is paid for."""
        round = self.rounds + 1
        std = self.update_multiplier * self.clip_norm / self.expected
        noisy = {name: combined[name] + std * self._normals(round, name, combined[name]) for name in sorted(combined)}
        if self.adaptive is not None:
            hidden = self._unclipped + self.norm_noise * float(self.noise.normals(round, "unclipped", 1)[0])
            self.clip_norm *= math.exp(-self.adaptive.lr * (hidden / self.expected + 0.5 - self.adaptive.quantile))
        self.rounds = round
        return {name: noisy[name].to(state[name].dtype) for name in combined}

    def _normals(self, round: int, name: str, like: Tensor) -> Tensor:
        return torch.from_numpy(self.noise.normals(round, f"state/{name}", like.numel())).view(like.shape)

    def epsilon(self, rounds: int) -> float:
        return epsilon(self.rate, self.multiplier, rounds, self.delta)

    def metrics(self) -> dict[str, float]:
        """``privacy/noise``, z, and ``privacy/clip``, the norm of the next round."""
        return {"privacy/noise": self.multiplier, "privacy/clip": self.clip_norm}

    def spent(self) -> dict[str, float]:
        """``privacy/epsilon`` of all rounds so far; none where there is no noise."""
        return {} if self.multiplier == 0 else {"privacy/epsilon": self.epsilon(self.rounds)}

    def state_dict(self) -> State:
        """The ledger, (q, z, rounds), and the clip norm."""
        ledger = torch.tensor([self.rate, self.multiplier, self.rounds], dtype=torch.float64)
        return {"ledger": ledger, "clip": torch.tensor(self.clip_norm, dtype=torch.float64)}

    def load_state_dict(self, state: State) -> None:
        rate, multiplier, rounds = state["ledger"].tolist()
        require(
            (rate, multiplier) == (self.rate, self.multiplier),
            f"The checkpoint's ledger has q = {rate:g} and z = {multiplier:g}, this run {self.rate:g} and {self.multiplier:g}: "
            "continue with the configuration of that run.",
        )
        self.rounds, self.clip_norm = int(rounds), float(state["clip"])

    def noise_to_clip(self, values: int) -> float:
        """The norm of a round's noise on the mean, over the clip norm."""
        return self.update_multiplier * math.sqrt(values) / self.expected

    def forecast(self, values: int, rounds: int) -> str:
        ratio = self.noise_to_clip(values)
        spent = "no guarantee" if self.multiplier == 0 else f"ε = {self.epsilon(rounds):.2f} at δ = {self.delta:g}"
        verdict = (
            "expect no learning; more clients, a smaller payload (PFedLoRA, adapters) or a larger epsilon help"
            if ratio > 1
            else "it is smaller than the clip norm"
        )
        return (
            f"Privacy of clients: z = {self.multiplier:g}, after {rounds} rounds {spent}; the noise on {values} values is "
            f"{ratio:.3g} × the clip norm in each round: {verdict}."
        )
