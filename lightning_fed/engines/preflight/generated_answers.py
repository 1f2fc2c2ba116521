"""Checks of text generation: whether the data have answers, and whether generation stops where answers end."""

import logging
from typing import Any

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule, Instructions
from lightning_fed.errors import FederationError
from lightning_fed.models import CausalLM

log = logging.getLogger(__name__)


def check_generation(template: FederatedModule, data: FederatedDataModule) -> None:
    """Refuse generated answers without reference answers, and warn if generation continues past the learned end of answers."""
    network: Any = template.predictor
    if not isinstance(network, CausalLM) or not network.answers_limit or not isinstance(data, Instructions):
        return
    if data.learn == "all":
        raise FederationError("generate_examples needs answers, but learn=all trains on whole rows: set learn to answers.")
    end, stops = data.end_token, network.end_tokens
    if end is not None and end not in stops:
        log.warning(
            f"Answers are learned to end with token {end}, but generation only stops at {', '.join(map(str, stops)) or 'none'}: "
            f"set end_token_ids to {[end, *stops]} to stop at the end of answers."
        )
