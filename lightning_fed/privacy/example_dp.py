"""Example-level differential privacy: DP-SGD in every client's training (Abadi et al. 2016, https://arxiv.org/abs/1607.00133)."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from lightning_fed.core.messages import ClientUpdate, Turn
from lightning_fed.core.phased_module import PhasedModule
from lightning_fed.data import ClientDataModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import require
from lightning_fed.formatting import counted
from lightning_fed.options import PositiveFloat, PositiveInt, require_from, require_positive
from lightning_fed.privacy.accounting import epsilon, noise_multiplier
from lightning_fed.privacy.mechanism import DifferentialPrivacy, Mechanism
from lightning_fed.privacy.noise import SeededNoise
from lightning_fed.privacy.per_example import PerExample, PrivateGradients
from lightning_fed.tensors import State

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExampleDP(DifferentialPrivacy):
    r"""Example-level differential privacy: what a client sends does not reveal, up to ε and δ, whether one training example was in
    its data.

    Every step of local training draws each of the client's :math:`n_k` examples with probability :math:`q = b / n_k`,
    independently, where b is the batch size. It scales each example's gradient down to a norm of at most C, adds Gaussian noise of
    standard deviation zC to the sum, and divides by b. An epoch has :math:`\lceil n_k / b \rceil` steps. All phases of a turn are
    trained like this, including those of private parameters: otherwise one example would change the gradients of others. The
    numbers of examples are public.

    Args:
        clip: C.
        delta: δ; it has to be below :math:`1 / n_k` for every client.
        epsilon: ε of a client that takes part in all rounds, from which each client's z follows; or give ``noise_multiplier``.
        noise_multiplier: z; 0 clips alone.
        per_example: ``vmap`` computes the gradients of a chunk of examples at once; ``loop`` one by one, for networks with
            data-dependent control flow, such as the attention masks of some transformers.
        chunk: examples whose gradients are in memory at once, with ``vmap``: that many copies of what learns.
    """

    clip: PositiveFloat
    per_example: PerExample = "vmap"
    chunk: PositiveInt = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(clip=self.clip)
        require(self.per_example in get_args(PerExample), f"Got per_example={self.per_example!r}: give vmap or loop.")
        require_from(1, chunk=self.chunk)

    def mechanism(
        self, clients: Sequence[ClientInfo], batch_size: int, steps: Mapping[int, Sequence[int]], seed: int
    ) -> "ExampleMechanism":
        """The mechanism of a run.

        Args:
            clients: all clients; those that never take part send nothing.
            batch_size: b.
            steps: by client id, the number of steps after 1, 2, … rounds if the client takes part in all of them.
            seed: the run's seed.

        Raises:
            FederationError: for a δ that guarantees nothing.
        """
        clients = [client for client in clients if client.takes_part]
        most = max(client.num_train for client in clients)
        require(
            self.delta < 1 / most,
            f"privacy.delta is {self.delta:g} with up to {most} examples per client: give less than 1/{most}, or one of them may "
            "be published.",
        )
        rates = {client.id: min(1.0, batch_size / client.num_train) for client in clients}
        if self.epsilon is not None:
            log.info(
                f"Looking for the noise of {len(clients)} clients for ε = {self.epsilon:g}; this takes a second or two per client."
            )
        multipliers = {client: self._multiplier(rate, steps[client][-1]) for client, rate in rates.items()}
        return ExampleMechanism(ExampleTraining(self, multipliers, seed), rates, {client: steps[client] for client in rates})

    def _multiplier(self, rate: float, steps: int) -> float:
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        return noise_multiplier(rate, self.epsilon, max(steps, 1), self.delta)


@dataclass(frozen=True)
class ExampleTraining:
    """How the clients of a run train with :class:`ExampleDP`.

    Args:
        privacy: the settings.
        multipliers: z by client id.
        seed: the run's seed. The noise is a function of it, so this simulates privacy.
    """

    privacy: ExampleDP
    multipliers: Mapping[int, float]
    seed: int

    @contextmanager
    def of(self, module: PhasedModule, data: ClientDataModule, turn: Turn) -> Iterator[None]:
        """Train a client privately in this block, if the turn sends what it trains.

        Raises:
            FederationError: if a callback has ended the training: by losses, say, which no noise hides.
        """
        if turn.verb != "fit":
            yield
            return
        noise, client = SeededNoise(self.seed), turn.client

        def normals(name: str, count: int) -> Tensor:
            return torch.from_numpy(noise.normals(turn.round, f"client {client.id}/{name}", count))

        size = min(data.batch_size, client.num_train)
        given = self.privacy.clip, self.multipliers[client.id], size, normals, self.privacy.per_example, self.privacy.chunk
        data.poisson, module.private_gradients = True, PrivateGradients(*given)
        try:
            yield
            require(
                module._trainer is None or not module.trainer.should_stop,
                "a callback ended the training of a client, and when it does may tell of examples: leave it out of the trainer.",
            )
        finally:
            data.poisson, module.private_gradients = False, None


class ExampleMechanism(Mechanism):
    """The ledger of every client's steps, in which steps of all phases count alike.

    Args:
        training: how clients train.
        rates: q by client id.
        planned: ``steps`` of :meth:`ExampleDP.mechanism` for the clients that take part.
    """

    def __init__(self, training: ExampleTraining, rates: Mapping[int, float], planned: Mapping[int, Sequence[int]]) -> None:
        self.training, self.rates, self.planned = training, rates, planned
        self.steps = dict.fromkeys(planned, 0)
        self._warned = False  # of more steps than planned

    @property
    def multipliers(self) -> list[float]:
        """Each client's z."""
        return [self.training.multipliers[client] for client in self.steps]

    def note(self, round: int, updates: Collection[ClientUpdate]) -> None:
        """Record the steps of a round.

        Raises:
            FederationError: for more steps than the noise was chosen for.
        """
        for update in updates:
            steps, planned = int(update.metrics.get("steps", 0)), self.planned[update.client]
            expected = planned[round - 1] - (planned[round - 2] if round > 1 else 0)
            if steps > expected:
                took = f"Client {update.client} took {steps} steps in round {round}, and"
                require(
                    self.training.privacy.epsilon is None,
                    f"{took} its noise was chosen for {expected}: the method's steps depend on the client, give noise_multiplier "
                    "in place of epsilon.",
                )
                if not self._warned:
                    log.warning(f"{took} not {expected}: ε will be larger than forecast.")
                self._warned = True
            self.steps[update.client] += steps

    def epsilon(self, rounds: int) -> float:
        """Largest ε of a client that takes part in each of the first ``rounds`` rounds."""
        return self._largest({client: planned[rounds - 1] for client, planned in self.planned.items()})

    def _largest(self, steps: Mapping[int, int]) -> float:
        """Largest ε for these numbers of steps. Computing one takes up to a second, so clients with a smaller rate, more noise and
        fewer steps than another one are skipped.
        """
        spent = {(self.rates[client], self.training.multipliers[client], count) for client, count in steps.items()}
        worst = [
            (rate, z, count)
            for rate, z, count in spent
            if not any(rate <= other[0] and z >= other[1] and count <= other[2] for other in spent - {(rate, z, count)})
        ]
        return max(epsilon(*one, self.training.privacy.delta) for one in worst)

    def spent(self) -> dict[str, float]:
        """``privacy/epsilon`` of the client that has spent most. Nothing without noise."""
        return {"privacy/epsilon": self._largest(self.steps)} if min(self.multipliers) > 0 else {}

    def forecast(self, values: int, rounds: int) -> str:
        multipliers, privacy = self.multipliers, self.training.privacy
        spread = " to ".join(f"{z:g}" for z in sorted({min(multipliers), max(multipliers)}))
        spent = "no guarantee" if not min(multipliers) else f"ε = {self.epsilon(rounds):.2f} at δ = {privacy.delta:g}"
        said = f"Privacy of examples: z = {spread}, clip norm {privacy.clip:g}"
        return f"{said}; a client that takes part in {counted(rounds, 'round')} has {spent}."

    def state_dict(self) -> State:
        """The ledger: q, z and number of steps of each client that takes part."""
        rows = [(self.rates[client], self.training.multipliers[client], float(count)) for client, count in self.steps.items()]
        return {"ledger": torch.tensor(rows, dtype=torch.float64)}

    def load_state_dict(self, state: State) -> None:
        rates, multipliers, steps = state["ledger"].unbind(1)
        require(
            (rates.tolist(), multipliers.tolist()) == ([self.rates[client] for client in self.steps], self.multipliers),
            "The checkpoint's ledger has other sampling rates or noise than this run: continue with the configuration of that run.",
        )
        self.steps = dict(zip(self.steps, map(int, steps.tolist()), strict=True))
