"""Server optimizers: the server uses the mean of the updates as a direction and takes an optimizer step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.errors import require
from lightning_fed.options import ClosedUnitInterval, NonNegativeFloat, PositiveFloat
from lightning_fed.tensors import State


class ServerOptimizer(ABC):
    r"""Takes a step in the direction :math:`\Delta = \bar w - w` from the server's parameters :math:`w` to the mean of those that
    the clients sent. It does not affect buffers (batch-norm statistics), payloads and private state.

    It is the option ``server_optimizer`` of every method whose server averages. Its state is in checkpoints.
    """

    @abstractmethod
    def initial(self, parameter: Tensor) -> State:
        """Initial optimizer state of a parameter, by name."""

    @abstractmethod
    def step(self, weight: Tensor, mean: Tensor, moments: State) -> tuple[Tensor, State]:
        """The new parameter and its new optimizer state.

        Args:
            weight: the parameter before the round.
            mean: of what the clients sent, of the same shape.
            moments: from :meth:`initial`, or the last step.
        """


@dataclass(frozen=True)
class ServerSGD(ServerOptimizer):
    r"""SGD, with momentum FedAvgM (Hsu, Qi & Brown 2019): :math:`v \leftarrow \beta v + \Delta`, :math:`w \leftarrow w + \eta v`;
    Nesterov's: :math:`w \leftarrow w + \eta (\Delta + \beta v)`. With :math:`\eta` 1 and without momentum it is averaging itself,
    bit for bit.

    Args:
        lr: :math:`\eta`; the paper has 1.
        momentum: :math:`\beta`. The paper searches {0, 0.7, 0.9, 0.97, 0.99, 0.997}.
        nesterov: whether the momentum is Nesterov's, as in the paper's experiments.
    """

    lr: PositiveFloat = 1.0
    momentum: ClosedUnitInterval = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        refuse_ones(self, "momentum")

    def initial(self, parameter: Tensor) -> State:
        return {"velocity": torch.zeros_like(parameter)} if self.momentum else {}

    def step(self, weight: Tensor, mean: Tensor, moments: State) -> tuple[Tensor, State]:
        moved = torch.lerp(weight, mean, self.lr)  # with lr 1 the mean itself
        if not self.momentum:
            return moved, moments
        velocity = self.momentum * moments["velocity"] + (mean - weight)
        ahead = velocity if self.nesterov else moments["velocity"]
        return moved + self.lr * self.momentum * ahead, {"velocity": velocity}


@dataclass(frozen=True)
class AdaptiveOptimizer(ServerOptimizer):
    r"""Base of the optimizers of Reddi et al., ICLR 2021 (https://arxiv.org/abs/2003.00295), Algorithm 2:
    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) \Delta`, :math:`w \leftarrow w + \eta\, m / (\sqrt v + \tau)`, element-wise.

    Args:
        lr: :math:`\eta`.
        beta_1: :math:`\beta_1`.
        tau: :math:`\tau`, which controls the adaptivity: larger is less adaptive. The paper has 1e-3 if it does not search it.
        initial_v: :math:`v` before the first round; None: :math:`\tau^2`, the smallest value that the paper allows. TensorFlow
            Federated and FLamby start with 0.
    """

    lr: PositiveFloat = 0.1
    beta_1: ClosedUnitInterval = 0.9
    tau: PositiveFloat = 1e-3
    initial_v: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        refuse_ones(self, "beta_1")
        option = "tau" if self.initial_v is None else "initial_v"
        require(
            self.first_v <= torch.finfo(torch.float32).max,
            f"{type(self).__name__} got {option}={getattr(self, option)}, with which v overflows in single precision: give less.",
        )

    @property
    def first_v(self) -> float:
        """:math:`v` before the first round."""
        return self.tau * self.tau if self.initial_v is None else self.initial_v

    def initial(self, parameter: Tensor) -> State:
        return {"m": torch.zeros_like(parameter), "v": torch.full_like(parameter, self.first_v)}

    def step(self, weight: Tensor, mean: Tensor, moments: State) -> tuple[Tensor, State]:
        delta = mean - weight
        m = self.beta_1 * moments["m"] + (1 - self.beta_1) * delta
        now = moments | {"m": m, "v": self.second_moment(moments["v"], delta.square())}
        return weight + self.rate(now) * m / (now["v"].sqrt() + self.tau), now

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        r"""The new :math:`v`, from the old one and :math:`\Delta^2`."""

    def rate(self, moments: State) -> float:
        r"""The rate of a step; it may keep a counter in ``moments``. Default: :math:`\eta`."""
        return self.lr


@dataclass(frozen=True)
class ServerAdagrad(AdaptiveOptimizer):
    r"""FedAdagrad's: :math:`v \leftarrow v + \Delta^2`. By default :math:`\beta_1` is 0, as in the paper; see
    :class:`AdaptiveOptimizer`.
    """

    beta_1: ClosedUnitInterval = 0.0

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class DecayingOptimizer(AdaptiveOptimizer):
    r"""Adaptive optimizers with exponential decay of :math:`v`.

    Args:
        beta_2: :math:`\beta_2`; 0.99 in the paper, 0.999 in TensorFlow Federated and FLamby.
        bias_correction: let the rate of round t be :math:`\eta \sqrt{1 - \beta_2^t} / (1 - \beta_1^t)`, as in Keras' optimizers,
            which TensorFlow Federated uses; the paper has no correction.
    """

    beta_2: ClosedUnitInterval = 0.99
    bias_correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_ones(self, "beta_2")

    def initial(self, parameter: Tensor) -> State:
        counted = {"rounds": torch.tensor(0)} if self.bias_correction else {}
        return super().initial(parameter) | counted

    def rate(self, moments: State) -> float:
        if not self.bias_correction:
            return self.lr
        moments["rounds"] = moments["rounds"] + 1
        rounds = int(moments["rounds"])
        return float(self.lr * (1 - self.beta_2**rounds) ** 0.5 / (1 - self.beta_1**rounds))


@dataclass(frozen=True)
class ServerAdam(DecayingOptimizer):
    r"""FedAdam's: :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`; see :class:`AdaptiveOptimizer`,
    :class:`DecayingOptimizer`.
    """

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta_2 * v + (1 - self.beta_2) * square


@dataclass(frozen=True)
class ServerYogi(DecayingOptimizer):
    r"""FedYogi's: :math:`v \leftarrow v - (1 - \beta_2) \Delta^2 \,\mathrm{sign}(v - \Delta^2)`; see :class:`AdaptiveOptimizer`,
    :class:`DecayingOptimizer`.
    """

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta_2) * square * (v - square).sign()


def refuse_ones(optimizer: ServerOptimizer, *names: str) -> None:
    """Refuse decay rates outside [0, 1): with 1 a moving mean would never change."""
    for name in names:
        value = getattr(optimizer, name)
        require(0 <= value < 1, f"{type(optimizer).__name__} got {name}={value}: give a number from 0, less than 1.")
