"""Questions in SQuAD's schema: what is read, the windows of a question, and how answers are scored."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_files import REAL, put_into_cache, real
from tiny_texts import BERT_INPUTS, IDS, save_tokenizer, squad_article, write_squad
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from lightning_fed.data import IID, BySimilarity, QuestionFiles, SQuAD
from lightning_fed.data.batches import EXAMPLE, TARGETS
from lightning_fed.data.text.classification import CHUNK
from lightning_fed.data.text.question_answering import OFFSETS, Question, QuestionAnswering, tokens_of_answer
from lightning_fed.errors import FederationError

CONTEXT = "the dog barks , the cat naps"
DOG = (("barks", 8), ("dog barks", 4))
CAT = (("naps", 24),)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path / "tokenizer")


class Given(QuestionAnswering):
    """Questions that are already there."""

    def __init__(self, train: list[Question], test: list[Question] | None = None, **kwargs: Any) -> None:
        super().__init__(**{"num_clients": 1, "partition": IID(), "val_share": 0.0, "test_share": 0.5} | kwargs)
        self.given = train, test or []

    def questions(self) -> tuple[list[Question], list[Question]]:
        return self.given


def asked(question: str, context: str = CONTEXT, *answers: tuple[str, int], topic: str = "T", id: str = "q") -> Question:
    return Question(id, topic, question, context, answers)


# ---------------------------------------------------------------------------------------------------------- what is read


def expected(topics: str, version: str) -> list[Question]:
    kinds: dict[str, Any] = {"dog": DOG, "cat": CAT} | ({"ox": ()} if version == "2.0" else {})
    return [Question(f"{topic}/0/{animal}", topic, animal, CONTEXT, kinds[animal]) for topic in topics for animal in kinds]


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_files(version: Any, tmp_path: Path) -> None:
    root = write_squad(tmp_path, version, copies=1)
    data = SQuAD(version, root, tokenizer="unused", split="official")
    assert data.questions() == (expected("ABC", version), expected("DE", version))
    assert data.allow_unanswerable == (version == "2.0")
    assert (data.num_classes, data.predicts_labels, data.max_length, data.stride) == (2, False, 384, 128)


def test_pooled_needs_the_training_file_alone(tmp_path: Path) -> None:
    root = write_squad(tmp_path, copies=1)
    (tmp_path / "dev-v1.1.json").unlink()
    assert SQuAD("1.1", root, tokenizer="unused").questions() == (expected("ABC", "1.1"), [])


@pytest.mark.parametrize(("version", "name"), [("1.1", "rajpurkar/squad"), ("2.0", "rajpurkar/squad_v2")])
def test_hub(version: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def rows(topics: str) -> Any:
        columns: dict[str, list[Any]] = {"id": [], "title": [], "question": [], "context": [], "answers": []}
        for id, topic, question, context, answers in expected(topics, version):
            texts, starts = [text for text, _ in answers], [start for _, start in answers]
            row = (id, topic, question, context, {"text": texts, "answer_start": starts})
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
        return datasets.Dataset.from_dict(columns)

    put_into_cache(monkeypatch, name, {"train": rows("ABC"), "validation": rows("DE")})
    data = SQuAD(version, tokenizer="unused", split="official")
    assert data.questions() == (expected("ABC", version), expected("DE", version))


def test_own_files(tokenizer: str) -> None:
    for part, title in (("train", "A"), ("test", "B")):
        Path(f"{part}.json").write_text(json.dumps({"data": [squad_article(title)]}))
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_length": 24, "stride": 2, "num_clients": 1, "partition": IID()}
    assert QuestionFiles("train.json", **options).questions() == (expected("A", "1.1"), [])
    data = QuestionFiles("train.json", "test.json", split="official", val_share=0.0, **options)
    assert data.num_labels == 2  # asked before anything is loaded
    assert [(info.num_train, info.num_test, info.label_counts) for info in data.clients] == [(2, 2, (2, 0))]
    assert data.client(0).data.images[EXAMPLE].tolist() == [0, 1, 2, 3]
    assert data.majority_accuracy() is None
    with pytest.raises(FederationError, match=r"train.json belongs to path and to test_path, so it would be trained and tested on"):
        QuestionFiles("train.json", "./train.json", split="official", **options).questions()


def test_what_is_marked_impossible_has_no_answer() -> None:
    article = squad_article("A", unanswerable=True)
    article["paragraphs"][0]["qas"][1]["is_impossible"] = True
    Path("train.json").write_text(json.dumps({"data": [article]}))
    questions, _ = QuestionFiles("train.json", tokenizer="unused").questions()
    assert [question.answers for question in questions] == [DOG, (), ()]


@pytest.mark.parametrize("mark", ["false", 0])
def test_a_mark_is_true_or_false(mark: Any) -> None:
    article = squad_article("A")
    article["paragraphs"][0]["qas"][1]["is_impossible"] = mark
    Path("train.json").write_text(json.dumps({"data": [article]}))
    said = rf"question 1: 'is_impossible' is {mark!r}, which is not SQuAD's schema: expected true or false"
    with pytest.raises(FederationError, match=said):
        QuestionFiles("train.json", tokenizer="unused").questions()
    article["paragraphs"][0]["qas"][1]["is_impossible"] = None
    Path("train.json").write_text(json.dumps({"data": [article]}))
    assert QuestionFiles("train.json", tokenizer="unused").questions() == (expected("A", "1.1"), [])


# ------------------------------------------------------------------------------------------------------- what is refused


def test_missing_files_are_named(tmp_path: Path) -> None:
    message = rf"no file {tmp_path}/train-v2\.0\.json: .*folder that has train-v2\.0\.json and dev-v2\.0\.json"
    with pytest.raises(FederationError, match=message):
        SQuAD("2.0", str(tmp_path), tokenizer="unused").questions()
    with pytest.raises(FederationError, match=r"no file .*none\.json: check --data\.init_args\.path"):
        QuestionFiles("none.json", tokenizer="unused").questions()


SQUAD = (
    '{"data": [{"title": "T", "paragraphs": [{"context": "c", "qas": '
    '[{"id": %s, "question": "q", "answers": [{"text": "c", "answer_start": %s}]}]}]}]}'
)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[", "is not JSON in UTF-8"),
        ("[" * 100_000, "is not JSON in UTF-8"),
        ("[]", " is a list, .* expected an object with data"),
        ("{}", ": 'data' is missing"),
        ('{"data": [{"paragraphs": [{"qas": [{"id": "1"}]}]}]}', ", article 0: 'title' is missing"),
        ('{"data": [{"title": "T", "paragraphs": 3}]}', ", article 0: 'paragraphs' is 3, .* expected a list"),
        (
            '{"data": [{"title": "T", "paragraphs": [{"context": "c", "qas": ["q"]}]}]}',
            "paragraph 0, question 0 is a text",
        ),
        (SQUAD % ('"1"', "true"), "question 0: 'answer_start' is True, .* expected a whole number"),
        (SQUAD % ("1", "0"), "question 0: 'id' is 1, .* expected a text"),
    ],
)
def test_another_schema_is_refused(content: str, problem: str) -> None:
    Path("train.json").write_text(content)
    with pytest.raises(FederationError, match=rf"train\.json.*{problem}"):
        QuestionFiles("train.json", tokenizer="unused").questions()


@pytest.mark.parametrize("answer", [("barks", 7), ("naps", -4), ("", 8), (" ", 3), ("naps", 30)])
def test_an_answer_that_is_not_at_its_offset_is_refused(answer: tuple[str, int], tokenizer: str) -> None:
    good = asked("dog", CONTEXT, *DOG)
    data = Given([good, asked("dog", CONTEXT, *DOG, answer, id="Q7")], tokenizer=tokenizer)
    message = rf"Question Q7 has the answer '{answer[0]}', which is not at character {answer[1]} "
    with pytest.raises(FederationError, match=message):
        data.setup()


def test_questions_without_an_answer_are_refused_unless_allowed(tokenizer: str) -> None:
    questions = [asked("dog", CONTEXT, *DOG), *[asked("ox", id="Q8")] * 9]
    with pytest.raises(FederationError, match="Question Q8 has no answer: set allow_unanswerable to true"):
        Given(questions, tokenizer=tokenizer).setup()
    Given(questions, tokenizer=tokenizer, allow_unanswerable=True).setup()


def test_a_question_must_leave_room_for_its_context(tokenizer: str) -> None:
    questions = [asked("cat", CONTEXT, *CAT), *[asked("the dog barks", CONTEXT, *DOG, id="Q9")] * 9]
    # Of 9 tokens, 3 are special and 3 the question's: 3 are left, one more than the windows share.
    assert Given(questions, tokenizer=tokenizer, max_length=9, stride=2).num_labels == 1
    for options, left in (({"max_length": 9, "stride": 3}, 3), ({"max_length": 5, "stride": 0}, 0)):
        with pytest.raises(FederationError, match=f"Question Q9 has 3 tokens and leaves {left} of max_length=.*raise max_length"):
            Given(questions, tokenizer=tokenizer, **options).setup()


def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FederationError, match=r"version='3': give one of '1\.1', '2\.0'"):
        SQuAD("3", tokenizer="unused")  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="max_length=0"):
        SQuAD("1.1", tokenizer="unused", max_length=0)
    with pytest.raises(FederationError, match="stride=-1"):
        SQuAD("1.1", tokenizer="unused", stride=-1)
    with pytest.raises(FederationError, match="Given has no questions to train on"):
        Given([], tokenizer="unused").setup()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FederationError, match=r'package datasets.*pip install "lightning-fed\[nlp\]"'):
        SQuAD("1.1", tokenizer="unused").questions()


# -------------------------------------------------------------------------------------------------------------- windows


def columns_of(data: QuestionAnswering) -> dict[str, Tensor]:
    data.setup()
    assert data._data is not None
    assert isinstance(data._data.images, dict)
    return data._data.images


def test_windows_by_hand(tokenizer: str) -> None:
    # Four tokens of context per window, two of which the next one shares: 0-3, 2-5 and 4-6.
    short = asked(" cat ", "the cat", ("cat", 4), id="short", topic="S")
    long = asked("dog", CONTEXT, ("cat naps", 20), ("dog", 4), id="long", topic="L")
    data = Given([short, long], [short] * 3, tokenizer=tokenizer, max_length=8, stride=2, num_clients=2)
    inputs = columns_of(data)
    lists = {name: tensor.tolist() for name, tensor in inputs.items()}
    assert set(lists) == {*BERT_INPUTS, OFFSETS, EXAMPLE, TARGETS}
    words = CONTEXT.split()
    texts = [["the", "cat"], words[:4], words[2:6], words[4:], *[["the", "cat"]] * 3]
    asks = ["cat", "dog", "dog", "dog", "cat", "cat", "cat"]
    made = [["[CLS]", ask, "[SEP]", *text, "[SEP]"] for ask, text in zip(asks, texts, strict=True)]
    assert lists["input_ids"] == [[IDS[word] for word in row + ["[PAD]"] * (8 - len(row))] for row in made]
    assert lists["attention_mask"] == [[1] * len(row) + [0] * (8 - len(row)) for row in made]
    assert lists["token_type_ids"] == [[0] * 3 + [1] * (len(row) - 3) + [0] * (8 - len(row)) for row in made]
    ends = {0: 3, 4: 7, 8: 13, 14: 15, 16: 19, 20: 23, 24: 28}
    begins = [[0, 4], [0, 4, 8, 14], [8, 14, 16, 20], [16, 20, 24], *[[0, 4]] * 3]
    spans = [[[begin, ends[begin]] for begin in row] for row in begins]
    assert lists[OFFSETS] == [[[0, 0]] * 3 + row + [[0, 0]] * (5 - len(row)) for row in spans]
    assert lists[EXAMPLE] == [0, 1, 1, 1, 2, 3, 4]
    # The last window alone holds all of "cat naps".
    assert lists[TARGETS] == [[4, 4], [0, 0], [0, 0], [4, 5], [4, 4], [4, 4], [4, 4]]
    assert data.num_labels == 2
    assert data.pooled().data.labels.tolist() == [0, 1, 1, 1, 0, 0, 0]


def test_every_chunk_of_the_tokenizer_numbers_on(tokenizer: str) -> None:
    before = [n % (7 if n < CHUNK else 3) for n in range(CHUNK + 5)]  # what the last chunk lacks in length is padded
    questions = [asked("cat", "the " * count + "cat", ("cat", 4 * count)) for count in before]
    inputs = columns_of(Given(questions, tokenizer=tokenizer, max_length=16, stride=2))
    assert inputs[EXAMPLE].tolist() == list(range(len(before)))
    assert inputs[TARGETS].tolist() == [[3 + count, 3 + count] for count in before]
    assert inputs["input_ids"].shape == (len(before), 11)
    assert inputs[OFFSETS].shape == (len(before), 11, 2)
    assert inputs[OFFSETS].dtype == torch.int32
    assert inputs[OFFSETS][-1].tolist() == [[0, 0]] * 3 + [[0, 3], [4, 7], [8, 11]] + [[0, 0]] * 5  # two, then the cat


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ((4, 7), (2, 2)),  # a word
        ((5, 6), (2, 2)),  # a part of a word
        ((4, 13), (2, 3)),
        ((6, 9), (2, 3)),  # parts of two words
        ((3, 13), (1, 3)),
        ((2, 7), (0, 0)),  # begins before the window
        ((8, 14), (0, 0)),  # ends after it
        ((0, 0), (0, 0)),  # there is none
    ],
)
def test_tokens_of_an_answer(answer: tuple[int, int], tokens: tuple[int, int]) -> None:
    # CLS, then "▁the" cut by the window, "▁dog", "▁barks" with the blanks before them as sentencepiece has them, padding.
    offsets = torch.tensor([[[0, 0], [3, 4], [4, 7], [7, 13], [0, 0]]])
    assert tokens_of_answer(offsets, torch.tensor([answer])).tolist() == [list(tokens)]


def test_an_answer_that_no_token_has_is_not_held() -> None:
    offsets = torch.tensor([[[0, 0], [0, 3], [5, 9], [0, 0]]])  # the tokenizer has dropped characters 3 and 4
    assert tokens_of_answer(offsets, torch.tensor([[3, 5]])).tolist() == [[0, 0]]


def test_blanks_around_an_answer_do_not_matter(tokenizer: str) -> None:
    questions = [asked("cat", CONTEXT, (" naps", 23)), asked("cat", "the cat ", ("cat ", 4)), asked("cat", " cat", (" cat", 0))]
    assert columns_of(Given(questions, tokenizer=tokenizer))[TARGETS].tolist() == [[9, 9], [4, 4], [3, 3]]


def test_blanks_around_a_question_take_no_room(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE({letter: number for number, letter in enumerate(["[PAD]", *alphabet])}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]").save_pretrained(tmp_path / "letters")
    questions = [asked(question, "a cat", ("cat", 2)) for question in ("who", "   who   ")]
    inputs = columns_of(Given(questions, tokenizer=str(tmp_path / "letters"), max_length=8, stride=0))
    assert inputs["input_ids"].shape == (2, 8)
    assert torch.equal(inputs["input_ids"][0], inputs["input_ids"][1])
    assert inputs[TARGETS].tolist() == [[5, 7]] * 2


def test_debertas_tokens_begin_with_a_blank(tmp_path: Path) -> None:
    vocab = [
        ("[PAD]", 0.0),
        ("[CLS]", 0.0),
        ("[SEP]", 0.0),
        ("[UNK]", 0.0),
        ("▁the", -1.0),
        ("▁dog", -1.0),
        ("▁bark", -1.0),
        ("s", -1.0),
    ]
    transformers.DebertaV2Tokenizer(vocab=vocab, unk_id=3).save_pretrained(tmp_path / "deberta")
    questions = [asked("the", "the dog barks", answer) for answer in (("dog", 4), ("barks", 8), ("bark", 8))]
    data = Given(questions, tokenizer=str(tmp_path / "deberta"))
    inputs = columns_of(data)
    assert inputs["input_ids"][0].tolist() == [1, 4, 2, 4, 5, 6, 7, 2]
    assert inputs[TARGETS].tolist() == [[4, 4], [5, 6], [5, 5]]
    for number, (start, end) in enumerate(inputs[TARGETS].tolist()):
        span = torch.tensor([[inputs[OFFSETS][number, start, 0], inputs[OFFSETS][number, end, 1], 1, 0]])
        assert data.score([(torch.tensor([number]), span)])["exact_match"] == 1


# --------------------------------------------------------------------------------------------------------------- clients


def test_windows_of_a_question_stay_together(tmp_path: Path, tokenizer: str) -> None:
    data = SQuAD(
        "2.0",
        write_squad(tmp_path, "2.0", copies=20),
        tokenizer=tokenizer,
        max_length=8,
        stride=2,
        num_clients=4,
        partition=BySimilarity(sorted_fraction=0.5),
        test_share=0.2,
        val_share=0.0,
    )
    example = columns_of(data)[EXAMPLE]
    assert data.num_labels == 3
    assert torch.equal(example, torch.arange(180).repeat_interleave(3))
    held = []
    for client in range(4):
        train, val, test = (np.unique(example[part]) for part in data.client(client).splits)
        assert (len(train), len(val), len(test)) == (36, 0, 9)  # 80 % and 20 % of its 45 questions
        assert (data.clients[client].num_train, data.clients[client].num_test) == (108, 27)  # in windows
        held += [train, test]
    assert sorted(np.concatenate(held)) == list(range(180))


def test_the_development_set_has_other_topics(tmp_path: Path, tokenizer: str) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "num_clients": 2, "split": "official", "val_share": 0.0}
    root = write_squad(tmp_path)
    data = SQuAD("1.1", root, partition=IID(), **options)
    assert data.num_labels == 5
    assert [(info.num_train, info.num_test) for info in data.clients] == [(24, 16)] * 2
    assert data.client(0).splits[2].min() >= 48
    with pytest.raises(FederationError, match=r"5 classes are in only one of .*: set split to pooled, or partition to IID"):
        SQuAD("1.1", root, partition=BySimilarity(sorted_fraction=0.5), **options).setup()


# --------------------------------------------------------------------------------------------------------------- scoring

SPANS = {"dog barks": (4, 13), "barks": (8, 13), "cat": (20, 23), "naps": (24, 28), "the cat naps": (16, 28), " barks ": (7, 14)}


def predicted(*windows: tuple[int, str, float, float]) -> list[tuple[Tensor, Tensor]]:
    """What a network predicts, in batches of two windows: number of the question, text, score, null score."""
    rows = [(number, torch.tensor([*SPANS[text], score, null])) for number, text, score, null in windows]
    batches = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    return [(torch.tensor([number for number, _ in batch]), torch.stack([span for _, span in batch])) for batch in batches]


def scoring(tokenizer: str, allow_unanswerable: bool = False) -> Given:
    questions = [asked("dog", CONTEXT, *DOG), asked("cat", CONTEXT, *CAT), asked("ox", CONTEXT), asked("ox", CONTEXT)]
    questions = questions if allow_unanswerable else questions[:2]
    data = Given(questions, tokenizer=tokenizer, allow_unanswerable=allow_unanswerable)
    data.setup()
    return data


@pytest.mark.parametrize(
    ("windows", "exact_match", "f1"),
    [
        ([(0, "barks", 1, 9), (1, "naps", 1, 9)], 1, 1),  # there is always an answer: null scores do not count
        ([(0, "dog barks", 1, 0), (1, "naps", 1, 0)], 1, 1),  # the second answer is as good
        ([(0, " barks ", 1, 0)], 1, 1),  # a blank and a comma are not compared
        # "cat naps" without its article against "naps": precision 1/2, recall 1.
        ([(1, "the cat naps", 1, 0)], 0, 2 / 3),
        ([(0, "cat", 1, 0), (1, "naps", 1, 0)], 0.5, 0.5),
        ([(1, "cat", 1, 0), (0, "cat", 1, 0), (1, "naps", 2, 0), (0, "barks", 0, 0)], 0.5, 0.5),  # the best of the windows
        ([(0, "cat", -3, 0), (0, "barks", -2, 0), (0, "naps", -4, 0)], 1, 1),
        ([(0, "barks", 1, 0), (0, "cat", 1, 0)], 1, 1),  # among equals the first
        ([(0, "cat", 1, 0), (0, "barks", 1, 0)], 0, 0),
    ],
)
def test_scores_by_hand(windows: Any, exact_match: float, f1: float, tokenizer: str) -> None:
    scores = scoring(tokenizer).score(predicted(*windows))
    assert scores == pytest.approx({"exact_match": exact_match, "f1": f1})


@pytest.mark.parametrize(
    ("windows", "has", "no"),
    [
        ([(1, "naps", 2, 1), (2, "naps", 1, 2)], 1, 1),
        ([(1, "naps", 1, 2), (2, "naps", 2, 1)], 0, 0),
        ([(1, "naps", 1, 1), (2, "naps", 1, 1)], 1, 0),  # an answer that is as good as none is given
        ([(1, "naps", 2, 1), (1, "cat", 0, 9), (2, "naps", 1, 2), (2, "cat", 0, 3)], 1, 1),  # the lowest null score counts
        ([(1, "naps", 2, 9), (1, "cat", 0, 2), (2, "naps", 1, 9), (2, "cat", 0, 1)], 1, 0),
        ([(1, "cat", 1, 9), (1, "naps", 2, 9), (2, "naps", 1, 9), (2, "cat", 2, 9)], 0, 1),
    ],
)
def test_no_answer_can_be_the_answer(windows: Any, has: float, no: float, tokenizer: str) -> None:
    scores = scoring(tokenizer, allow_unanswerable=True).score(predicted(*windows))
    both = dict.fromkeys(("exact_match", "f1"), (has + no) / 2)
    split = {f"{kind}_{name}": value for kind, value in (("has_answer", has), ("no_answer", no)) for name in both}
    assert scores == pytest.approx(both | split)


def test_an_answer_of_articles_alone_does_not_make_an_empty_prediction_right(tokenizer: str) -> None:
    """Which is how the official script of SQuAD 2.0 has it; where every question has an answer, that of 1.1 compares with all."""
    for allow_unanswerable, expected in ((True, 0), (False, 1)):
        question = asked("dog", CONTEXT, ("the", 0), ("dog barks", 4))
        data = Given(
            [question, asked("cat", CONTEXT, *CAT), asked("cat", CONTEXT, *CAT)],
            tokenizer=tokenizer,
            allow_unanswerable=allow_unanswerable,
        )
        data.setup()
        nothing = [(torch.tensor([0]), torch.tensor([[7.0, 8, 0, 1]]))]
        assert data.score(nothing)["exact_match"] == expected
        assert data.score(predicted((0, "dog barks", 2, 1)))["exact_match"] == 1


def test_kinds_that_do_not_occur_are_not_scored(tokenizer: str) -> None:
    scores = scoring(tokenizer, allow_unanswerable=True).score(predicted((2, "naps", 0, 1), (3, "naps", 1, 0)))
    assert scores == {"exact_match": 0.5, "f1": 0.5, "no_answer_exact_match": 0.5, "no_answer_f1": 0.5}


# --------------------------------------------------------------------------------------------------------- the real files


@real
def test_real_questions(tokenizer: str) -> None:
    """XQuAD's English part: SQuAD 1.1's schema, 48 articles of its development set."""
    file = f"{REAL}/xquad-en/xquad.en.json"
    options: dict[str, Any] = {
        "num_clients": 4,
        "partition": BySimilarity(sorted_fraction=0.5),
        "test_share": 0.2,
        "val_share": 0.0,
    }
    data = QuestionFiles(file, tokenizer=tokenizer, **options)
    inputs = columns_of(data)
    questions, _ = data.questions()
    assert (len(questions), data.num_labels) == (1190, 48)
    assert inputs[EXAMPLE].unique().tolist() == list(range(1190))
    holding = inputs[TARGETS].any(dim=1)
    assert inputs[EXAMPLE][holding].unique().tolist() == list(range(1190))
    rows = torch.arange(len(holding))
    start, end = inputs[TARGETS].T
    characters = torch.stack([inputs[OFFSETS][rows, start, 0], inputs[OFFSETS][rows, end, 1]], dim=1)
    differing = {}
    for example, (first, last) in zip(inputs[EXAMPLE][holding].tolist(), characters[holding].tolist(), strict=True):
        question = questions[example]
        if (span := question.context[first:last]) != question.answers[0][0]:
            differing[question.answers[0][0]] = span
    # In the file, this answer ends in the middle of a number: a token has all of it.
    assert differing == {"7,000,000 square kilometres (2,70": "7,000,000 square kilometres (2,700"}
    gold = torch.cat([characters, holding[:, None], torch.zeros(len(rows), 1)], dim=1)
    assert data.score([(inputs[EXAMPLE], gold)])["exact_match"] == pytest.approx(1189 / 1190)
