"""FedSA-LoRA (Guo, Zeng, Wang, Fan, Wang & Qu, ICLR 2025, https://arxiv.org/abs/2410.01463)."""

from pathlib import Path
from typing import Literal

from torch import nn

from lightning_fed.core import FederationError
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models.adapters import adapter_names


class FedSALoRA(LoRAModule):
    r"""One half of the adapter is shared: clients train A and B, the server averages A, and B stays with the client.

    A client's weights are :math:`W + s B_k A`. The head stays with the client, too, and so do all moments; what it has of its own
    is as its last turn left it, while A goes on without it. A client that never took part has a B of zeros, with which its network
    is the pretrained one whatever A is: ``fine_tuning`` tunes it before it is measured. Monitored: accuracy after aggregation, each
    client's model with the averaged A on its own test data.

    Updates are weighted by training examples, as in the authors' code. Arguments as in :class:`.LoRAModule`. The authors' runs on
    GLUE: 3 clients, SGD with lr 0.02, 10 steps of batches of 128, r 8, ``lora_alpha`` 16.
    """

    weighting: Literal["examples", "uniform"] = "examples"

    def shared_names(self) -> set[str]:
        """A alone."""
        return {f"backbone.{name}" for name in adapter_names(self.backbone, "A")}

    def trainable(self) -> list[nn.Parameter]:
        """A, B and the head."""
        return self.learning_parameters(self.backbone)

    def export_adapter(self, folder: Path, private: bool = True) -> None:
        """Write a client's adapter, see :class:`.LoRAModule`.

        Raises:
            FederationError: for the server's, which has no B.
        """
        refuse_half(private)
        super().export_adapter(folder, private)

    def export_merged(self, folder: Path, private: bool = True) -> None:
        """Write a client's network, see :class:`.LoRAModule`.

        Raises:
            FederationError: for the server's, which has no B.
        """
        refuse_half(private)
        super().export_merged(folder, private)


def refuse_half(private: bool) -> None:
    """Raise :class:`FederationError` if a model is asked for that has A alone."""
    if not private:
        raise FederationError("The server of FedSALoRA has A, and no B and no head: export a client's (--client 0).")
