"""LG-FedAvg (Liang et al. 2020, https://arxiv.org/abs/2001.01523)."""

from lightning_fed.module import FederatedModule


class LGFedAvg(FederatedModule):
    """Clients keep their own feature extractor, of any architecture, and share the classifier on top.

    Everything is trained together, for ``epochs`` epochs; the head travels and is averaged with equal weights, as in the authors'
    code. That code names the shared layers by their position and so, for its CIFAR network, shares the convolutions instead; here
    it is the head, as the paper says. The authors start from a model that FedAvg trained; this starts from scratch, as the
    comparisons of later papers do. Headline: accuracy after aggregation.
    """

    heterogeneous = True
    weighting = "uniform"

    def shared_names(self) -> set[str]:
        """The head."""
        return super().shared_names() & {f"backbone.{name}" for name in self.backbone.head_names()}
