"""Networks of the transformers library that answer questions with a span of a text."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_fed.data.batches import EXAMPLE
from lightning_fed.data.text.question_answering import OFFSETS
from lightning_fed.errors import FederationError
from lightning_fed.models.transformer import Inputs, Model, Transformer
from lightning_fed.options import PositiveInt, require_from


class TransformerQA(Transformer):
    """Extractive question answering: a pretrained body, and a new head that scores each token as the start or end of an answer.

    Args:
        num_classes: 2, start and end; the command line reads it from the data.
        max_answer_length: longest answer in tokens. 30 is the default of the SQuAD scripts of transformers.
    """

    auto_class = "AutoModelForQuestionAnswering"
    measures = ("f1", "exact_match")

    def __init__(
        self,
        num_classes: PositiveInt = 2,
        name: Model | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
        max_answer_length: PositiveInt = 30,
    ) -> None:
        if num_classes != 2:
            raise FederationError(f"TransformerQA got num_classes={num_classes}, but a span has 2, start and end: give 2.")
        require_from(1, max_answer_length=max_answer_length)
        super().__init__(name, config, attention, num_labels=num_classes)
        self.max_answer_length = max_answer_length

    def targets_of(self, inputs: dict[str, Tensor]) -> Tensor:
        """The first and the last token of the answer, ``(B, 2)``."""
        return torch.stack([inputs.pop("start_positions"), inputs.pop("end_positions")], dim=1)

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits of start and end ``(B, L, 2)``: the classes of either are the L tokens. As in transformers, padding and the
        question are among them.
        """
        outputs = self.network(**{name: tensor for name, tensor in inputs.items() if name not in (EXAMPLE, OFFSETS)})
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)

    def predict(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """The best span of each window, ``(B, 4)``: its first character, the one after its last, its score, and the null score.

        A span's score is the sum of the logits of its start and its end; the null score is that of the first token (CLS). Among
        equals the first span wins.
        """
        logits, offsets = self(inputs).float(), inputs[OFFSETS]
        null = logits[:, 0].sum(dim=1)
        begins, ends = offsets.unbind(dim=-1)
        start, end = logits.masked_fill((ends == begins)[..., None], -torch.inf).unbind(dim=-1)  # only in the context
        reach = min(self.max_answer_length, end.shape[1])
        following = pad(end, (0, reach - 1), value=-torch.inf).unfold(1, reach, 1)
        score, best = (start[:, :, None] + following).flatten(1).max(dim=1)  # of (B, L, reach)
        first, last = best // reach, best // reach + best % reach
        characters = [begins.gather(1, first[:, None])[:, 0], ends.gather(1, last[:, None])[:, 0]]
        return torch.stack([*characters, score, null], dim=1)
