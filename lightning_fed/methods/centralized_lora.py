"""Centralised LoRA: the reference of federated fine-tuning."""

from lightning_fed.methods.families.lora import LoRAModule


class CentralizedLoRA(LoRAModule):
    """One LoRA adapter, trained on the pooled data of all clients; nothing travels.

    A round is ``steps`` steps on batches from all clients' training data, so that with equal rounds, steps and batch size it
    takes as many steps as one client of a federated method, not as all of them together. It is evaluated on each client's test
    data (``after/…``) and on those of all clients (``global/…``). Monitored: the former. Arguments as in
    :class:`lightning_fed.methods.families.lora.LoRAModule`.
    PF2LoRA's paper: AdamW with lr 1e-3 (SQuAD v2: 5e-4).
    """

    centralized = True
