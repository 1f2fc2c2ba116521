"""The NIST score (Doddington, HLT 2002) as computed by ``mteval-v13a``, the script of the E2E challenge."""

import math
from collections import Counter
from collections.abc import Sequence

Words = Sequence[str]

BETA = math.log(2) / math.log(1.5) ** 2
"""Factor in the penalty for short texts: a text of two thirds of the length counts half."""


def nist(texts: Sequence[Words], references: Sequence[Sequence[Words]], longest: int = 5) -> float:
    r"""The sum over n, up to ``longest``, of the mean information of an n-gram of the texts that is in a reference, times a penalty
    for short texts. There is at least one text, and one or more references for each.

    An n-gram counts at most as often as in the reference of the text that has it most often. Its information is :math:`\log_2` of
    the count of its first n - 1 words in all references over its own count (for a word: the number of words over its count). The
    target length is the mean over a text's references. With several references this is not nltk's score, which takes n-grams and
    length of the one reference that is best for each n.
    """
    counts = Counter(ngram for some in references for reference in some for ngram in ngrams(reference, longest))
    words = sum(len(reference) for some in references for reference in some)
    information, possible = [0.0] * longest, [0] * longest
    for text, some in zip(texts, references, strict=True):
        of_references = [Counter(ngrams(reference, longest)) for reference in some]
        for ngram, count in Counter(ngrams(text, longest)).items():
            n = len(ngram)
            possible[n - 1] += count
            if hits := min(count, max(of_reference[ngram] for of_reference in of_references)):
                information[n - 1] += hits * math.log2((counts[ngram[:-1]] if n > 1 else words) / counts[ngram])
    length = sum(map(len, texts))
    if length == 0:
        return 0.0
    expected = sum(sum(map(len, some)) / len(some) for some in references)
    penalty = math.exp(-BETA * math.log(min(1.0, length / expected)) ** 2) if expected else 1.0
    return penalty * sum(found / count for found, count in zip(information, possible, strict=True) if count)


def ngrams(words: Words, longest: int) -> list[tuple[str, ...]]:
    """All sequences of 1 to ``longest`` words."""
    return [tuple(words[start : start + n]) for n in range(1, longest + 1) for start in range(len(words) - n + 1)]
