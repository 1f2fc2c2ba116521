"""Numbers and suggestions in readable form."""

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches

THIN = "\u202f"
"""A narrow no-break space between groups of three digits: commas and points are ambiguous between languages."""


def grouped(number: float, digits: int = 0) -> str:
    """A number with its digits in groups of three."""
    return f"{number:,.{digits}f}".replace(",", THIN)


def amount(number: float) -> str:
    """A number without decimals, exact up to a billion, so that a table fits on a screen."""
    return grouped(number) if number < 1e9 else f"{number:.4g}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as 1 round, 2 rounds."""
    return f"{number} {noun}{'s' * (number != 1)}"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, …, 11th."""
    ending = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def sized(number: float) -> str:
    """A size in bytes with a decimal unit (1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:  # more is shown as 1 of the next unit
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def nearest(name: str, names: Iterable[str], dashes: str = "") -> str:
    """A question with the most similar name, in any case; empty if none is similar."""
    lower = {known.lower(): known for known in names}
    found = get_close_matches(name.lower(), list(lower), 1)
    return f" (did you mean {dashes}{lower[found[0]]}?)" if found else ""


def shown(value: object) -> str:
    """A value in an error message: its repr in at most 80 characters and one line."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def escaped(text: str, longest: int = 1000) -> str:
    """Foreign text in a printable form: one line, cut, without control characters."""
    words = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: longest + 1])
    return words if len(words) <= longest else f"{words[:longest]}…"
