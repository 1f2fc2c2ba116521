"""Instructions and their answers, for causal language models."""

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from lightning_fed.data.batches import BatchTransform
from lightning_fed.data.files.columns import FILE
from lightning_fed.data.files.records import Record, files_of, read_records
from lightning_fed.data.files.table import Table, TableData
from lightning_fed.data.partition.base import IID, Partitioner
from lightning_fed.data.partition.natural import ByColumn
from lightning_fed.data.paths import refuse_shared
from lightning_fed.data.text.chat import ChatTemplate, Learn
from lightning_fed.data.text.classification import load_tokenizer
from lightning_fed.data.text.conversations import Columns, Conversation, conversation_of
from lightning_fed.data.text.exact_match import ends_with_number, is_exact
from lightning_fed.data.text.scores import Score, check_scores, score_texts
from lightning_fed.data.text.token_rows import Packing, TokenRows, write_rows
from lightning_fed.errors import FederationError, require
from lightning_fed.options import PositiveInt, require_from

log = logging.getLogger(__name__)

AnswerScore = Literal["exact_match", "last_number", "rouge_l"]

FORMAT = 1
"""Version of the cache; raise it when the same records give other rows."""


class Instructions(TableData):
    """Instructions with answers, for a causal language model: JSON Lines, JSON or Parquet files, or a dataset of the Hugging Face
    library.

    A record has ``messages`` (or ShareGPT's ``conversations``), ``prompt`` and ``completion`` (texts, without a template, or
    messages), or ``instruction``, ``input`` and ``output``; or ``columns`` names the columns of messages. Beside messages or an
    instruction, a field ``system`` is the system's message. A field ``tools`` (JSON schemas of functions, as a list or in JSON) and
    the variables in ``chat_template_kwargs`` go to the template. The chat template formats conversations, which are tokenized once
    per machine, into the user's cache folder (``XDG_CACHE_HOME``). The model is trained on what the template marks by
    ``{% generation %}``; without marks, on what the template writes after the prompt. When a run starts, the trained text of the
    first row is printed.

    A network gets ``input_ids`` and ``attention_mask`` ``(B, L)``, padded to the batch's longest row. The targets ``(B, L)`` are
    shifted: that of a token is the next one if it is trained.

    Args:
        path: a file, a folder of files, a pattern of their names (``train_*.json``, ``*/train.json``), a folder that
            ``save_to_disk`` wrote, or a name on the hub, ``owner/name``. A dataset's own sets are used.
        tokenizer: folder or name on the hub, of a tokenizer or the model that it belongs to.
        test_path: an official test set, in the same form; for a name on the hub, its test set.
        columns: column of each role's message, in order; several are joined by a blank line: ``{user: question, assistant:
            answer}``.
        template: chat template: ``chatml``, ``alpaca``, ``plain``, a file, or the template itself. None: the tokenizer's.
        template_variables: further variables of the template, such as ``{enable_thinking: false}``, or ``{date_string: 26 Jul
            2024}`` if it would otherwise write the current day.
        learn: what is trained: all answers, the last one, or everything.
        max_length: maximum number of tokens of a row.
        overlong: what to do with longer rows: ``cut`` removes their end and leaves out rows without anything left to train on,
            ``drop`` leaves all of them out, ``refuse`` names the first. Their number is printed.
        remove: pattern of what is removed from all texts; ``<<.*?>>`` are the calculations in GSM8K's answers.
        padding: side on which rows are padded. A network that takes padding on the left for text is refused.
        packing: whether the rows of a training batch are concatenated without padding. Attention keeps them apart; a network that
            does not is refused.
        metrics: scores of generated answers, if a network generates: ``exact_match`` and ``last_number``, see
            :mod:`lightning_fed.data.text.exact_match`, and ``rouge_l`` (of the extra ``nlp``). An answer is compared with the first
            one of its row.
        label: column by whose values a partition divides the data, such as a task. None: all records have the same label.
        client: see :class:`TableData`; ``file``: each file is a client.
        config: configuration in which ``path`` is read, if it is a hub dataset with several.
        partition: see :class:`FederatedDataModule`; default :class:`IID`.
        **kwargs: see :class:`TableData`.
    """

    predicts_labels = False

    def __init__(
        self,
        path: str,
        tokenizer: str,
        test_path: str | None = None,
        columns: Columns | None = None,
        template: str | None = None,
        template_variables: dict[str, Any] | None = None,
        learn: Learn = "answers",
        max_length: PositiveInt = 1024,
        overlong: Literal["cut", "drop", "refuse"] = "cut",
        remove: str | None = None,
        padding: Literal["right", "left"] = "right",
        packing: bool = False,
        metrics: Sequence[AnswerScore] = ("exact_match",),
        label: str | None = None,
        client: str | None = None,
        config: str | None = None,
        partition: Partitioner | None = None,
        eval_batch_size: PositiveInt = 16,
        **kwargs: Any,
    ) -> None:
        partition = IID() if client is None and partition is None else partition
        super().__init__(client=client, partition=partition, eval_batch_size=eval_batch_size, augment="none", **kwargs)
        require_from(2, max_length=max_length)
        check_scores([name for name in metrics if name == "rouge_l"])
        self.path, self.test_path = path, test_path
        self.tokenizer = tokenizer
        self.columns = columns
        self.template = template
        self.template_variables = template_variables or {}
        self.learn: Learn = learn
        self.max_length: int = max_length
        self.overlong = overlong
        self.remove = remove
        self.padding: Literal["right", "left"] = padding
        self.packing = packing
        self.metrics = metrics
        self.label = label
        self.config = config
        self._rows: TokenRows | None = None  # of all records

    @property
    def num_labels(self) -> int:
        return super().num_classes

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """A language model has no classes, but every network is given a number."""
        return 1

    def read(self) -> Table:
        if self.test_path is not None:
            refuse_shared(files_of(self.path) or (), files_of(self.test_path) or ())
        records = [*read_records(self.path, None if self.test_path is None else "train", self.config)]
        records += [] if self.test_path is None else read_records(self.test_path, "test")
        require(len(records) > 0, f"{self.path} has no records: give at least two per client, one to train and one to test on.")
        _check_column(records, self.label, "label")
        _check_column(records, self.owner_column, "client")
        rows = self._tokenised(records)
        remaining = [records[number] for number in rows.parts["records"]]
        names = dict.fromkeys(name for record in records for name, value in record.fields.items() if isinstance(value, str | int))
        columns = {name: np.array([record.fields.get(name) for record in remaining], dtype=object) for name in names}
        self._refuse_empty_clients(records, remaining)
        require(
            self.label is None or self.label in columns,
            f"{self.path} has the columns {', '.join(names)}, but no label {self.label!r}.",
        )
        labels = np.zeros(len(remaining), np.int64) if self.label is None else columns[self.label].astype(str)
        sets = None if records[0].role is None else np.array([record.role for record in remaining])
        self._print_first(rows, records)
        return Table(rows, labels, columns, sets, ["row"] if self.label is None else None)

    def score(self, answers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Scores of generated answers, by name: the share of correct answers, and ROUGE-L of
        :func:`lightning_fed.data.text.scores.score_texts`.

        An answer ends with the token that was trained as its end, even if generation continued. Answers whose reference lost its
        end to ``max_length`` are not scored; NaN if that applies to all.

        Args:
            answers: for each batch, the numbers of its rows, ``(B,)``, and token ids, ``(B, T)``.
        """
        assert self._rows is not None  # the data are loaded
        rows = self._rows
        both = [pair for numbers, some in answers for pair in zip(numbers.tolist(), some.tolist(), strict=True)]
        whole = [(answer, rows.answer(number)) for number, answer in both if not rows.is_answer_cut(number)]
        if not whole:
            return dict.fromkeys(self.metrics, math.nan)
        references = [reference for _, reference in whole]
        ends = {self._end_of(reference) for reference in references}
        ids = [list(takewhile(lambda token: token not in ends, answer)) for answer, _ in whole]
        expected = self._tokenizer.batch_decode(references, skip_special_tokens=True)
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        pairs = [(text.strip(), reference.strip()) for text, reference in zip(texts, expected, strict=True)]
        right = {"exact_match": is_exact, "last_number": ends_with_number}
        shares = {name: sum(right[name](*pair) for pair in pairs) / len(pairs) for name in self.metrics if name in right}
        others: list[Score] = [name for name in self.metrics if name == "rouge_l"]
        return shares | (score_texts(texts, [[reference] for reference in expected], others) if others else {})

    def _transform(self) -> BatchTransform:
        return Packing(self.mean, self.std, self.augment) if self.packing else super()._transform()

    @property
    def chat_template(self) -> str | None:
        """The chat template that formats conversations."""
        return ChatTemplate(self._tokenizer, self.template, self.learn, self.template_variables).text

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer, pads=False, ends=True)

    def _tokenised(self, records: Sequence[Record]) -> TokenRows:
        """The rows of all records with something to train on, read from the cache, or tokenized into it."""
        tokenizer = self._tokenizer
        chat = ChatTemplate(tokenizer, self.template, self.learn, self.template_variables)
        conversations = [self._conversation(record) for record in records]
        both = list(zip(conversations, records, strict=True))
        chats = (chat.render(one.messages, one.variables, record.where) for one, record in both if one.is_chat)
        written = next(chats, "")  # a template may write the current day
        unused = next((record.where for one, record in both if "tools" in one.variables and "tools" not in (chat.text or "")), None)
        if unused is not None:
            log.warning(f"{unused} has tools, which the chat template leaves out: set template to one that writes them.")
        key = sha256()
        for part in (
            *(FORMAT, tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, chat.text, self.template_variables),
            *(written, self.learn, self.max_length, self.overlong, *conversations),
        ):
            key.update(json.dumps(part, default=str).encode() + b"\0")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-fed" / "tokens"
        folder = cache / key.hexdigest()[:32]
        if tokenizer.pad_token_id is None:
            log.info(f"The tokenizer {self.tokenizer} has no padding token: its end token is used, outside of masks and targets.")
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if not folder.exists():
            write_rows(folder, self._rows_of(chat, records, conversations))
        self._rows = TokenRows(folder, padding, self.padding)
        self._print_losses(self._rows, records)
        return self._rows

    def _conversation(self, record: Record) -> Conversation:
        fields = {name: value for name, value in record.fields.items() if name != FILE}
        if self.remove is not None:
            try:
                fields = _without(re.compile(self.remove, re.DOTALL), fields)
            except re.error as error:
                raise FederationError(f"remove is {self.remove!r}, which is not a regular expression ({error}).") from error
        return conversation_of(fields, self.columns, record.where)

    def _rows_of(
        self, chat: ChatTemplate, records: Sequence[Record], conversations: Sequence[Conversation]
    ) -> Iterator[tuple[int, bool, list[int], list[bool]]]:
        rows = 0
        for number, (record, conversation) in enumerate(zip(records, conversations, strict=True)):
            ids, learned = chat.encode(conversation, record.where)
            if is_cut := len(ids) > self.max_length:
                require(
                    self.overlong != "refuse",
                    f"{record.where} has {len(ids)} tokens, but max_length is {self.max_length}: raise it, or set overlong to "
                    "cut or drop.",
                )
                if self.overlong == "drop":
                    continue
                ids, learned = ids[: self.max_length], learned[: self.max_length]
            if any(learned[1:]):  # the first token has no predecessor to predict it
                rows += 1
                yield number, is_cut, ids, learned
        require(rows > 0, f"{self.path} has nothing left to train on within max_length {self.max_length}: raise it.")

    def _print_losses(self, rows: TokenRows, records: Sequence[Record]) -> None:
        """Print how many answers are cut off or left out."""
        remaining, cut = rows.parts["records"], rows.parts["cut"]
        gone = np.setdiff1d(np.arange(len(records)), remaining)
        told = [
            f"{len(numbers)} of {len(records)} records {what} (the first is {records[numbers[0]].where.removesuffix(',')})"
            for numbers, what in (
                (
                    remaining[cut],
                    f"are longer than max_length {self.max_length} and lost their end: no answer is scored by them",
                ),
                (gone, f"are left out, being longer than max_length {self.max_length} or without anything to train on"),
            )
            if len(numbers)
        ]
        if told:
            log.warning(f"{self.path}: {'; '.join(told)}.")

    def _print_first(self, rows: TokenRows, records: Sequence[Record]) -> None:
        """Print what is trained of the first complete row, and warn if its answer cannot end."""
        number = int(rows.parts["cut"].argmin())  # the first row if none is complete
        where, (ids, learned) = records[rows.parts["records"][number]].where, rows.row(number)
        said = self._tokenizer.decode(ids[learned])
        log.info(f"The trained text of {where} is: {said!r}")
        if not rows.parts["cut"][number] and self._end_of(ids[learned].tolist()) is None:
            log.warning(
                f"The answer of {where} ends in {said.rstrip()[-20:]!r}, no special token: the model does not learn to stop."
            )

    def _end_of(self, ids: Sequence[int]) -> int | None:
        """The special token that ends an answer, ignoring blanks after it; None: there is none."""
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        last = next((n for n in reversed(range(len(ids))) if self._tokenizer.convert_tokens_to_string([tokens[n]]).strip()), None)
        return ids[last] if last is not None and tokens[last] in self._special else None

    @cached_property
    def _special(self) -> set[str]:
        return {*self._tokenizer.all_special_tokens, *map(str, self._tokenizer.added_tokens_decoder.values())}

    @property
    def end_token(self) -> int | None:
        """The special token that is trained as the end of the first answer; None: there is none, or the answer is cut off."""
        assert self._rows is not None  # the data are loaded
        number = int(self._rows.parts["cut"].argmin())
        return None if self._rows.is_answer_cut(number) else self._end_of(self._rows.answer(number))

    def _refuse_empty_clients(self, records: Sequence[Record], remaining: Sequence[Record]) -> None:
        """Refuse clients without records left, which would disappear silently."""
        if not isinstance(self.partition, ByColumn):
            return
        before, after = ({record.fields.get(self.partition.column) for record in some} for some in (records, remaining))
        gone = sorted(map(str, before - after))
        require(
            not gone,
            f"{self.path}: the client {', '.join(gone[:3])} has no record left below max_length {self.max_length}: raise it.",
        )


def _check_column(records: Sequence[Record], name: str | None, option: str) -> None:
    """Raises :class:`FederationError` for values that cannot be labels or clients. Missing columns are refused elsewhere."""
    if any(name in record.fields for record in records):
        for record in records:
            value = record.fields.get(str(name))
            fits = isinstance(value, str | int) and value != ""
            require(fits, f"{record.where} has {name} {repr(value)[:60]}, as its {option}: expected a text or a whole number.")


def _without(pattern: re.Pattern[str], given: Any) -> Any:
    """Remove matches of a pattern from texts anywhere in a record."""
    if isinstance(given, dict):
        return {name: _without(pattern, value) for name, value in given.items()}
    if isinstance(given, list):
        return [_without(pattern, value) for value in given]
    return pattern.sub("", given) if isinstance(given, str) else given
