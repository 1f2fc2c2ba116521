"""Extractive question answering: questions that are tokenized once for all clients."""

import json
import string
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics.functional.text import squad

from lightning_fed.data.batches import EXAMPLE, TARGETS
from lightning_fed.data.federated import FederatedDataModule, Pools, pools_of
from lightning_fed.data.lines import existing
from lightning_fed.data.paths import refuse_shared
from lightning_fed.data.text.classification import CHUNK, concatenated, load_tokenizer
from lightning_fed.errors import FederationError, one_line, require
from lightning_fed.options import NonNegativeInt, PositiveInt, require_from

OFFSETS = "offsets"
"""Name, among the inputs, of each token's first character in the context and the one after its last, shape (N, L, 2): 0 and 0 for
tokens outside the context. Networks do not get it.
"""


class Question(NamedTuple):
    """A question about a text.

    Args:
        id: name of the question in errors.
        topic: title of the article that the text is from.
        question: the question.
        context: the text.
        answers: correct answers, each with the position of its first character in the context; empty if it is unanswerable.
    """

    id: str
    topic: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


class QuestionAnswering(FederatedDataModule):
    """Extractive question answering as in SQuAD. A dataset overrides :meth:`questions`.

    A row is a window with a question and a part of its context: a context that is too long has several windows, which overlap.
    Windows of one question stay together. Sizes of clients count windows. Labels, by which the data are partitioned, are topics.

    A network gets the tokenizer's output, as in :class:`TextClassification`, the number of the question and :data:`OFFSETS`.
    Targets ``(B, 2)`` are the first and the last token of the question's first answer, or 0 and 0, the CLS token, if the window
    does not contain the whole answer.

    Args:
        tokenizer: folder or name on the Hugging Face hub, of a tokenizer or the model that it belongs to.
        max_length: number of tokens of a window. 384 is the default of the SQuAD scripts of transformers.
        stride: number of context tokens that a window shares with the previous one. 128 is the default of these scripts.
        allow_unanswerable: whether questions may be unanswerable. No answer is then predicted if the lowest null score of the
            question's windows is above the score of its best span.
        **kwargs: see :class:`FederatedDataModule`.
    """

    num_classes = 2
    predicts_labels = False

    def __init__(
        self,
        tokenizer: str,
        max_length: PositiveInt = 384,
        stride: NonNegativeInt = 128,
        allow_unanswerable: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(augment="none", **kwargs)
        require_from(1, max_length=max_length)
        require_from(0, stride=stride)
        self.tokenizer = tokenizer
        self.max_length: int = max_length
        self.stride: int = stride
        self.allow_unanswerable = allow_unanswerable
        self._questions: list[Question] = []
        self._topics: list[str] = []

    def questions(self) -> tuple[list[Question], list[Question]]:
        """The questions of the training set and of the test set, which may be empty."""
        raise NotImplementedError(f"{type(self).__name__} must override questions().")

    @property
    def num_labels(self) -> int:
        if not self._topics:
            self._loaded()
        return len(self._topics)

    def load(self) -> Pools:
        """Windows ``(N, L)`` and topics of both sets; L is the length of the longest window of all."""
        train, test = self.questions()
        require(len(train) > 0, f"{type(self).__name__} has no questions to train on: give at least one per client.")
        self._questions = [self._checked(question) for question in train + test]
        self._topics = list(dict.fromkeys(question.topic for question in self._questions))
        numbers = {topic: number for number, topic in enumerate(self._topics)}
        inputs = self._encode(load_tokenizer(self.tokenizer))
        labels = torch.tensor([numbers[question.topic] for question in self._questions])[inputs[EXAMPLE]]
        return pools_of(inputs, labels, int((inputs[EXAMPLE] < len(train)).sum()))

    def score(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Exact match and F1 of the questions, each between 0 and 1, by SQuAD's official definitions (as in torchmetrics, where
        they are percentages): after normalization, against the closest correct answer. Unlike in the script of SQuAD 1.1, an answer
        and a prediction of which normalization leaves nothing ("the") agree.

        If questions may be unanswerable, also ``has_answer_…`` and ``no_answer_…`` for questions with and without answers.

        Args:
            answers: for each batch, the numbers of its questions, ``(B,)``, and what :class:`lightning_fed.models.TransformerQA`
                predicts for its windows, ``(B, 4)``.
        """
        windows: dict[int, list[list[float]]] = defaultdict(list)
        for examples, spans in answers:
            for number, span in zip(examples.tolist(), spans.tolist(), strict=True):
                windows[number].append(span)
        kinds = {"": list(windows)}
        if self.allow_unanswerable:
            kinds["has_answer_"] = [number for number in windows if self._questions[number].answers]
            kinds["no_answer_"] = [number for number in windows if not self._questions[number].answers]
        scores: dict[str, float] = {}
        for kind, numbers in kinds.items():
            predicted: Any = [{"id": n, "prediction_text": self._answer(n, windows[n])} for n in numbers]
            right: Any = [{"id": n, "answers": {"text": self._right(n)}} for n in numbers]
            if numbers:
                scores |= {f"{kind}{name}": value.item() / 100 for name, value in squad(predicted, right).items()}
        return scores

    def _right(self, number: int) -> list[str]:
        """The texts that a prediction is compared with. As in the official script of SQuAD 2.0, the empty text is correct for an
        unanswerable question. Answers that normalization makes empty ("the") do not count beside others, because an empty
        prediction would then be correct.
        """
        texts = [text for text, _ in self._questions[number].answers]
        return ([text for text in texts if says_something(text)] or [""]) if self.allow_unanswerable else texts

    def _answer(self, number: int, windows: list[list[float]]) -> str:
        """The text of the best span of a question's windows, the first if several are equal; empty if there is none."""
        first, end, score, _ = max(windows, key=lambda window: window[2])
        if self.allow_unanswerable and min(null for *_, null in windows) > score:
            return ""
        return self._questions[number].context[int(first) : int(end)].strip()

    def _checked(self, question: Question) -> Question:
        require(
            bool(question.answers) or self.allow_unanswerable,
            f"Question {question.id} has no answer: set allow_unanswerable to true, or leave such questions out.",
        )
        for text, start in question.answers:
            require(
                bool(text.strip()) and start >= 0 and question.context.startswith(text, start),
                f"Question {question.id} has the answer {text!r}, which is not at character {start} of its context: correct it.",
            )
        return question

    def _encode(self, tokenizer: Any) -> dict[str, Tensor]:
        chunks = []
        for start in range(0, len(self._questions), CHUNK):
            chunk = self._questions[start : start + CHUNK]
            self._check_room(tokenizer, chunk)
            windows = tokenizer(
                [question.question.strip() for question in chunk],
                [question.context for question in chunk],
                truncation="only_second",
                max_length=self.max_length,
                stride=self.stride,
                padding=True,
                padding_side="right",
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
                return_tensors="pt",
            )
            columns = dict(windows)
            of_context = [[text == 1 for text in windows.sequence_ids(row)] for row in range(len(columns["input_ids"]))]
            offsets = columns.pop("offset_mapping") * torch.tensor(of_context)[..., None]
            example = columns.pop("overflow_to_sample_mapping")
            answers = torch.tensor([characters_of_answer(question) for question in chunk])[example]
            own = {OFFSETS: offsets.int(), EXAMPLE: example + start, TARGETS: tokens_of_answer(offsets, answers)}
            chunks.append(columns | own)
        return concatenated(chunks, tokenizer)

    def _check_room(self, tokenizer: Any, questions: list[Question]) -> None:
        """Refuse questions that leave too little of a window for their contexts."""
        special = tokenizer.num_special_tokens_to_add(pair=True)
        tokens = tokenizer([question.question.strip() for question in questions], add_special_tokens=False)["input_ids"]
        for question, ids in zip(questions, tokens, strict=True):
            room = self.max_length - special - len(ids)
            require(
                room > self.stride,
                f"Question {question.id} has {len(ids)} tokens and leaves {max(room, 0)} of max_length={self.max_length} for its "
                f"context, expected more than stride={self.stride}: raise max_length or lower stride.",
            )


class QuestionFiles(QuestionAnswering):
    """Questions in JSON files with SQuAD's schema (version 1.1 or 2.0).

    Args:
        path: the training set.
        test_path: an official test set, if there is one.
        **kwargs: see :class:`QuestionAnswering`.
    """

    def __init__(self, path: str, test_path: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.test_path = test_path

    def questions(self) -> tuple[list[Question], list[Question]]:
        remedy = "check --data.init_args.path and test_path"
        files = [existing(path, remedy) for path in (self.path, self.test_path) if path is not None]
        refuse_shared(files[:1], files[1:])
        return read_questions(files[0]), [question for file in files[1:] for question in read_questions(file)]


def says_something(answer: str) -> bool:
    """Whether anything is left of an answer without punctuation and articles, as the official scripts normalize it."""
    words = "".join(letter for letter in answer.lower() if letter not in string.punctuation).split()
    return any(word not in ("a", "an", "the") for word in words)


def read_questions(path: Path) -> list[Question]:
    """The questions of a file with SQuAD's schema."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # invalid UTF-8 and invalid JSON are ValueErrors
        raise FederationError(f"{path} is not JSON in UTF-8 ({one_line(error)}): expected SQuAD's schema.") from error
    questions = []
    for i, article in enumerate(_field(content, "data", list, str(path))):
        in_article = f"{path}, article {i}"
        topic = _field(article, "title", str, in_article)
        for j, paragraph in enumerate(_field(article, "paragraphs", list, in_article)):
            in_paragraph = f"{in_article}, paragraph {j}"
            context = _field(paragraph, "context", str, in_paragraph)
            for k, qa in enumerate(_field(paragraph, "qas", list, in_paragraph)):
                where = f"{in_paragraph}, question {k}"
                marked = isinstance(qa, dict) and qa.get("is_impossible") is not None
                impossible = marked and _field(qa, "is_impossible", bool, where)
                given = [] if impossible else _field(qa, "answers", list, where)
                answers = tuple((_field(one, "text", str, where), _field(one, "answer_start", int, where)) for one in given)
                questions.append(
                    Question(_field(qa, "id", str, where), topic, _field(qa, "question", str, where), context, answers)
                )
    return questions


def _called(value: Any) -> str:
    return KINDS.get(type(value), type(value).__name__)


KINDS = {list: "a list", str: "a text", int: "a whole number", bool: "true or false"}
"""Types of the schema's fields, for errors."""


def _field(of: Any, name: str, kind: type, where: str) -> Any:
    """A field of an object, if it exists and has the expected type."""
    require(isinstance(of, dict), f"{where} is {_called(of)}, which is not SQuAD's schema: expected an object with {name}.")
    value = of.get(name)
    if type(value) is kind:  # True is not an int here
        return value
    got = f"is {value!r:.40}" if name in of else "is missing"
    raise FederationError(f"{where}: {name!r} {got}, which is not SQuAD's schema: expected {KINDS[kind]}.")


def characters_of_answer(question: Question) -> tuple[int, int]:
    """Start and end of a question's first answer in its context, without surrounding white space; 0 and 0 without an answer."""
    if not question.answers:
        return 0, 0
    text, start = question.answers[0]
    return start + len(text) - len(text.lstrip()), start + len(text.rstrip())


def tokens_of_answer(offsets: Tensor, answers: Tensor) -> Tensor:
    """First and last token of the answer in each window, ``(B, 2)``: those that contain its characters. 0 and 0 if the window does
    not contain the whole answer. ``offsets`` are :data:`OFFSETS`, ``(B, L, 2)``; ``answers`` the first character and the one after
    the last, ``(B, 2)``, 0 and 0 without an answer.
    """
    begins, ends = offsets.unbind(dim=-1)
    first, end = answers[:, :1], answers[:, 1:]
    context = ends > begins
    touched = context & (ends > first) & (begins < end)  # a token may start with the blank before its word
    whole = touched.any(dim=1) & (context & (begins <= first)).any(dim=1) & (ends >= end).any(dim=1)
    last = touched.shape[1] - 1 - touched.flip(1).int().argmax(dim=1)
    return torch.stack([touched.int().argmax(dim=1), last], dim=1) * whole[:, None]
