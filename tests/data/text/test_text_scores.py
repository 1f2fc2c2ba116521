"""Scores of texts: against other implementations, and where they can be worked out by hand."""

import gc
import math
import random
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
from nltk.translate.nist_score import corpus_nist
from torchmetrics.functional.text import sacre_bleu_score

from lightning_fed.data.text import scores as text_scores
from lightning_fed.data.text.nist import nist
from lightning_fed.data.text.scores import SCORES, check_scores, score_texts
from lightning_fed.errors import FederationError

WITHOUT_JAVA = [name for name in SCORES if name != "meteor"]
REFERENCES = [
    ["The Vaults is a cheap pub near Café Adriatic.", "Near Café Adriatic there is a pub, The Vaults."],
    ["Blue Spice, by the river, serves Italian food for more than £30."],
    ["Cocum is a coffee shop in the city centre.", "Cocum: coffee, in the centre.", "A coffee shop is Cocum."],
]
TEXTS = [
    "The Vaults is a pub near Café Adriatic.",
    "Blue Spice serves French food by the river for more than £30!",
    "Cocum is a shop in the city centre, with coffee.",
]


def test_a_text_that_is_a_reference_is_perfect() -> None:
    texts = [references[-1].upper() for references in REFERENCES]
    scores = score_texts(texts, REFERENCES, WITHOUT_JAVA)
    assert list(scores) == WITHOUT_JAVA
    assert scores["bleu"] == pytest.approx(1)
    assert scores["ter"] == 0
    assert scores["rouge_l"] == pytest.approx(1)
    assert score_texts(texts, [[references[-1]] for references in REFERENCES], ["cider"])["cider"] == pytest.approx(10)


def test_texts_are_split_like_mteval_in_lower_case() -> None:
    apart = [text.lower().replace(",", " ,").replace(".", " .").replace("!", " !") for text in TEXTS]
    assert score_texts(apart, REFERENCES, WITHOUT_JAVA) == score_texts(TEXTS, REFERENCES, WITHOUT_JAVA)
    assert score_texts(["5-star."], [["5-star ."]], ["ter"])["ter"] == 0
    assert score_texts(["5 - star."], [["5-star"]], ["ter"])["ter"] > 0


def test_bleu_is_that_of_another_implementation() -> None:
    other = sacre_bleu_score(TEXTS, REFERENCES, tokenize="13a", lowercase=True).item()
    assert 0.2 < other < 0.8
    assert score_texts(TEXTS, REFERENCES, ["bleu"])["bleu"] == pytest.approx(other, rel=1e-5)


def test_nist_is_that_of_the_split_words() -> None:
    texts, references = ["A b, c d e f."], [["a B c d e g."]]
    words = ["a", "b", ",", "c", "d", "e", "f", "."]
    expected = corpus_nist([[["a", "b", "c", "d", "e", "g", "."]]], [words])
    assert expected > 0.5
    assert score_texts(texts, references, ["nist"])["nist"] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_nist_with_one_reference_is_that_of_another_implementation(seed: int) -> None:
    stream = random.Random(seed)
    texts, references = ([[stream.choice("abcde") for _ in range(stream.randint(6, 12))] for _ in range(7)] for _ in range(2))
    expected = corpus_nist([[reference] for reference in references], texts)
    assert nist(texts, [[reference] for reference in references]) == pytest.approx(expected)


def test_nist_takes_matches_from_all_references_and_their_mean_length() -> None:
    """Worked out as mteval-v13a does. Of four words among the references, b is there twice and every other one once."""
    references = [["a", "b", "b"], ["c"]]
    # Both words match, each in another reference: log2(4/1) bits each; no pair does. Length 2 of (3 + 1) / 2.
    assert nist([["a", "c"]], [references]) == pytest.approx((2 + 2) / 2)
    # Two of three b's match, as many as one reference has: log2(4/2) each; b b is certain half the time: log2(2/1), once of two.
    assert nist([["b", "b", "b"]], [references]) == pytest.approx((1 + 1) / 3 + 1 / 2)
    # One word where two are expected on the average: a penalty of exp(-β ln² ½), β such that 2/3 of the length counts half.
    assert nist([["a"]], [references]) == pytest.approx(2 * 0.5 ** ((math.log(2) / math.log(1.5)) ** 2))
    assert nist([["a"], []], [references, [["b", "c"]]]) > 0


def test_nist_of_texts_shorter_than_five_words() -> None:
    # A word tells log2(number of words) bits; what follows it is certain then.
    assert score_texts(["a b"], [["a b"]], ["nist"])["nist"] == pytest.approx(1)
    assert score_texts(["a b c d"], [["a b c d"]], ["nist"])["nist"] == pytest.approx(2)


def test_ter_is_edits_per_word() -> None:
    assert score_texts(["a b c d"], [["a b d"]], ["ter"])["ter"] == pytest.approx(1 / 3)
    # The nearer reference counts, divided by the mean length; over all texts together.
    assert score_texts(["a b c", "x"], [["a b c", "d"], ["y"]], ["ter"])["ter"] == pytest.approx((0 + 1) / (2 + 1))


def test_rouge_l_is_the_weighted_mean_of_precision_and_recall() -> None:
    precision, recall = 3 / 4, 3 / 5
    expected = (1 + 1.2**2) * precision * recall / (recall + 1.2**2 * precision)
    assert score_texts(["a b x c"], [["a b c d e", "y"]], ["rouge_l"])["rouge_l"] == pytest.approx(expected)


def test_cider_weights_words_by_their_rareness() -> None:
    assert score_texts(["a rare"], [["a rare"]], ["cider"])["cider"] == 0  # of one text, nothing is rare
    references = [["a rare"], ["a b"], ["a c"]]
    rare, common = (score_texts([text, "z", "z"], references, ["cider"])["cider"] for text in ("z rare", "a z"))
    assert rare > common == 0


def test_an_empty_text_is_worth_nothing() -> None:
    scores = score_texts(["", ""], [["a b"], ["c d e"]], WITHOUT_JAVA)
    assert scores == {"bleu": 0, "nist": 0, "ter": 1, "rouge_l": 0, "cider": 0}


# ------------------------------------------------------------------------------------------------------------------ METEOR


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_meteor() -> None:
    check_scores(["meteor"])
    perfect = score_texts([references[-1] for references in REFERENCES], REFERENCES, ["meteor"])["meteor"]
    assert perfect == pytest.approx(1)
    found = score_texts(TEXTS, REFERENCES, ["meteor"])["meteor"]
    assert 0.3 < found < 0.7
    assert score_texts([""], [["a | b ||| c"]], ["meteor"])["meteor"] == 0
    assert score_texts(TEXTS, REFERENCES, ["meteor"])["meteor"] == found  # by the same program


def test_meteor_without_java_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FederationError, match="no java on the PATH: install a Java runtime, or leave meteor out"):
        check_scores(SCORES)
    check_scores(WITHOUT_JAVA)  # type: ignore[arg-type]


def test_a_java_that_does_not_work_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "java").write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(text_scores, "_meteor_program", cache(text_scores._meteor_program.__wrapped__))  # one may be running
    check_scores(["meteor"])
    for _ in range(2):
        with pytest.raises(FederationError, match=r"METEOR's Java program ended \(no memory\): check that `java -version` works"):
            score_texts(["a"], [["a"]], ["meteor"])
        assert text_scores._meteor_program.cache_info().currsize == 0  # the next one may work
    gc.collect()  # pipes left open would be found now


# ------------------------------------------------------------------------------------------------------------------ errors


def test_unknown_scores_are_refused() -> None:
    with pytest.raises(FederationError, match="Got the metric 'blue': give some of bleu, nist, meteor, ter, rouge_l, cider"):
        check_scores(["blue"])  # type: ignore[list-item]


@pytest.mark.parametrize(("package", "name"), [("sacrebleu", "ter"), ("sacrebleu", "nist"), ("pycocoevalcap.cider.cider", "cider")])
def test_a_missing_package_is_named(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FederationError, match=rf'package {package}.*pip install "lightning-fed\[nlp\]"'):
        check_scores([name])  # type: ignore[list-item]
