"""Data of one's own, as a table: what goes in, what is to be predicted, and what else is known of each example."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval
from numpy.typing import NDArray

from lightning_fed.data.batches import Inputs, count, take
from lightning_fed.data.checked import pick_column
from lightning_fed.data.federated import FederatedDataModule, Pools
from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.natural import ByColumn
from lightning_fed.data.split import TEST, TRAIN, VAL
from lightning_fed.errors import FederationError, require

ROLES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
"""What sets of examples are called, in lower case."""

FEW, MANY = 20, 100
"""As many different whole numbers can be classes of however few examples; more than that cannot be, of however many."""

MISSING = "Some examples have no target; the first is in row"


class Table(NamedTuple):
    """Examples as they were read, one row each.

    Args:
        inputs: what a network takes.
        targets: what is to be predicted, shape (N,): strings or whole numbers.
        columns: what else is known, by name, each of shape (N,): an array, or what becomes one where it is sliced.
        sets: the set that each example is of, one of :data:`ROLES`, shape (N,); None: there is one set.
        class_names: what the classes are called whose numbers the targets are; None: the targets say it.
    """

    inputs: Inputs
    targets: NDArray[Any]
    columns: Mapping[str, Any]
    sets: NDArray[Any] | None = None
    class_names: list[str] | None = None


class TableData(FederatedDataModule):
    """Data of one's own, in whatever files. A kind of file overrides :meth:`read`; see docs/your_data.md.

    Classes are found. Targets that are strings are classes in alphabetical order; whole numbers from 0 without gaps are classes as
    they are, and other whole numbers are classes in their order, unless they are too many to be classes: more than a quarter of the
    examples, or more than 100. Where several places have a part of the data each, one of them may
    lack a class: ``classes`` says which there are, and a class then has the same number everywhere.

    A validation set without a test set is what is tested on, as is usual where test labels are not published.

    Args:
        client: the column that says whose an example is: short for a partition :class:`ByColumn`.
        split_column: the column that says which set an example is of: ``train``, ``val`` or ``test``.
        split: see :class:`FederatedDataModule`. None: ``official`` if the data have a test set of their own, else ``pooled``.
        test_share: see :class:`FederatedDataModule`. Where it is given and ``split`` is not, that is ``pooled``.
        classes: the classes, as the targets name them, in the order of their numbers. None: those that are found.
        **kwargs: see :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        client: str | None = None,
        split_column: str | None = None,
        partition: Partitioner | None = None,
        split: Literal["pooled", "official"] | None = None,
        test_share: ClosedUnitInterval | None = None,
        classes: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        require(
            classes is None or len(set(classes)) == len(classes) > 0,
            f"Got classes={classes}: name each class once.",
        )
        require(
            client is None or partition is None,
            f"Got client={client!r} and partition={partition}, of which the first is short for a ByColumn: give one of them.",
        )
        partition = partition if client is None else ByColumn(client)
        super().__init__(partition=partition, split=split or "pooled", test_share=test_share, **kwargs)
        self.split_column = split_column
        self._finds_split = split is None and test_share is None
        self._table: Table | None = None
        self._classes: int | None = None if classes is None else len(classes)
        self.classes = classes
        if classes is not None:
            self.class_names = list(classes)
        self._roles: NDArray[np.int64] | None = None

    def read(self) -> Table:
        """All examples, of whatever set."""
        raise NotImplementedError(f"{type(self).__name__} must override read().")

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """How many classes there are. Unless ``classes`` says it, the data are read, but images in files are not decoded."""
        if self._classes is None:
            self._read()
        assert self._classes is not None
        return self._classes

    def setup(self, stage: str | None = None) -> None:
        if self._data is None:
            self._read()
            if self._finds_split:
                self.split = "official" if self._roles is not None and TEST in self._roles else "pooled"
                self.test_share = None if self.split == "official" else self.test_share
            super().setup(stage)
            self._table = self._roles = None  # what is needed of them is in the data

    def load(self) -> Pools:
        """The examples that are not for test, and those that are."""
        table = self._read()
        labels = torch.from_numpy(table.targets)
        if self._roles is None:
            return table.inputs, labels, take(table.inputs, slice(0)), labels[:0]
        train, test = map(torch.from_numpy, self._places())
        return take(table.inputs, train), labels[train], take(table.inputs, test), labels[test]

    def column(self, name: str) -> NDArray[Any]:
        values = pick_column(type(self).__name__, self._read().columns, name)
        return values if self._roles is None else values[np.concatenate(self._places())]

    def validation(self) -> NDArray[np.bool_] | None:
        self._read()
        return None if self._roles is None else self._roles[self._places()[0]] == VAL

    def _read(self) -> Table:
        """What was read, once, with the targets as numbers from 0. Notes what the classes are called."""
        if self._table is None:
            table = self.read()
            require(len(table.targets) > 0, f"{type(self).__name__} has no examples: give at least one per client.")
            rows = count(table.inputs), len(table.targets)
            require(
                rows[0] == rows[1], f"{type(self).__name__} has {rows[0]} inputs and {rows[1]} targets: give one target per input."
            )
            sets = table.sets
            if self.split_column is not None:
                sets = pick_column(type(self).__name__, table.columns, self.split_column)
            self._roles = None if sets is None else roles_of(sets, self.split_column)
            if self.classes is not None:
                labels = self._among(self.classes, table)
            else:
                known = table.class_names
                labels, self.class_names = numbered(table.targets) if known is None else (table.targets.astype(np.int64), known)
                self._classes = int(labels.max()) + 1 if self.class_names is None else len(self.class_names)
            self._table = table._replace(targets=labels)
        return self._table

    def _among(self, classes: list[str], table: Table) -> NDArray[np.int64]:
        """The targets as numbers of classes that are known."""
        names = table.targets if table.class_names is None else np.asarray(table.class_names)[table.targets.astype(np.int64)]
        found, place = np.unique(names.astype(str), return_inverse=True)
        numbers = {name: number for number, name in enumerate(classes)}
        unknown = [name for name in found.tolist() if name not in numbers]
        require(
            not unknown,
            f"{type(self).__name__} found {', '.join(map(repr, unknown[:3]))} among the targets, and classes are "
            f"{', '.join(map(repr, classes))}: name all that there are.",
        )
        return np.array([numbers[name] for name in found.tolist()])[place]

    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the examples of the training set, those for validation among them, are in the table, and those of the test set."""
        assert self._roles is not None
        return np.flatnonzero(self._roles != TEST), np.flatnonzero(self._roles == TEST)


def roles_of(sets: NDArray[Any], column: str | None) -> NDArray[np.int64]:
    """What each example is for.

    Args:
        sets: the set that each example is of, shape (N,).
        column: where that is said, for an error.
    """
    where = "The division into sets" if column is None else f"The column {column!r}"
    names = np.char.lower(sets.astype(str))
    unknown = [name for name in np.unique(names).tolist() if name not in ROLES]
    require(not unknown, f"{where} has {', '.join(map(repr, unknown[:3]))}: expected one of {', '.join(ROLES)}.")
    found, numbers = np.unique(names, return_inverse=True)
    roles = np.array([ROLES[name] for name in found.tolist()])[numbers]
    if TEST not in roles:
        roles = np.where(roles == VAL, TEST, roles)
    require(TRAIN in roles, f"{where} has no training set: name one train.")
    return roles


def numbered(targets: NDArray[Any]) -> tuple[NDArray[np.int64], list[str] | None]:
    """Targets as numbers from 0, and what they stand for; None where they have been such numbers.

    Args:
        targets: strings or whole numbers, shape (N,).
    """
    if targets.dtype == object:
        values = targets.tolist()
        require(
            None not in values, f"{MISSING} {values.index(None) if None in values else ''}: give one per example, or leave it out."
        )
    if targets.dtype.kind == "f" and not (finite := np.isfinite(targets)).all():
        raise FederationError(
            f"{MISSING} {int(np.argmin(finite))}, which has {targets[np.argmin(finite)]}: give a class, or leave it out."
        )
    try:
        found, labels = np.unique(targets, return_inverse=True)
    except TypeError as error:
        raise FederationError(f"The targets are of several kinds ({error}): give all as names, or all as numbers.") from error
    if np.issubdtype(found.dtype, np.floating) and (found == np.floor(found)).all():
        found = found.astype(np.int64)
    if np.issubdtype(found.dtype, np.floating):
        row = int(np.argmin(targets == np.floor(targets)))
        raise FederationError(
            f"The targets are {len(found)} numbers such as {targets[row]:g}, in row {row}, which are not whole: give classes, as "
            "names or numbers."
        )
    plain = np.issubdtype(found.dtype, np.integer) and np.array_equal(found, np.arange(len(found)))
    if np.issubdtype(found.dtype, np.integer) and not plain and len(found) > max(FEW, min(MANY, len(targets) / 4)):
        raise FederationError(
            f"The targets of {len(targets)} examples are {len(found)} different numbers such as {found[-1]}, which looks like a "
            "quantity: if they are classes, number them from 0 without gaps, or name them in data.init_args.classes; tables of "
            "numbers predict quantities with data.init_args.task regression."
        )
    return labels.astype(np.int64), None if plain else [str(name) for name in found.tolist()]


def sets_of(path: str, test_path: str | None, endings: tuple[str, ...]) -> tuple[list[Path], list[str] | None]:
    """The files of a training set and of a test set, if there is one, and the set that each file is of; None: there is one set."""
    train = find_files(path, endings)
    if test_path is None:
        return train, None
    test = find_files(test_path, endings)
    return train + test, ["train"] * len(train) + ["test"] * len(test)


def find_files(path: str, endings: tuple[str, ...]) -> list[Path]:
    """A file, or all files anywhere in a folder that end so, in order of their paths."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise FederationError(f"Found neither a file nor a folder {place.absolute()}: check the path in --data.init_args.")
    found = sorted(file for file in place.rglob("*") if file.suffix.lower() in endings and file.is_file())
    kinds = " or ".join(endings)
    require(len(found) > 0, f"The folder {place.absolute()} has no files that end in {kinds}: check the path in --data.init_args.")
    return found
