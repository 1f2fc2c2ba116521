"""Generated texts of networks, which the data score together."""

from collections import defaultdict
from typing import Any

from torch import Tensor

from lightning_fed.data.batches import EXAMPLE
from lightning_fed.errors import FederationError
from lightning_fed.models.transformer import Transformer


class Answers:
    """Collects a network's answers over the batches of an evaluation."""

    def __init__(self) -> None:
        self._answers: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, network: Any, inputs: Any, targets: Tensor, prefix: str = "") -> None:
        """Add the answers to a batch, if the network generates texts.

        Args:
            network: the evaluated network.
            inputs: of the batch. A batch without the ids of its examples is not from data that can score texts.
            targets: of the batch.
            prefix: of the scores' names.
        """
        if not isinstance(network, Transformer) or isinstance(inputs, Tensor) or EXAMPLE not in inputs:
            return
        have = sum(len(numbers) for numbers, _ in self._answers.get(prefix, ()))
        left = None if network.answers_limit is None else network.answers_limit - have
        answers = network.predict(inputs, targets) if left is None or left > 0 else None
        if answers is not None:
            self._answers[prefix].append((inputs[EXAMPLE].cpu()[:left], answers.cpu()[:left]))

    def score(self, datamodule: Any) -> dict[str, float]:
        """The data's scores of all answers, by name; resets the answers for the next evaluation.

        Raises:
            FederationError: if these data cannot score texts.
        """
        answered, self._answers = self._answers, defaultdict(list)
        if answered and not hasattr(datamodule, "score"):
            raise FederationError("Texts are scored by the data: give the Trainer a datamodule that can, a client's.")
        return {f"{prefix}{name}": value for prefix, texts in answered.items() for name, value in datamodule.score(texts).items()}
