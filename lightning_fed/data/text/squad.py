"""The Stanford Question Answering Dataset."""

from pathlib import Path
from typing import Any, Literal

from lightning_fed.data.hub import load_from_hub
from lightning_fed.data.lines import existing
from lightning_fed.data.text.question_answering import Question, QuestionAnswering, read_questions
from lightning_fed.errors import require

HUB_NAMES = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}


class SQuAD(QuestionAnswering):
    """SQuAD 1.1 (Rajpurkar et al., EMNLP 2016) or 2.0 (Rajpurkar et al., ACL 2018), which adds unanswerable questions.

    The development set has other topics (articles) than the 442 of the training set. With ``split: pooled`` it is therefore left
    out: the training set is partitioned and divided, as in PF2LoRA's experiments (``test_share: 0.2``, ``val_share: 0``). With
    ``split: official`` it is the test set; since no client can hold the same topics in both, this only works with ``IID``.

    Args:
        version: version of SQuAD.
        root: folder with ``train-v1.1.json`` and ``dev-v1.1.json``, or the same of v2.0. None: download rajpurkar/squad or
            rajpurkar/squad_v2 from the Hugging Face hub.
        **kwargs: see :class:`QuestionAnswering`.
    """

    def __init__(self, version: Literal["1.1", "2.0"], root: str | None = None, **kwargs: Any) -> None:
        require(version in HUB_NAMES, f"Got version={version!r}: give one of {', '.join(map(repr, HUB_NAMES))}.")
        super().__init__(allow_unanswerable=version == "2.0", **kwargs)
        self.version = version
        self.root = root

    def questions(self) -> tuple[list[Question], list[Question]]:
        """Training set and, if needed, development set."""
        read = self._from_hub if self.root is None else self._from_file
        return read("train"), read("dev") if self.split == "official" else []

    def _from_file(self, part: str) -> list[Question]:
        assert self.root is not None
        name = f"{part}-v{self.version}.json"
        folder = f"the folder that has train-v{self.version}.json and dev-v{self.version}.json"
        remedy = f"set --data.init_args.root to {folder}, or leave it out to download them"
        return read_questions(existing(Path(self.root, name), remedy))

    def _from_hub(self, part: str) -> list[Question]:
        rows = load_from_hub(HUB_NAMES[self.version], extra="nlp")["validation" if part == "dev" else part]
        return [
            Question(
                row["id"],
                row["title"],
                row["question"],
                row["context"],
                tuple(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
            )
            for row in rows
        ]
