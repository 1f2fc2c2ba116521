"""Types of options that jsonargparse does not bring along."""

from typing import TYPE_CHECKING

from jsonargparse.typing import restricted_number_type

if TYPE_CHECKING:
    Fraction = float
else:
    Fraction = restricted_number_type("Fraction", float, [(">", 0), ("<=", 1)], docstring="A number in (0, 1].")
