"""Numbers as people read them."""

THIN = "\u202f"
"""A narrow space that no line breaks at, between groups of three digits: neither 1,234 nor 1.234, which are 1.234 to somebody."""


def grouped(number: float, digits: int = 0) -> str:
    """A number with its digits in groups of three."""
    return f"{number:,.{digits}f}".replace(",", THIN)


def in_bytes(number: float) -> str:
    """A number of bytes in three or four digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
