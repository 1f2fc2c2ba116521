"""JSON that somebody else may have written: each field has its type and its range, or the file is refused."""

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_fed.errors import FederationError
from lightning_fed.formatting import shown

T = TypeVar("T")
LARGEST = 2**63 - 1


class Fields:
    """The fields of a JSON object.

    Args:
        content: what was read.
        where: what is said of it: the file, and the place in it.

    Raises:
        FederationError: if it is no object; and from every method, if the field is missing or is not what it should be.
    """

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise FederationError(f"{where} is {shown(content)}, expected an object with fields: no lightning-fed wrote this.")
        self.content: dict[str, Any] = content

    def integer(self, name: str, least: int = 0, most: int = LARGEST) -> int:
        """A whole number between two."""
        value = self._get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.refused(name, f"a whole number from {least}" + (f" to {most}" if most < LARGEST else ""))
        return value

    def number(self, name: str) -> float:
        """A number."""
        self._get(name)
        return numbers({name: self.content[name]}, self.where)[name]

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """A field that may be null or missing, else as ``read`` reads it."""
        return None if self.content.get(name) is None else read(name)

    def text(self, name: str) -> str:
        """A text."""
        if not isinstance(value := self._get(name), str):
            raise self.refused(name, "a text")
        return value

    def entries(self, name: str) -> list[Any]:
        """A list of anything."""
        if not isinstance(value := self._get(name), list):
            raise self.refused(name, "a list")
        return value

    def fields(self, name: str) -> "Fields":
        """An object."""
        return Fields(self._get(name), f"{name} of {self.where}")

    def numbered(self, name: str, least: int, most: int) -> "dict[int, str]":
        """An object whose fields are numbered: the name of each field by its number, which is one of a range."""
        numbers = {}
        for key in self.fields(name).content:
            number = int(key) if key.removeprefix("-").isdecimal() and len(key) < 19 else None
            if number is None or str(number) != key or not least <= number <= most:
                raise FederationError(
                    f"{name} of {self.where} has {shown(key)}, expected clients' numbers from {least} to {most}: no lightning-fed "
                    "wrote this."
                )
            numbers[number] = key
        return numbers

    def refused(self, name: str, expected: str) -> FederationError:
        """The error of a field that is something else."""
        return FederationError(
            f"{self.where} has {name} = {shown(self.content[name])}, expected {expected}: no lightning-fed wrote this."
        )

    def _get(self, name: str) -> Any:
        if name not in self.content:
            raise FederationError(f"{self.where} has no {name}: no lightning-fed wrote this.")
        return self.content[name]


def numbers(content: Any, where: str) -> dict[str, float]:
    """An object whose fields are all numbers, NaN and infinity among them."""
    fields = Fields(content, where)
    for name, value in fields.content.items():
        if type(value) not in (int, float) or (type(value) is int and abs(value) > sys.float_info.max):
            raise fields.refused(name, "a number")
    return fields.content


def parse(text: str | bytes, where: str) -> Any:
    """What a JSON text says. Raises :class:`FederationError` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FederationError(f"{where} is not JSON ({' '.join(str(error).split())}).") from error
