"""FedAvg (McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629), Algorithm 1."""

from lightning_fed.errors import FederationError
from lightning_fed.module import FederatedModule
from lightning_fed.server import Server


class FedAvg(FederatedModule):
    r"""Everybody trains the server's model, which becomes their example-weighted mean, :math:`w \leftarrow \sum_{k \in S} (n_k /
    \sum_{j \in S} n_j) w_k`.

    All parameters and buffers travel, d floats down and d up; batch-norm statistics are averaged like parameters and
    ``num_batches_tracked`` takes the maximum. Headline: accuracy after aggregation, the global model on each client's test data.
    Before aggregation stands the locally updated model, which is a different quantity.
    """

    def configure_server(self) -> Server:
        """The average; refuses a list of networks, which have no mean."""
        if len(self.backbone_factories) > 1:
            raise FederationError(
                f"FedAvg got {len(self.backbone_factories)} different backbones: their weights cannot be averaged. Give one "
                "backbone, or use a method for heterogeneous models (PFedLoRA, Standalone)."
            )
        return super().configure_server()
