"""Answers that are generated in vain: where the data do not say what an answer is, or where its learned end stops nobody."""

import logging
from typing import Any

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule, Instructions
from lightning_fed.errors import FederationError
from lightning_fed.models import CausalLM

log = logging.getLogger(__name__)


def check_generation(template: FederatedModule, data: FederatedDataModule) -> None:
    """Refuse answers that nothing can be compared with, and warn where generation goes on behind the end that is learned."""
    network: Any = template.predictor
    if not isinstance(network, CausalLM) or not network.answers_limit or not isinstance(data, Instructions):
        return
    if data.learn == "all":
        raise FederationError("generate_examples asks for answers, but with learn: all a row is no answer: set learn to answers.")
    end, stops = data.end_token, network.end_tokens
    if end is not None and end not in stops:
        log.warning(
            f"Answers are learned to end with token {end}, but generation stops with {', '.join(map(str, stops)) or 'none'} alone: "
            f"to save what is generated in vain, set end_token_ids to {[end, *stops]}."
        )
