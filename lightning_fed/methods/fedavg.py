"""FedAvg (McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629), Algorithm 1."""

from lightning_fed.core import FederatedModule


class FedAvg(FederatedModule):
    r"""Participants train the server's model, and the server averages them weighted by examples, :math:`w \leftarrow \sum_{k \in S}
    (n_k / \sum_{j \in S} n_j) w_k`.

    All parameters and buffers travel, d floats down and d up; batch-norm statistics are averaged like parameters and
    ``num_batches_tracked`` takes the maximum. Monitored: accuracy after aggregation, the global model on each client's test data.
    Accuracy before aggregation is that of the locally trained models, a different quantity.
    """
