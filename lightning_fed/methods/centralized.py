"""Centralised training: the reference with all data in one place."""

from lightning_fed.core import FederatedModule


class Centralized(FederatedModule):
    r"""One network, trained on the pooled data of all clients, :math:`\min_w \sum_k L_k(w)`; nothing travels.

    A round is ``epochs`` epochs, or ``steps`` steps, on the pooled training data, in batches of ``batch_size``. It is evaluated on
    each client's test data (``after/…``) and on those of all clients (``global/…``). Monitored: the former.
    """

    centralized = True
