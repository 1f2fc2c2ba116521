"""HOMLoRA: federated averaging of a LoRA adapter, the baseline of HETLoRA (Cho et al. 2024) and PF2LoRA (Hao et al. 2025)."""

from lightning_fed.methods.families.lora import LoRAModule


class HOMLoRA(LoRAModule):
    r"""All clients train one LoRA adapter of one rank, and the server averages A and B separately, with equal weights.

    The mean of the factors is not the factors of the mean: :math:`\bar B \bar A \ne \overline{BA}`, and the gap grows with
    ``steps``. Monitored: accuracy after aggregation, of the averaged adapter on each client's test data. Arguments as in
    :class:`.LoRAModule`. The paper: r 8 (GPT-2: 4), 10 steps, AdamW with lr 1e-3 (SST-2: 2e-3), batch size 16.
    """
