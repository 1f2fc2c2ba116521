"""Your own data as a table: inputs, targets and further columns."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fed.data.batches import Inputs, count, take
from lightning_fed.data.checked import pick_column
from lightning_fed.data.federated import FederatedDataModule, Pools
from lightning_fed.data.lines import unpacked
from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.natural import ByColumn, unnamed
from lightning_fed.data.paths import is_hidden, refuse_shared
from lightning_fed.data.split import TEST, TRAIN, VAL
from lightning_fed.errors import FederationError, require
from lightning_fed.options import ClosedUnitInterval

log = logging.getLogger(__name__)

ROLES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
"""Names of sets of examples, in lower case."""

FEW, MANY = 20, 100
"""Up to ``FEW`` different integers always count as classes; more than ``MANY`` never do."""

MISSING = "Some examples have no target; the first is in row"


class Table(NamedTuple):
    """Examples as they were read, one per row.

    Args:
        inputs: inputs of a network.
        targets: targets, shape (N,): strings or integers.
        columns: further columns, by name, each of shape (N,): an array, or an object that becomes one when it is sliced.
        sets: the set of each example, one of :data:`ROLES`, shape (N,). None: there is one set.
        class_names: names of the classes whose numbers are the targets. None: the targets are the names.
    """

    inputs: Inputs
    targets: NDArray[Any]
    columns: Mapping[str, Any]
    sets: NDArray[Any] | None = None
    class_names: list[str] | None = None


class TableData(FederatedDataModule):
    """Your own data, in any kind of file. A kind of file overrides :meth:`read`; see docs/your_data.md.

    Classes are determined from the targets. Strings are classes in alphabetical order. Integers from 0 without gaps are the numbers
    of classes, and other integers are classes in their order, unless there are too many of them: more than 100, or more than 20
    and a quarter of the examples. If the data are distributed over several places, one of them may lack a class: ``classes`` lists
    all of them, so that a class has the same number everywhere.

    A validation set without a test set is used as the test set, as is usual if test labels are not published.

    Args:
        client: column that names an example's client: short for a partition :class:`ByColumn`. In CSV, TSV and Parquet files,
            1.0 is the client 1 if all are numbers, and so are groups: programs write 1 as 1.0 where a column has gaps.
        group: column that names whose row it is, such as the patient of a scan. Rows of a group stay together: with one client, and
            in one of its parts, so that nobody is trained on and tested. Shares and limits count groups; partitions by label take
            the label of a group's first row.
        split_column: column that names an example's set: ``train``, ``val`` or ``test``.
        split: see :class:`FederatedDataModule`. None: ``official`` if the data have their own test set, else ``pooled``.
        test_share: see :class:`FederatedDataModule`. If it is given and ``split`` is not, ``split`` is ``pooled``.
        classes: the classes, as the targets name them, in the order of their numbers. None: those that are found.
        **kwargs: see :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        client: str | None = None,
        group: str | None = None,
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
            f"Got client={client!r} and partition={partition}, but client is short for a ByColumn: give one of them.",
        )
        partition = partition if client is None else ByColumn(client)
        super().__init__(partition=partition, split=split or "pooled", test_share=test_share, **kwargs)
        self.group = group
        self.split_column = split_column
        self._finds_split = split is None and test_share is None
        self._table: Table | None = None
        self._classes: int | None = None if classes is None else len(classes)
        self.classes = classes
        if classes is not None:
            self.class_names = list(classes)
        self._roles: NDArray[np.int64] | None = None
        self._order: NDArray[np.int64] | None = None  # the row of each example, if sets are not in order

    def read(self) -> Table:
        """All examples of all sets."""
        raise NotImplementedError(f"{type(self).__name__} must override read().")

    @property
    def owner_column(self) -> str | None:
        """The column that names an example's client; None if none does."""
        return self.partition.column if isinstance(self.partition, ByColumn) else None

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of classes. Unless ``classes`` is given, the data are read, but images in files are not decoded."""
        if self._classes is None:
            self._read()
        assert self._classes is not None
        return self._classes

    def _set_up(self) -> None:
        self._read()
        if self._finds_split:
            self.split = "official" if self._roles is not None and TEST in self._roles else "pooled"
            self.test_share = None if self.split == "official" else self.test_share
        super()._set_up()
        self._order = None if self._roles is None else np.concatenate(self._places())
        self._table = self._roles = None  # no longer needed
        if self.predicts_labels:
            self._warn_of_untrained_classes()

    def _warn_of_untrained_classes(self) -> None:
        """Warn about classes that are tested, but that no client trains on."""
        labels = self._loaded().labels
        tested = labels[torch.from_numpy(np.concatenate([split.test for split in self._splits]))].unique()
        lacking = tested[self.label_counts().sum(dim=0)[tested] == 0].tolist()
        if lacking:
            names = ", ".join(repr(str(self.class_names[k] if self.class_names else k)) for k in lacking[:5])
            log.warning(
                f"{type(self).__name__}: {names}{', …' * (len(lacking) > 5)} among the targets occurs in test examples only, so no "
                "client can learn it: move some to the training set, or take them out."
            )

    def load(self) -> Pools:
        """The examples that are not for test, and those that are."""
        table = self._read()
        labels = torch.from_numpy(table.targets)
        if self._roles is None:
            return table.inputs, labels, take(table.inputs, slice(0)), labels[:0]
        train, test = map(torch.from_numpy, self._places())
        return take(table.inputs, train), labels[train], take(table.inputs, test), labels[test]

    def column(self, name: str) -> NDArray[Any]:
        return self._of_groups(self._in_order(pick_column(type(self).__name__, self._read().columns, name)), self.row_groups, name)

    def find_groups(self, inputs: Inputs) -> NDArray[np.int64] | None:
        if self.group is None:
            return super().find_groups(inputs)
        given = self._in_order(pick_column(type(self).__name__, self._read().columns, self.group))
        missing = unnamed(given)
        require(
            not missing,
            f"{len(missing)} of {len(given)} rows have nothing in the column {self.group!r}, by which rows stay together: fill it "
            "in, or leave them out of the data.",
        )
        _, first, numbers = np.unique(given.astype(str), return_index=True, return_inverse=True)
        groups: NDArray[np.int64] = np.argsort(np.argsort(first))[numbers]  # in order of their first rows: the test set's come last
        if self._roles is not None and self.split == "official":
            names = np.array(["train", "val", "test"])  # in the order of TRAIN, VAL, TEST
            self._of_groups(names[self._in_order(self._roles)], groups, self.split_column or "set")
        return groups

    def given_places(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        return examples if self._order is None else self._order[examples]

    def validation(self) -> NDArray[np.bool_] | None:
        self._read()
        if self._roles is None:
            return None
        roles = self._of_groups(self._in_order(self._roles), self.row_groups, self.split_column or "set")
        return roles[roles != TEST] == VAL

    def _read(self) -> Table:
        """The table, read once, with the targets as numbers from 0. Sets the names of the classes."""
        if self._table is None:
            table = self.read()
            require(len(table.targets) > 0, f"{type(self).__name__} has no examples: give at least one per client.")
            rows = count(table.inputs), len(table.targets)
            require(
                rows[0] == rows[1], f"{type(self).__name__} has {rows[0]} inputs and {rows[1]} targets: give one target per input."
            )
            names = table.targets.tolist() if table.targets.dtype.kind in "OU" else []
            missing = next((row for row, name in enumerate(names) if name is None or name == ""), None)
            require(missing is None, f"{MISSING} {missing}: give one per example, or leave it out.")
            if table.class_names is not None and (hidden := table.targets < 0).any():  # -1, as in test sets of the hub
                raise FederationError(f"{MISSING} {int(hidden.argmax())}: give one per example, or leave it out.")
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
        """The targets as numbers of given classes."""
        names = table.targets if table.class_names is None else np.asarray(table.class_names)[table.targets.astype(np.int64)]
        found, place = np.unique(names.astype(str), return_inverse=True)
        numbers = {name: number for number, name in enumerate(classes)}
        unknown = [name for name in found.tolist() if name not in numbers]
        require(
            not unknown,
            f"{type(self).__name__} found {', '.join(map(repr, unknown[:3]))} among the targets, but classes are "
            f"{', '.join(map(repr, classes))}: name all that there are.",
        )
        return np.array([numbers[name] for name in found.tolist()])[place]

    def _in_order(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of rows in the order in which :meth:`load` returns these."""
        return values if self._roles is None else values[np.concatenate(self._places())]

    def _of_groups(self, values: NDArray[Any], groups: NDArray[np.int64] | None, column: str) -> NDArray[Any]:
        """A value for each group of rows, of rows' values in a column, in which a group's rows must agree."""
        if self.group is None or groups is None:
            return values
        own = values[np.unique(groups, return_index=True)[1]]
        apart = own[groups] != values
        if apart.any():
            row = int(np.argmax(apart))
            here = self._in_order(pick_column(type(self).__name__, self._read().columns, self.group))[row]
            raise FederationError(
                f"Rows whose {self.group} is {str(here)!r} differ in {column!r} ({own[groups][row]} and {values[row]}), "
                "but rows of a group stay together: correct the data, or give another group."
            )
        return own

    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions in the table of the training set, including validation examples, and of the test set."""
        assert self._roles is not None
        return np.flatnonzero(self._roles != TEST), np.flatnonzero(self._roles == TEST)


def check_columns(inputs: Sequence[str], targets: Sequence[str]) -> None:
    """Refuse a column that is both an input and a target, which could be read off, and a target that is named twice."""
    shared = next((name for name in targets if name in inputs), None)
    require(shared is None, f"Got the column {shared!r} as input and as target, which could be read off: leave it out of input.")
    require(len({*targets}) == len(targets), f"Got target={list(targets)}: name each column once.")


def roles_of(sets: NDArray[Any], column: str | None) -> NDArray[np.int64]:
    """The role of each example, from the name of its set, shape (N,). Errors name the ``column`` of these names."""
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
    """Targets, strings or integers of shape (N,), as numbers from 0, and the names that they stand for; None if they already were
    such numbers.
    """
    if targets.dtype.kind == "f" and not (finite := np.isfinite(targets)).all():
        raise FederationError(
            f"{MISSING} {int(np.argmin(finite))}, which has {targets[np.argmin(finite)]}: give a class, or leave it out."
        )
    try:
        found, labels = np.unique(targets, return_inverse=True)
    except TypeError as error:
        raise FederationError(f"The targets are of several kinds ({error}): give all as names, or all as numbers.") from error
    if found.dtype.kind == "f":
        row = int(np.argmin(targets == np.floor(targets)))
        require(
            bool((found == np.floor(found)).all()),
            f"The targets are {len(found)} numbers such as {targets[row]:g}, in row {row}, which are not whole: give classes, as "
            "names or numbers.",
        )
        found = found.astype(np.int64)
    is_whole = np.issubdtype(found.dtype, np.integer)
    plain = is_whole and np.array_equal(found, np.arange(len(found)))
    if is_whole and not plain and len(found) > max(FEW, min(MANY, len(targets) / 4)):
        raise FederationError(
            f"The targets of {len(targets)} examples are {len(found)} different numbers such as {found[-1]}, which looks like a "
            "quantity: if they are classes, number them from 0 without gaps, or name them in data.init_args.classes; tables of "
            "numbers predict quantities with data.init_args.task regression."
        )
    return labels.astype(np.int64), None if plain else [str(name) for name in found.tolist()]


def sets_of(path: str, test_path: str | None, endings: tuple[str, ...]) -> tuple[list[Path], list[str] | None]:
    """The files of a training set and of a test set, if there is one, and the set of each file. None: there is one set."""
    train = find_files(path, endings)
    if test_path is None:
        return train, None
    test = find_files(test_path, endings)
    refuse_shared(train, test)
    return train + test, ["train"] * len(train) + ["test"] * len(test)


def find_files(path: str, endings: tuple[str, ...]) -> list[Path]:
    """A file, or all files anywhere in a folder with these endings, in order of their paths, without hidden ones.

    Raises:
        FederationError: if there is none, or if one of them is there compressed as well.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise FederationError(f"Found neither a file nor a folder {place.absolute()}: check the path in --data.init_args.")
    found = sorted(
        file for file in place.rglob("*") if file.name.lower().endswith(endings) and file.is_file() and not is_hidden(file, place)
    )
    kinds = " or ".join(endings)
    require(len(found) > 0, f"The folder {place.absolute()} has no files that end in {kinds}: check the path in --data.init_args.")
    both = next((file for file in found if unpacked(file) != file and unpacked(file) in found), None)
    require(both is None, f"The folder has {both} and the same file uncompressed: take one out.")
    return found
