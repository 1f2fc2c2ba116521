"""FedNova (Wang et al., NeurIPS 2020, https://arxiv.org/abs/2007.07481)."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fed.core import ClientInfo, FederationError, Server, State, WeightedMean
from lightning_fed.errors import require
from lightning_fed.methods.fedprox import FedProx
from lightning_fed.models import Backbones
from lightning_fed.options import NonNegativeFloat, PositiveInt

STEPS = "steps"
"""The name under which a client's number of steps travels."""


class FedNova(FedProx):
    r"""FedAvg with normalized averaging, which divides clients' changes by their numbers of local steps.

    Client :math:`k` takes :math:`\tau_k` steps of SGD from :math:`w` to :math:`\theta_k`, whose gradients have the total weight
    :math:`\lVert a_k \rVert_1`. The server steps by the mean of the normalized changes,

    .. math:: w \leftarrow w - \tau_\mathrm{eff} \sum_{k \in S} p_k \frac{w - \theta_k}{\lVert a_k \rVert_1}, \qquad
        \tau_\mathrm{eff} = \sum_{k \in S} p_k \lVert a_k \rVert_1, \qquad p_k = n_k / \sum_{j \in S} n_j.

    :math:`\lVert a \rVert_1` is :math:`\tau` for plain SGD, :math:`(\tau - \rho (1 - \rho^\tau) / (1 - \rho)) / (1 - \rho)` with
    momentum :math:`\rho`, whose buffer is empty at the start of a turn, and :math:`(1 - (1 - \eta\mu)^\tau) / (\eta\mu)` with a
    proximal term (:class:`.FedProx`) and the rate :math:`\eta`. If it is the same for all, this is FedAvg bit for bit. Buffers are
    averaged as in FedAvg. With a proximal term the authors' code has :math:`\tau_\mathrm{eff} = \sum_k p_k \tau_k`.

    The payload is FedAvg's and the number of steps. A ``server_optimizer`` uses the result of the step above in place of the mean.
    Monitored: accuracy after aggregation.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        mu: weight of the proximal term; 0: no term.
        **kwargs: see :class:`.FederatedModule`. ``optimizer`` is SGD, with momentum or ``mu`` but not both. Flower's baseline: lr
            0.02, momentum 0.9, weight decay 1e-4, and 2 or 2 to 5 ``epochs``.

    Raises:
        FederationError: for optimizers whose steps have other weights than these.
    """

    scales_gradients = False  # steps that are skipped when scaled gradients overflow would be counted

    def __init__(
        self, backbone: Backbones, num_classes: PositiveInt | None = None, mu: NonNegativeFloat = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(backbone, num_classes, mu, **kwargs)
        made = self.optimizer([nn.Parameter(torch.zeros(1))])
        self.momentum, self.nesterov, self.decay = self._weights_of_steps(made)[0]
        self.steps_taken = 0  # since the broadcast

    def _weights_of_steps(self, optimizer: Optimizer) -> list[tuple[float, bool, float]]:
        """The momentum of each group with parameters, whether it is Nesterov's, and ημ. Refuses settings that :func:`total_weight`
        does not cover.
        """
        groups = [group for group in optimizer.param_groups if group["params"]] or optimizer.param_groups
        wrong = [type(optimizer).__name__] if type(optimizer) is not torch.optim.SGD else []
        for group in groups:
            wrong += [f"dampening={group['dampening']}"] if group.get("dampening") else []
            wrong += ["momentum together with mu"] if group.get("momentum") and self.mu else []
            wrong += [f"momentum={group['momentum']}"] if group.get("momentum", 0) >= 1 else []
        wrong += ["persistent"] if self.persistent else []
        if self.lr_scheduler is not None and (self.lr_interval != "round" or self.mu):
            wrong += [f"lr_scheduler with lr_interval={self.lr_interval}" + ", and mu" * bool(self.mu)]
        if wrong:
            raise FederationError(
                f"FedNova got {', '.join(wrong)}, with which the weights of the steps are unknown: give torch.optim.SGD "
                "with a constant lr, and momentum or mu."
            )
        return [(group["momentum"], group["nesterov"], group["lr"] * self.mu) for group in groups]

    def payload(self) -> State:
        """The number of steps, on its way up."""
        return {STEPS: torch.tensor(self.steps_taken)}

    def load_payload(self, payload: State) -> None:
        self.steps_taken = 0

    def after_step(self, optimizer: Optimizer) -> None:
        if self.phase.name == "fine_tune":  # whose steps do not count, and whose optimizer may be another
            return
        expected = (self.momentum, self.nesterov, self.decay)
        if other := [own for own in self._weights_of_steps(optimizer) if own != expected]:
            raise FederationError(
                f"FedNova got momentum, nesterov and lr · mu of {other[0]} in a step, expected {expected} in all: give all "
                "parameters the same, and set cycle_momentum of the lr_scheduler to false."
            )
        self.steps_taken += 1

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """FedAvg's server with another ``combine``."""
        server = super().configure_server(clients)
        parameters = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        weight = partial(total_weight, momentum=self.momentum, nesterov=self.nesterov, decay=self.decay)
        server.combine = partial(normalized_mean, parameters=parameters, weight=weight)
        return server


def total_weight(steps: int, momentum: float = 0.0, nesterov: bool = False, decay: float = 0.0) -> float:
    r""":math:`\lVert a \rVert_1`: total weight of the gradients of so many steps in the change, in units of the learning rate.

    Args:
        steps: :math:`\tau`.
        momentum: :math:`\rho`.
        nesterov: whether the momentum is Nesterov's: :math:`\tau` plus :math:`\rho` times the value without it.
        decay: :math:`\eta\mu`; with momentum 0.
    """
    if decay:
        return (1 - (1 - decay) ** steps) / decay
    heavy = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    return steps + momentum * heavy if nesterov else heavy


def normalized_mean(
    updates: Iterable[tuple[State, float]], state: State, parameters: Collection[str], weight: Callable[[int], float]
) -> State:
    r"""FedNova's step, as one to a weighted mean: with :math:`m` the mean of :math:`\theta_k` with weights :math:`p_k / a_k`, it is
    :math:`w + s (m - w)`, :math:`s = \sum_k p_k a_k \sum_k p_k / a_k`. A client without steps moves nothing.

    Args:
        updates: with their weights :math:`n_k`.
        state: the server's.
        parameters: names of the normalized tensors; all others are averaged.
        weight: :math:`a_k`, given a number of steps.
    """
    normalized, plain = WeightedMean(), WeightedMean()
    unit = examples = work = share = 0.0
    for update, count in updates:
        steps = int(update[STEPS])
        require(steps >= 0, f"An update says that {steps} steps were taken, expected 0 or more.")
        plain.add({name: tensor for name, tensor in update.items() if name not in parameters}, count)
        examples += count
        if steps:
            unit = unit or weight(steps)  # all in units of the first: if all are equal, weights stay whole numbers
            relative = weight(steps) / unit
            normalized.add({name: tensor for name, tensor in update.items() if name in parameters}, count / relative)
            work, share = work + count * relative, share + count / relative
    if not examples:
        return {}
    rate = work * share / examples**2
    moved = {name: torch.lerp(state[name], mean, rate) for name, mean in normalized.result().items()}
    return {name: state[name] for name in state if name in parameters} | plain.result() | {STEPS: state[STEPS]} | moved
