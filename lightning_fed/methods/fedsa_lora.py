"""FedSA-LoRA (Guo, Zeng, Wang, Fan, Wang & Qu, ICLR 2025, https://arxiv.org/abs/2410.01463)."""

from typing import Literal

from torch import nn

from lightning_fed.core import FederationError
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models.adapters import adapter_names


class FedSALoRA(LoRAModule):
    r"""Clients train both factors of a LoRA adapter, of which the server averages only A, and B stays with the client.

    A client's weights are :math:`W + s B_k A`. The head and all moments stay with the client, too. This private state does not
    change between the client's turns, while A does. A client that never took part has a B of zeros, so that its network
    is the pretrained one whatever A is: ``fine_tuning`` tunes it before an evaluation. Embeddings, whose B is random at
    first, are refused. Monitored: accuracy after aggregation, of each client's model with the averaged A on its own test data.

    Updates are weighted by training examples, as in the authors' code. Arguments as in :class:`.LoRAModule`. The authors' runs on
    GLUE: 3 clients, SGD with lr 0.02, 10 steps of batches of 128, r 8, ``lora_alpha`` 16.
    """

    weighting: Literal["examples", "uniform"] = "examples"

    def attach(self) -> None:
        """Add the adapter, not to embeddings."""
        super().attach()
        self.refuse_embeddings("averages A alone")

    def shared_names(self) -> set[str]:
        """Names in A only."""
        return {f"backbone.{name}" for name in adapter_names(self.backbone, "A")}

    def trainable(self) -> list[nn.Parameter]:
        """A, B and the head."""
        return self.learning_parameters(self.backbone)

    def _acting(self, private: bool = True) -> list[str]:
        """The client's adapter. Raises :class:`FederationError` for the server's, which cannot be exported."""
        if not private:
            raise FederationError("The server of FedSALoRA has A, and no B and no head: export a client's (--client 0).")
        return super()._acting(private)
