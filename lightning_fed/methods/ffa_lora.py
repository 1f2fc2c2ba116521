"""FFA-LoRA (Sun, Li, Li & Ding, ICLR 2024, https://arxiv.org/abs/2403.12313)."""

from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models.adapters import adapter_names


class FFALoRA(LoRAModule):
    r"""Federated LoRA with a fixed random A, the same for all clients, who train only B.

    The server averages B, with equal weights. With one A for all, the mean of the factors is the mean of the products,
    :math:`\sum p_k B_k A = \bar B A`: averaging is exact, in every round. A comes from the run's seed and does not travel.

    Step size and scale are one hyperparameter: with s replaced by cs and the learning rate by :math:`lr / c^2` gradient descent
    takes the same steps. The best rate differs from HOMLoRA's. Monitored: accuracy after aggregation. Arguments as in
    :class:`.LoRAModule`.
    """

    def build(self) -> None:
        """Build the network with its adapter, and freeze A."""
        super().build()
        self.refuse_embeddings("keeps A")
        for name in adapter_names(self.backbone, "A"):
            self.backbone.get_parameter(name).requires_grad_(False)
