"""Correctness of answers: numbers in GSM8K's format, and short texts."""

import re
import string

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")

MARKED_NUMBER = re.compile(rf"####\s*({NUMBER.pattern})")
"""The end of GSM8K's answers."""

BETWEEN_WORDS = re.compile(rf"(?!(?<![\w-])-\.?\d|(?<![^\W\d])(?<!\.)\.\d)[{re.escape(string.punctuation)}]")
"""Punctuation, except a number's sign and decimal point."""


def is_exact(answer: str, reference: str) -> bool:
    """Whether an answer equals the reference. If the reference has ``#### number``, the number after the answer's last such mark
    must be the same (GSM8K's strict match); else the texts are compared in lower case, with blanks for punctuation except the sign
    and the decimal point of numbers. If one of them is punctuation only, or empty, the texts are compared as they are.
    """
    if wanted := MARKED_NUMBER.findall(reference):
        said = MARKED_NUMBER.findall(answer)
        return bool(said) and _plain(said[-1]) == _plain(wanted[-1])
    said_words, words = _words(answer), _words(reference)
    return said_words == words if said_words and words else answer.strip() == reference.strip()


def ends_with_number(answer: str, reference: str) -> bool:
    """Whether the last number of an answer is the last of the reference (GSM8K's flexible match)."""
    said, wanted = (NUMBER.findall(text) for text in (answer, reference))
    return bool(said) and bool(wanted) and _plain(said[-1]) == _plain(wanted[-1])


def _plain(number: str) -> float:
    return float(number.replace(",", "").replace("$", ""))


def _words(text: str) -> list[str]:
    return BETWEEN_WORDS.sub(" ", text.lower().replace("-$", "-")).split()
