"""How good generated texts are, compared with references: the usual scores, each computed by a library but NIST.

All scores are of the same words: texts are put in lower case and split as ``mteval-v13a`` does, the script of BLEU and NIST with
which the E2E challenge was scored. That challenge's script splits texts otherwise, and drops punctuation, for METEOR, ROUGE-L and
CIDEr, so these three are not comparable with its values to the last digit.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, Literal, get_args

from lightning_fed.data.hub import optional
from lightning_fed.data.text.nist import nist
from lightning_fed.errors import FederationError, require

Score = Literal["bleu", "nist", "meteor", "ter", "rouge_l", "cider"]
SCORES: tuple[Score, ...] = get_args(Score)

References = Sequence[Sequence[str]]
"""Of each text, one or more."""


def score_texts(texts: Sequence[str], references: References, scores: Sequence[Score] = SCORES) -> dict[str, float]:
    """Scores of all texts together, by name.

    ``bleu`` (up to 4-grams, not smoothed), ``meteor`` and ``rouge_l`` are between 0 and 1; ``ter``, edits per word of the
    references, is 0 at best and may exceed 1; ``nist`` (up to 5-grams) is 0 or more, without an upper end; ``cider`` is between 0
    and 10. CIDEr and NIST weight words by how rare they are in these very references, so values for different texts do not
    compare; CIDEr of a single text is 0.

    Args:
        texts: at least one.
        references: of each text.
        scores: which.
    """
    split = optional("sacrebleu.tokenizers.tokenizer_13a", "nlp").Tokenizer13a()
    words = [split(text.lower()) for text in texts]
    of_references = [[split(text.lower()) for text in some] for some in references]
    return {name: float(SCORERS[name][1](words, of_references)) for name in scores}


def check_scores(scores: Sequence[Score]) -> None:
    """Refuse scores that are not known or cannot be computed here."""
    for name in scores:
        require(name in SCORES, f"Got the metric {name!r}: give some of {', '.join(SCORES)}.")
        optional(SCORERS[name][0], "nlp")
    require(
        "meteor" not in scores or shutil.which("java") is not None,
        "METEOR is a Java program, but there is no java on the PATH: install a Java runtime, or leave meteor out of "
        "--data.init_args.metrics.",
    )


def _bleu(texts: list[str], references: list[list[str]]) -> float:
    # force: that texts end in a full stop of its own, as split ones do, is meant.
    bleu = optional("sacrebleu", "nlp").BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(texts, list(zip_longest(*references))).score / 100


def _ter(texts: list[str], references: list[list[str]]) -> float:
    # Not torchmetrics' (1.9), for which an empty text takes no edit.
    return optional("sacrebleu", "nlp").TER().corpus_score(texts, list(zip_longest(*references))).score / 100


def _nist(texts: list[str], references: list[list[str]]) -> float:
    return nist([text.split() for text in texts], [[text.split() for text in some] for some in references])


def _meteor(texts: list[str], references: list[list[str]]) -> float:
    program = _meteor_program()
    try:
        return _coco(program, texts, references)
    except (ValueError, OSError) as error:  # it answered nothing, or takes nothing any more
        program.lock.release()  # else it could never be cleared away
        _meteor_program.cache_clear()
        program.meteor_p.kill()
        said = program.meteor_p.communicate()[1].decode(errors="replace").strip()  # closes the pipes
        raise FederationError(
            f"METEOR's Java program ended ({said or error}): check that `java -version` works and 2 GiB of memory are free, or "
            "leave meteor out of --data.init_args.metrics."
        ) from error


@cache
def _meteor_program() -> Any:
    """It reads its tables for seconds, so one serves the whole process; it ends with it."""
    return optional("pycocoevalcap.meteor.meteor", "nlp").Meteor()


def _coco(scorer: Any, texts: list[str], references: list[list[str]]) -> float:
    """The mean score of one of the scorers made for captions."""
    return scorer.compute_score(dict(enumerate(references)), {number: [text] for number, text in enumerate(texts)})[0]


ROUGE, CIDER = "pycocoevalcap.rouge.rouge", "pycocoevalcap.cider.cider"

SCORERS: dict[Score, tuple[str, Callable[[list[str], list[list[str]]], float]]] = {
    "bleu": ("sacrebleu", _bleu),
    "nist": ("sacrebleu", _nist),  # which splits the texts
    "meteor": ("pycocoevalcap.meteor.meteor", _meteor),
    "ter": ("sacrebleu", _ter),
    "rouge_l": (ROUGE, lambda *texts: _coco(optional(ROUGE, "nlp").Rouge(), *texts)),
    "cider": (CIDER, lambda *texts: _coco(optional(CIDER, "nlp").Cider(), *texts)),
}
"""The package of the extra ``nlp`` that each score takes, and what computes it."""
