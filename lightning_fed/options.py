"""Options of classes: their names, and types of numbers. jsonargparse's integers have no bounds; those for tensor sizes do."""

import inspect
import math
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, restricted_number_type
from jsonargparse.typing import NonNegativeInt as AnySeed

from lightning_fed.errors import require

LARGEST = 2**32 - 1
"""The largest integer that an option takes: larger ones overflow in libraries. Seeds have their own bound."""

__all__ = [
    "LARGEST",
    "AnySeed",
    "ClosedUnitInterval",
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "parameters_of",
    "require_choices",
    "require_from",
    "require_positive",
]

if TYPE_CHECKING:
    PositiveInt = int
    NonNegativeInt = int
    Fraction = float
else:
    PositiveInt = restricted_number_type("PositiveCount", int, [(">=", 1), ("<=", LARGEST)], docstring="A whole number from 1.")
    NonNegativeInt = restricted_number_type("Count", int, [(">=", 0), ("<=", LARGEST)], docstring="A whole number from 0.")
    Fraction = restricted_number_type("Fraction", float, [(">", 0), ("<=", 1)], docstring="A number in (0, 1].")


def require_from(least: int, **numbers: int | None) -> None:
    """Refuse numbers below a minimum, as the types of the command line do, for values that are passed in Python.

    Args:
        least: 0 or 1.
        **numbers: options by name; None is allowed.
    """
    for name, number in numbers.items():
        require(number is None or number >= least, f"Got {name}={number}: give a whole number from {least}.")


def require_positive(or_zero: bool = False, **numbers: float | None) -> None:
    """Refuse numbers that are not positive, for numbers that need not be integers. NaN and infinity are refused.

    Args:
        or_zero: whether 0 is allowed.
        **numbers: options by name; None is allowed.
    """
    for name, number in numbers.items():
        fits = number is None or (math.isfinite(number) and (number > 0 or (or_zero and number == 0)))
        require(fits, f"Got {name}={number}: give a number {'from' if or_zero else 'above'} 0.")


def require_choices(thing: Any, given: Mapping[str, Any], name: str) -> None:
    """Refuse words and numbers that an option of type ``Literal`` does not have, as the command line does, for values that are
    passed in Python.

    Args:
        thing: a constructor or another function, or a dataclass.
        given: its options by name.
        name: what the message calls it.
    """
    for option, hint in _hints(thing).items():
        choices, value = _choices(hint), given.get(option)
        if choices and isinstance(value, str | int | float):
            said = ", ".join(str(choice) for choice in choices if choice is not None)
            require(value in choices, f"{name} got {option}={value!r}: give one of {said}.")


@cache
def _hints(thing: Any) -> dict[str, Any]:
    """Types of options; empty if one of them is known to type checkers only, or is no type."""
    try:
        return get_type_hints(thing)
    except Exception:  # an annotation may be any text
        return {}


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``, or of a union of such types and None; empty for any other type."""
    if hint is type(None):
        return (None,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [_choices(part) for part in get_args(hint)] if get_origin(hint) in (Union, UnionType) else []
    return tuple(choice for part in parts for choice in part) if all(parts) else ()


def parameters_of(thing: Any) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Named parameters of a class or function, each with the function that declares it. A class that passes on ``**kwargs`` also
    has the parameters of its base class.
    """
    makers = [vars(kind)["__init__"] for kind in thing.__mro__ if "__init__" in vars(kind)] if isinstance(thing, type) else [thing]
    found: dict[str, tuple[inspect.Parameter, Any]] = {}
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        found = {p.name: (p, maker) for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} | found
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    found.pop("self", None)
    return found
