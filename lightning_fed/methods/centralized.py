"""Centralised training: the reference of all whose data could be in one place."""

from lightning_fed.core import FederatedModule


class Centralized(FederatedModule):
    r"""One network, trained on everybody's data pooled, :math:`\min_w \sum_k L_k(w)`; nothing travels.

    A round is ``epochs`` epochs, or ``steps`` steps, of the pooled training data, in batches of ``batch_size``. It is measured on
    each client's test data (``after/…``) and on everybody's (``global/…``). Monitored: the former.
    """

    centralized = True
