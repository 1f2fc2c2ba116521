"""Shares of counts, rounded down."""

import math


def floor_of(share: float, count: int) -> int:
    r""":math:`\lfloor s n \rfloor` of the numbers that are meant: as floats 0.29 · 100 is a little less than 29.

    Args:
        share: s, at least 0, in decimals or as computed.
        count: n.

    >>> floor_of(0.29, 100), floor_of(1 / 3, 3), floor_of(0.99, 5), floor_of(0.7, 90)
    (29, 1, 4, 63)
    """
    return math.floor(share * count * (1 + 1e-12))
