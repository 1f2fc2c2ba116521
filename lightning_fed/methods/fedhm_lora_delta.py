"""FedHM on adapters that averages the clients' changes instead of their adapters; see :mod:`.fedhm_delta`."""

from lightning_fed.methods.fedhm_delta import AddsChanges
from lightning_fed.methods.fedhm_lora import FedHMLoRA, FedHMLoRAServer


class FedHMLoRADeltaServer(AddsChanges, FedHMLoRAServer):
    """For adapters."""


class FedHMLoRADelta(FedHMLoRA):
    r"""FedHM-LoRA whose server averages the clients' changes: our extension, not the paper's method.

    FedHM-LoRA replaces the change :math:`\Delta W` of each adapted matrix by the mean of the products that come back,
    however much of it the ranks could hold. Here the server adds the changes of the round's participants:

    .. math:: \Delta W \leftarrow \Delta W + \sum_p a_p \left(B_p A_p - B_p^0 A_p^0\right)

    The head likewise. The part beyond a client's rank does not change, a round without any learning changes nothing, and a client
    of rank r moves a matrix by one of rank 2r at most. Arguments, weights and what travels are those of :class:`.FedHMLoRA`; see
    :class:`.FedHMDelta`.
    """

    server_class = FedHMLoRADeltaServer
