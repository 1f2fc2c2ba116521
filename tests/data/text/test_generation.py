"""Data-to-text: what a row looks like, what is learned of it, and the formats of E2E and WebNLG."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_files import REAL, real
from tiny_texts import KINDS, SENTENCES, TESTED, TRAINED, save_tokenizer, save_word_tokenizer, write_e2e, write_webnlg

from lightning_fed.data import E2E, TextGeneration, WebNLG, WholeLabels
from lightning_fed.data.batches import EXAMPLE, TARGETS
from lightning_fed.data.text.generation import IGNORED, Example
from lightning_fed.data.text.scores import SCORES, score_texts
from lightning_fed.errors import FederationError


class Few(TextGeneration):
    """Two sources to train on, one to test on."""

    def examples(self) -> tuple[list[Example], list[Example]]:
        train = [Example("name Zizzi", "Zizzi", ("Zizzi is pub .", "pub")), Example("name Cocum | a", "Cocum", ("Cocum .",))]
        return train, [Example("name Zizzi | b", "Zizzi", ("Zizzi is b", "b", "the b"))]


def few(tmp_path: Path, **options: Any) -> Few:
    options = {"num_clients": 1, "val_share": 0, "metrics": ["bleu", "ter"]} | options
    return Few(**{"tokenizer": save_word_tokenizer(tmp_path / "tokenizer")} | options)


def e2e(tmp_path: Path, **options: Any) -> E2E:
    tokenizer = save_word_tokenizer(tmp_path / "tokenizer")
    options = {"num_clients": 2, "val_share": 0, "metrics": ["bleu"]} | options
    return E2E(write_e2e(tmp_path / "e2e"), tokenizer=tokenizer, **options)


# -------------------------------------------------------------------------------------------------------------------- rows


def test_a_row_is_a_source_and_a_reference(tmp_path: Path) -> None:
    data = few(tmp_path)
    train, train_labels, test, test_labels = data.load()
    tokenizer, end = data._tokenizer, "<|endoftext|>"
    assert isinstance(train, dict)
    assert isinstance(test, dict)
    texts = [f"name Zizzi {end} Zizzi is pub . {end}", f"name Zizzi {end} pub {end}", f"name Cocum | a {end} Cocum . {end}"]
    texts += [f"name Zizzi | b {end} Zizzi is b {end}"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    longest = len(rows[-1])
    ids = torch.cat([train["input_ids"], test["input_ids"]])
    # Padded with the token for the end, for the tokenizer has none for padding.
    assert ids.tolist() == [row + [0] * (longest - len(row)) for row in rows]
    mask = torch.cat([train["attention_mask"], test["attention_mask"]])
    assert mask.tolist() == [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    assert train[EXAMPLE].tolist() + test[EXAMPLE].tolist() == [0, 0, 1, 2]
    assert [data.labels[number] for number in train_labels] + [data.labels[number] for number in test_labels] == [
        "Zizzi",
        "Zizzi",
        "Cocum",
        "Zizzi",
    ]


def test_the_reference_and_its_end_are_learned_and_nothing_else(tmp_path: Path) -> None:
    data = few(tmp_path)
    train, _, test, _ = data.load()
    assert isinstance(train, dict)
    assert isinstance(test, dict)
    learned = ["Zizzi is pub . <|endoftext|>", "pub <|endoftext|>", "Cocum . <|endoftext|>", "Zizzi is b <|endoftext|>"]
    sources = [2, 2, 4, 4]
    for row, (text, size) in enumerate(zip(learned, sources, strict=True)):
        targets = (train if row < 3 else test)[TARGETS][row % 3]
        ids = data._tokenizer(text)["input_ids"]
        expected = [IGNORED] * size + ids  # the first is predicted by the token that begins a text, behind the source
        assert targets.tolist() == expected + [IGNORED] * (len(targets) - len(expected))


def test_a_batch_has_the_targets(tmp_path: Path) -> None:
    inputs, targets = next(iter(few(tmp_path).client(0).test_dataloader()))
    assert inputs.keys() == {"input_ids", "attention_mask", EXAMPLE}
    assert targets.shape == inputs["input_ids"].shape
    begin = int((targets[0] != IGNORED).int().argmax())
    assert inputs["input_ids"][0, begin + 1] == targets[0, begin]


def test_a_tokenizers_own_beginning_and_padding_are_used(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "bert", bos_token="[CLS]", eos_token="[SEP]")
    train, *_ = few(tmp_path, tokenizer=tokenizer).load()
    assert isinstance(train, dict)
    assert train["input_ids"][1].tolist() == [1, 1, 2, 1, 3, 0, 0, 0, 0]  # unknown, unknown, [CLS], unknown, [SEP], [PAD]


def test_rows_of_a_source_stay_together(tmp_path: Path) -> None:
    data = e2e(tmp_path, val_share=0.3)
    for client in range(2):
        examples = [set(data._data.images[EXAMPLE][part].tolist()) for part in data.client(client).splits]  # type: ignore[union-attr]
        assert all(examples)
        assert not examples[0] & examples[1]
        assert not examples[0] & examples[2]
        assert data.clients[client].num_train == len(SENTENCES) * len(examples[0])


def test_answers_are_compared_with_all_references(tmp_path: Path) -> None:
    data = few(tmp_path, metrics=["bleu", "ter", "rouge_l"])
    data.setup()
    words = data._tokenizer.get_vocab()
    batches = [
        (torch.tensor([2]), torch.tensor([[words["the"], words["b"], data.end_token, words["b"]]])),  # generation continued
        (torch.tensor([0, 0]), torch.tensor([[words["Zizzi"], words["is"], words["Zizzi"]]] * 2)),
    ]
    train, test = data.examples()
    expected = score_texts(["the b", "Zizzi is Zizzi"], [test[0].references, train[0].references], data.metrics)
    assert data.score(batches) == expected
    assert data.score(batches[:1])["rouge_l"] == pytest.approx(1)
    assert list(expected) == ["bleu", "ter", "rouge_l"]


def test_all_scores_are_the_default(tmp_path: Path) -> None:
    assert list(few(tmp_path, metrics=None).metrics) == list(SCORES)


# ----------------------------------------------------------------------------------------------------------------- refusals


def test_nothing_is_cut_off(tmp_path: Path) -> None:
    few(tmp_path, max_length=9).setup()
    with pytest.raises(FederationError, match=r"longest row.*has 9 tokens, but max_length is 8: set max_length to at least 9"):
        few(tmp_path, max_length=8).setup()


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"has no token for the end of a text.*set its eos_token"):
        few(tmp_path, tokenizer=save_tokenizer(tmp_path / "bert")).setup()


def test_scores_are_checked_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FederationError, match="install a Java runtime, or leave meteor out"):
        E2E("nowhere", tokenizer="nothing").setup()


@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_set_is_refused(empty: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = few(tmp_path).examples()
    monkeypatch.setattr(Few, "examples", lambda _: ([], both[1]) if empty == 0 else (both[0], []))
    with pytest.raises(FederationError, match=["has no texts to train on", "has no official test set: set split to pooled"][empty]):
        few(tmp_path).setup()


# ---------------------------------------------------------------------------------------------------------------------- E2E


def test_e2e(tmp_path: Path) -> None:
    data = e2e(tmp_path)
    train, test = data.examples()
    assert len(train) == len(TRAINED) * len(KINDS)
    assert train[1] == Example(
        "name : Alimentum | Type : coffee shop | price : cheap",
        "Alimentum",
        tuple(sentence.format(name="Alimentum", kind="coffee shop") for sentence in SENTENCES),
    )
    assert {example.label for example in test} == set(TESTED)
    assert all(len(example.references) == 2 for example in test)
    assert data.labels == TRAINED
    assert data.partition == WholeLabels()
    assert data.majority_accuracy() is None
    held = data.label_counts() > 0
    assert (held.sum(dim=0) == 1).all()
    assert [client.num_test for client in data.clients] == [len(KINDS)] * 2
    _, dev = e2e(tmp_path, test_set="dev").examples()
    assert {example.label for example in dev} == set(TRAINED[:1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("meaning,ref\na,b\n", "has the columns meaning, ref, but needs mr, ref"),
        ("mr,ref\nname[A]\n", "line 2, has 1 column, expected 2"),
        ("mr,ref\nname A,b\n", r"line 2, has the meaning 'name A', expected one like name\[The Vaults\], eatType\[pub\]"),
        ('mr,ref\n"eatType[pub], area[b]",c\n', "line 2, has the meaning 'eatType"),
        ('mr,ref\n"name[A], pub",c\n', "line 2, has the meaning 'name"),
        ("mr,ref\nname[A],b\nname[A], \n", "line 3, has an empty reference: fill it in, or take it out"),
    ],
)
def test_e2e_of_another_format_is_refused(content: str, message: str, tmp_path: Path) -> None:
    data = e2e(tmp_path)
    (tmp_path / "e2e" / "trainset.csv").write_text(content)
    with pytest.raises(FederationError, match=f"trainset.csv.*{message}"):
        data.examples()


def test_missing_files_are_named(tmp_path: Path) -> None:
    data = e2e(tmp_path)
    (tmp_path / "e2e" / "testset_w_refs.csv").unlink()
    with pytest.raises(FederationError, match=rf"no file {tmp_path}/e2e/testset_w_refs\.csv: set --data.init_args.root"):
        data.examples()
    for folder in ("train", "test"):
        with pytest.raises(FederationError, match=rf"none of WebNLG's files in {tmp_path}/webnlg/{folder}: set --data"):
            WebNLG(str(tmp_path / "webnlg"), tokenizer="unused").examples()
        write_webnlg(tmp_path / "webnlg")
        (tmp_path / "webnlg" / "test" / "testdata_with_lex.xml").unlink()


def test_other_test_sets_are_refused(tmp_path: Path) -> None:
    for dataset in (E2E, WebNLG):
        with pytest.raises(FederationError, match="Got test_set='train': give test or dev"):
            dataset(str(tmp_path), "train", tokenizer="unused")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------------- WebNLG


def test_webnlg(tmp_path: Path) -> None:
    root = write_webnlg(tmp_path)
    train, test = WebNLG(root, tokenizer="unused").examples()
    assert [example.label for example in train] == ["City"] * 3 + ["Food"] * 3 + ["City"] * 3
    assert train[4] == Example("Food_0 : stars : 1 | Food_1 : stars : 1", "Food", ("Food a", "Food b"))
    assert [example.label for example in test] == ["Food"] * 3 + ["City"] * 3  # nobody trains on artists
    _, dev = WebNLG(root, "dev", tokenizer="unused").examples()
    assert [example.label for example in dev] == ["Food"] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no XML", "is not an XML file"),
        ('<b><entry eid="Id1"><modifiedtripleset/></entry></b>', "has an entry Id1 of category None"),
        (
            '<b><entry eid="Id1" category="A"><modifiedtripleset><mtriple>a | b</mtriple></modifiedtripleset></entry></b>',
            "has an entry Id1 of category A with the facts .*expected a category and facts of three parts",
        ),
        (
            '<b><entry eid="Id1" category="A"><modifiedtripleset><mtriple>a | b | c</mtriple></modifiedtripleset>'
            '<lex comment="toFix" lid="Id1"/><lex comment="good" lid="Id2"> </lex></entry></b>',
            "entry Id1, text Id2, has an empty reference",
        ),
    ],
)
def test_webnlg_of_another_format_is_refused(content: str, message: str, tmp_path: Path) -> None:
    root = write_webnlg(tmp_path)
    (tmp_path / "train" / "1triples" / "a.xml").write_text(content)
    with pytest.raises(FederationError, match=f"a.xml,? {message}"):
        WebNLG(root, tokenizer="unused").examples()


# -------------------------------------------------------------------------------------------------------------- real files


@real
def test_real_e2e(tmp_path: Path) -> None:
    """34 restaurants to train on and 18 to test on, which Section 6.2 of PF2LoRA's paper divides among 8 clients."""
    data = E2E(f"{REAL}/e2e", tokenizer=save_word_tokenizer(tmp_path), num_clients=8, val_share=0, metrics=["bleu"])
    train, test = data.examples()
    assert len({example.label for example in train}) == data.num_labels == 34
    assert len({example.label for example in test}) == 18
    assert (len(train), len(test)) == (4862, 630)
    assert sum(len(example.references) for example in train) == sum(client.num_train for client in data.clients) == 42061
    assert sum(len(example.references) for example in test) == 4693
    assert sum(client.num_test for client in data.clients) == 630
    held = data.label_counts() > 0
    assert (held.sum(dim=0) == 1).all()
    sources = [len(data._data.images[EXAMPLE][data.client(k).splits[0]].unique()) for k in range(8)]  # type: ignore[union-attr]
    assert (min(sources), max(sources)) == (565, 661)


@real
def test_real_webnlg(tmp_path: Path) -> None:
    """10 categories, 8 clients."""
    data = WebNLG(f"{REAL}/webnlg/webnlg_challenge_2017", tokenizer=save_word_tokenizer(tmp_path), num_clients=8, metrics=["bleu"])
    train, test = data.examples()
    assert data.labels == sorted({example.label for example in train}) == sorted({example.label for example in test})
    assert data.num_labels == 10
    assert len(test) == 971
    assert sum(len(example.references) for example in train) == 18025
    assert len(train) == 6935
    held = data.label_counts() > 0
    assert (held.sum(dim=0) == 1).all()
    assert sorted(held.sum(dim=1).tolist()) == [1, 1, 1, 1, 1, 1, 2, 2]
    assert min(client.num_test for client in data.clients) > 0
