"""Standalone: every client trains alone; the reference that a federation must beat."""

from lightning_fed.core import FederatedModule


class Standalone(FederatedModule):
    r"""Each client minimises the cross-entropy of its own data, :math:`\min_{w_k} L_k(w_k)`; nothing travels.

    For a fair comparison a client trains only in the rounds in which it is sampled, with the same local epochs. Clients may have
    different networks. Monitored: accuracy after aggregation, which here equals that before.
    """

    heterogeneous = True

    def shared_names(self) -> set[str]:
        """Nothing travels."""
        return set()
