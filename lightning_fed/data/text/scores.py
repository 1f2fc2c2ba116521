"""Scores of generated texts against references; all but NIST are computed by libraries.

All scores use the same words: texts are lower-cased and split as in ``mteval-v13a``, the script of BLEU and NIST with which the E2E
challenge was scored. For METEOR, ROUGE-L and CIDEr that challenge's script splits texts differently and drops punctuation, so these
three are not comparable with its values to the last digit.
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
"""One or more references for each text."""


def score_texts(texts: Sequence[str], references: References, scores: Sequence[Score] = SCORES) -> dict[str, float]:
    """Scores of all texts together (at least one), by name; each text has one or more references.

    ``bleu`` (up to 4-grams, not smoothed), ``meteor`` and ``rouge_l`` are between 0 and 1; ``ter``, edits per word of the
    references, is 0 at best and may exceed 1; ``nist`` (up to 5-grams) is 0 or more, without an upper bound; ``cider`` is between 0
    and 10. CIDEr and NIST weight words by how rare they are in the given references, so values for different texts are not
    comparable; CIDEr of a single text is 0.
    """
    split = optional("sacrebleu.tokenizers.tokenizer_13a", "nlp").Tokenizer13a()
    words = [split(text.lower()) for text in texts]
    of_references = [[split(text.lower()) for text in some] for some in references]
    return {name: float(SCORERS[name][1](words, of_references)) for name in scores}


def check_scores(scores: Sequence[Score]) -> None:
    """Refuse unknown scores, and those that cannot be computed here."""
    for name in scores:
        require(name in SCORES, f"Got the metric {name!r}: give some of {', '.join(SCORES)}.")
        optional(SCORERS[name][0], "nlp")
    require(
        "meteor" not in scores or shutil.which("java") is not None,
        "METEOR is a Java program, but there is no java on the PATH: install a Java runtime, or leave meteor out of "
        "--data.init_args.metrics.",
    )


def _bleu(texts: list[str], references: list[list[str]]) -> float:
    # force: texts end in a separate full stop on purpose, as split texts do.
    bleu = optional("sacrebleu", "nlp").BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(texts, list(zip_longest(*references))).score / 100


def _ter(texts: list[str], references: list[list[str]]) -> float:
    # Not torchmetrics' (1.9), which counts no edits for an empty text.
    return optional("sacrebleu", "nlp").TER().corpus_score(texts, list(zip_longest(*references))).score / 100


def _nist(texts: list[str], references: list[list[str]]) -> float:
    return nist([text.split() for text in texts], [[text.split() for text in some] for some in references])


def _meteor(texts: list[str], references: list[list[str]]) -> float:
    program = _meteor_program()
    try:
        return _coco(program, texts, references)
    except (ValueError, OSError) as error:  # the program returned nothing, or has ended
        program.lock.release()  # otherwise it could not be deleted
        _meteor_program.cache_clear()
        program.meteor_p.kill()
        said = program.meteor_p.communicate()[1].decode(errors="replace").strip()  # closes the pipes
        raise FederationError(
            f"METEOR's Java program ended ({said or error}): check that `java -version` works and 2 GiB of memory are free, or "
            "leave meteor out of --data.init_args.metrics."
        ) from error


@cache
def _meteor_program() -> Any:
    """The METEOR program, one for the whole process, because it takes seconds to start."""
    return optional("pycocoevalcap.meteor.meteor", "nlp").Meteor()


def _coco(scorer: Any, texts: list[str], references: list[list[str]]) -> float:
    """The mean score of one of the scorers for captions."""
    return scorer.compute_score(dict(enumerate(references)), {number: [text] for number, text in enumerate(texts)})[0]


ROUGE, CIDER = "pycocoevalcap.rouge.rouge", "pycocoevalcap.cider.cider"

SCORERS: dict[Score, tuple[str, Callable[[list[str], list[list[str]]], float]]] = {
    "bleu": ("sacrebleu", _bleu),
    "nist": ("sacrebleu", _nist),  # for splitting the texts
    "meteor": ("pycocoevalcap.meteor.meteor", _meteor),
    "ter": ("sacrebleu", _ter),
    "rouge_l": (ROUGE, lambda *texts: _coco(optional(ROUGE, "nlp").Rouge(), *texts)),
    "cider": (CIDER, lambda *texts: _coco(optional(CIDER, "nlp").Cider(), *texts)),
}
"""For each score the package of the extra ``nlp`` that it needs, and its function."""
