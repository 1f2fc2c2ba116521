"""FedPer (Arivazhagan et al. 2019, https://arxiv.org/abs/1912.00818)."""

from lightning_fed.module import FederatedModule


class FedPer(FederatedModule):
    """Federated averaging whose clients keep their classifier.

    Base and head are trained together, for ``epochs`` epochs; the base travels, weighted by training examples, the head stays. The
    paper also keeps the last residual blocks; here, as in most comparisons, the head alone. FedRep trains the two one after the
    other; LG-FedAvg shares the other half. Headline: accuracy after aggregation, the fresh base under the client's own head.
    """

    def shared_names(self) -> set[str]:
        """All but the head."""
        return super().shared_names() - {f"backbone.{name}" for name in self.backbone.head_names()}
