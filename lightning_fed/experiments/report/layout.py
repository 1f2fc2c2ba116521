"""The content of a table, independent of its output format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

MARKS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Entry:
    """A cell of a table."""

    text: str
    bold: bool = False
    note: str = ""


BLANK = Entry("")


@dataclass(frozen=True)
class Column:
    """A column of a table with named rows.

    Args:
        name: its header.
        entry: its entry for a row, by the row's name.
    """

    name: str
    entry: Callable[[str], Entry]


@dataclass(frozen=True)
class Layout:
    """A table with names on the left and right-aligned numbers beside them. A report is a list of them: a table of methods for each
    setting, and further ones, for seeds or clients for example.

    Args:
        title: title of the table; may be empty.
        columns: the header.
        rows: rows with as many entries.
        notes: notes that are needed to read it.
        groups: headings between rows, by the number of the row below.
    """

    title: str
    columns: list[str]
    rows: list[list[Entry]]
    notes: list[str] = field(default_factory=list)
    groups: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, title: str, names: Mapping[str, Entry], columns: Sequence[Column], notes: Sequence[str]) -> "Layout":
        """A table of columns. ``names`` are the first entries of the rows, by the row's name; ``notes`` those that are needed to
        read it.
        """
        rows = [[first, *(column.entry(name) for column in columns)] for name, first in names.items()]
        return cls(title, ["", *(column.name for column in columns)], rows, list(notes))

    def marked(self) -> "Layout":
        """The table with a number behind each entry that has a footnote, and the footnotes among the notes."""
        footnotes = list(dict.fromkeys(entry.note for row in self.rows for entry in row if entry.note))
        marks = {note: str(place).translate(MARKS) for place, note in enumerate(footnotes, start=1)}
        rows = [[Entry(f"{entry.text}{marks.get(entry.note, '')}", entry.bold) for entry in row] for row in self.rows]
        return replace(self, rows=rows, notes=[*self.notes, *(f"{marks[note]} {note}" for note in footnotes)])
