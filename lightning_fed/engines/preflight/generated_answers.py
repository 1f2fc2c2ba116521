"""Checks of text generation: whether the data have answers, whether generation stops where answers end, and whether they fit."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import ClientDataModule, FederatedDataModule, Instructions
from lightning_fed.data.batches import EXAMPLE
from lightning_fed.data.text.generation import IGNORED, TextGeneration
from lightning_fed.errors import FederationError
from lightning_fed.models import CausalLM, TransformerLM

log = logging.getLogger(__name__)


def check_generation(template: FederatedModule, data: FederatedDataModule) -> None:
    """Refuse generated answers without reference answers, and warn if generation continues past the learned end of answers."""
    network: Any = template.predictor
    if not isinstance(network, TransformerLM) or network.answers_limit == 0 or not isinstance(data, Instructions | TextGeneration):
        return
    if isinstance(data, Instructions) and data.learn == "all":
        raise FederationError("generate_examples needs answers, but learn=all trains on whole rows: set learn to answers.")
    end, stops = data.end_token, network.end_tokens
    if end is not None and end not in stops:
        option, value = ("end_token_ids", [end, *stops]) if isinstance(network, CausalLM) else ("eos_token_id in its config", end)
        log.warning(
            f"Answers are learned to end with token {end}, but generation only stops at {', '.join(map(str, stops)) or 'none'}: "
            f"set {option} to {value} to stop at the end of answers."
        )


def refuse_long_prompts(template: FederatedModule, clients: Iterable[ClientDataModule], validates: bool) -> None:
    """Refuse prompts that leave no room for their answers in the network's positions, before any round is trained.

    Args:
        template: the method, with its networks.
        clients: the data that are measured.
        validates: whether validation data are measured, too.
    """
    network: Any = template.predictor
    if not isinstance(network, TransformerLM):
        return
    for client in clients:
        for rows in client.splits[1 if validates else 2 :]:
            batches = rows.split(client.eval_batch_size)
            limit = network.answers_limit
            wanted = None if limit is None else -(-limit // client.eval_batch_size)  # a batch is generated whole
            for batch in batches[:wanted]:
                inputs, targets = client.data[batch]
                if len(batch) and not isinstance(inputs, Tensor) and EXAMPLE in inputs:  # else nothing is generated
                    mask = inputs.get("attention_mask", torch.ones_like(targets))
                    starts = mask.int().argmax(dim=1)  # of rows that are padded on the left
                    lengths = (targets != IGNORED).int().argmax(dim=1) + 1 - starts
                    network.check_room(int(lengths.max()))
