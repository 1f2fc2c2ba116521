"""Differential privacy of clients: DP-FedAvg (McMahan et al. 2018, https://arxiv.org/abs/1710.06963)."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_fed.core.client_state import flatten
from lightning_fed.errors import require
from lightning_fed.formatting import counted
from lightning_fed.options import ClosedUnitInterval, PositiveFloat, require_positive
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
    :math:`C \leftarrow C e^{-\eta (\tilde b - \gamma)}`, with the noisy share :math:`\tilde b` of unclipped changes.

    Args:
        start: the first round's clip norm, :math:`C`.
        quantile: :math:`\gamma`, the target share of unclipped changes; the paper has 0.5.
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
    r"""Client-level (ε, δ)-differential privacy: the server's messages do not reveal whether a client took part.

    A client's change, as one vector over all tensors that it sends, is scaled down to a norm of at most C. The server sums the
    changes, adds Gaussian noise of standard deviation zC once, and divides by the expected number of participants. All clients have
    equal weights.

    Args:
        clip: C, or :class:`AdaptiveClip`.
        delta: δ, below one over the number of clients.
        epsilon: total ε of all rounds, which determines z; or give ``noise_multiplier``.
        noise_multiplier: z; 0: clipping without noise.
        noise: from the run's seed (``seeded``), which is a simulation, or from a ``secret`` key, which also draws the cohorts.
        key: the key's file, outside the run's folder; created if it does not exist.
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
        """The mechanism of a run.

        Args:
            clients: N, the number of clients that may take part.
            rate: q, the probability with which each does; 1: all do.
            rounds: number of rounds.
            noise: its source.

        Raises:
            FederationError: for a δ that is too large, and for a z that adaptive clipping does not support.
        """
        require(
            self.delta < 1 / clients,
            f"privacy.delta is {self.delta:g} with {clients} clients: give less than 1/{clients}, or one client may be published.",
        )
        multiplier = self.noise_multiplier
        if multiplier is None:
            assert self.epsilon is not None
            log.info(
                f"Looking for the noise with which {counted(rounds, 'round')} cost ε = {self.epsilon:g}; this may take a minute."
            )
            multiplier = noise_multiplier(rate, self.epsilon, rounds, self.delta)
        return GaussianMechanism(self.clip, multiplier, clients, rate, self.delta, noise)


class GaussianMechanism(Mechanism):
    r"""Clips changes, sums them, adds noise, divides by the expected number of participants qN; keeps the ledger.

    With :class:`AdaptiveClip` the numbers of clipped changes get separate noise, :math:`\sigma_b = qN / 20`, and the changes
    get :math:`z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}` instead of z: together they cost as much as z.

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
        self.rounds = 0  # that the ledger has counted
        self._unclipped = 0.0  # of a round, each less 1/2
        if self.adaptive is not None:
            require(
                0 < multiplier < 2 * self.norm_noise,
                f"Adaptive clipping got a noise multiplier of {multiplier:g} with about {self.expected:g} participants: it needs "
                f"one above 0 and below {2 * self.norm_noise:g}; draw larger cohorts, or give a clip norm.",
            )

    @property
    def update_multiplier(self) -> float:
        r"""The noise multiplier of the changes, :math:`z_\Delta`."""
        if self.adaptive is None:
            return self.multiplier
        return (self.multiplier**-2 - (2 * self.norm_noise) ** -2) ** -0.5

    def combine(self, updates: Iterable[tuple[State, float]], state: State) -> State:
        """The server's state plus the sum of clipped changes over qN, for any number of updates, also none, in float64."""
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
        """Add the noise once, and count the round."""
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
        """``privacy/epsilon`` of all rounds so far; empty without noise."""
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
        """Ratio of the norm of a round's noise on the mean to the clip norm."""
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
            f"Privacy of clients: z = {self.multiplier:g}, after {counted(rounds, 'round')} {spent}; the noise on {values} values "
            f"is {ratio:.3g} × the clip norm in each round: {verdict}."
        )
