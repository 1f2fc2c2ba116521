"""FedAdagrad, FedAdam and FedYogi (Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295), Algorithm 2."""

from typing import Any

from lightning_fed.core import ServerAdagrad, ServerAdam, ServerYogi
from lightning_fed.errors import refuse_given
from lightning_fed.methods.fedavg import FedAvg
from lightning_fed.models import Backbones
from lightning_fed.nn.server_optimizers import DecayingOptimizer
from lightning_fed.options import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt


class FedAdagrad(FedAvg):
    r"""FedAvg whose server steps like Adagrad: :math:`v \leftarrow v + \Delta^2`, :math:`w \leftarrow w + \eta\, m / (\sqrt v +
    \tau)`.

    :math:`\Delta = \bar w - w` points to the clients' mean, and :math:`m` is its moving mean. Clients train and send as in
    FedAvg. Buffers are averaged. Monitored: accuracy after aggregation.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        server_lr: :math:`\eta`.
        beta_1: :math:`\beta_1` of the moving mean; 0 in the paper, 0.9 in FLamby.
        tau: :math:`\tau`; 1e-3 in the paper.
        initial_v: :math:`v` before the first round; None: :math:`\tau^2`.
        **kwargs: see :class:`.FederatedModule`.
    """

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        server_lr: PositiveFloat = 0.1,
        beta_1: ClosedUnitInterval = 0.0,
        tau: PositiveFloat = 1e-3,
        initial_v: NonNegativeFloat | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_given(type(self).__name__, kwargs, "server_optimizer", "its server has one of its own")
        super().__init__(backbone, num_classes, server_optimizer=ServerAdagrad(server_lr, beta_1, tau, initial_v), **kwargs)


class FedAdam(FedAvg):
    r"""FedAvg whose server steps like Adam: :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`, :math:`w \leftarrow w + \eta\,
    m / (\sqrt v + \tau)`.

    :math:`\Delta = \bar w - w` points to the clients' mean, and :math:`m` is its moving mean. Clients train and send as in
    FedAvg. Buffers are averaged. Monitored: accuracy after aggregation.

    Args:
        backbone: the network that every client trains.
        num_classes: number of classes; None: as many as the data have.
        server_lr: :math:`\eta`.
        beta_1: :math:`\beta_1` of the moving mean.
        beta_2: :math:`\beta_2`; 0.99 in the paper, 0.999 in TensorFlow Federated and FLamby.
        tau: :math:`\tau`; 1e-3 in the paper.
        initial_v: :math:`v` before the first round; None: :math:`\tau^2`.
        bias_correction: whether the rate is corrected as Keras' Adam does it, and the paper does not.
        **kwargs: see :class:`.FederatedModule`.
    """

    rule: type[DecayingOptimizer] = ServerAdam
    """What the server steps by."""

    def __init__(
        self,
        backbone: Backbones,
        num_classes: PositiveInt | None = None,
        server_lr: PositiveFloat = 0.1,
        beta_1: ClosedUnitInterval = 0.9,
        beta_2: ClosedUnitInterval = 0.99,
        tau: PositiveFloat = 1e-3,
        initial_v: NonNegativeFloat | None = None,
        bias_correction: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_given(type(self).__name__, kwargs, "server_optimizer", "its server has one of its own")
        optimizer = self.rule(server_lr, beta_1, tau, initial_v, beta_2, bias_correction)
        super().__init__(backbone, num_classes, server_optimizer=optimizer, **kwargs)


class FedYogi(FedAdam):
    r"""FedAvg whose server steps like Yogi: :math:`v \leftarrow v - (1 - \beta_2) \Delta^2 \,\mathrm{sign}(v - \Delta^2)`, :math:`w
    \leftarrow w + \eta\, m / (\sqrt v + \tau)`.

    As :class:`FedAdam`, with its arguments, but :math:`v` changes by :math:`(1 - \beta_2) \Delta^2` at most. Monitored: accuracy
    after aggregation.
    """

    rule = ServerYogi
