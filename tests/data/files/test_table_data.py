"""What all data of one's own have in common: classes are found, sets and clients are columns."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.data import IID, ByColumn, Table, TableData
from lightning_fed.data.files.table import numbered, roles_of
from lightning_fed.data.split import TEST, TRAIN, VAL
from lightning_fed.errors import FederationError

SETS = np.array(["train", "Validation", "test", "train", "dev", "test"] * 6)
USERS = np.repeat(["x", "y", "z"], 12)
PATIENTS = np.array([f"p{(row % 12) // 2 + 6 * (row // 12)}" for row in range(36)])  # two rows each, of one user
GAPS = np.where(PATIENTS == "p3", "", PATIENTS)
VISITS = np.array([f"v{row % 9}" for row in range(36)])  # of several users and sets


class Given(TableData):
    """Numbered rows."""

    def __init__(self, targets: Any = None, sets: Any = None, names: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.given = np.arange(36) % 2 if targets is None else np.array(targets), sets, names
        self.reads = 0

    def read(self) -> Table:
        self.reads += 1
        targets, sets, names = self.given
        columns = {"user": USERS, "set": SETS, "patient": PATIENTS, "visit": VISITS, "gaps": GAPS}
        return Table(torch.arange(len(targets))[:, None].float(), targets, columns, sets, names)


def numbers(data: TableData, client: int) -> list[list[int]]:
    """The rows of a client's parts."""
    own = data.client(client)
    return [sorted(own.data[part][0].flatten().long().tolist()) for part in own.splits]


@pytest.mark.parametrize(
    ("targets", "labels", "names"),
    [
        (["b", "a", "b"], [1, 0, 1], ["a", "b"]),
        ([0, 2, 1], [0, 2, 1], None),
        ([0.0, 1.0, 1.0], [0, 1, 1], None),
        ([5, 1, 3], [2, 0, 1], ["1", "3", "5"]),
        ([0, 2, 2], [0, 1, 1], ["0", "2"]),
        ([-1, 1, 1], [0, 1, 1], ["-1", "1"]),
        ([True, False, True], [1, 0, 1], ["False", "True"]),
    ],
)
def test_classes_are_found(targets: list[Any], labels: list[int], names: list[str] | None) -> None:
    assert (numbered(np.array(targets))[0].tolist(), numbered(np.array(targets))[1]) == (labels, names)


@pytest.mark.parametrize(("most", "examples"), [(20, 21), (50, 200), (100, 10_000)])
def test_a_quantity_is_not_taken_for_classes(most: int, examples: int) -> None:
    """A few whole numbers name classes; prices do not."""
    few, many = (10 * (np.arange(examples) % count) for count in (most, most + 1))
    assert numbered(few)[1] == [str(10 * number) for number in range(most)]
    with pytest.raises(FederationError, match=f"{examples} examples are {most + 1} different numbers"):
        numbered(many)
    assert numbered(many // 10)[1] is None  # numbered already


def test_classes_that_are_named_are_taken_as_they_are() -> None:
    data = Given(names=["no", "yes", "maybe"], client="user")
    assert data.num_classes == 3
    data.setup()
    assert data.class_names == ["no", "yes", "maybe"]


def test_the_data_are_read_once_and_let_go() -> None:
    data = Given(client="user", split_column="set")
    assert data.num_classes == 2
    assert data.num_clients == 3
    data.client(0)
    assert data.reads == 1
    assert data._table is None
    assert data.num_classes == 2


@pytest.mark.parametrize("options", [{"client": "user"}, {"partition": ByColumn("user")}])
def test_a_split_column_says_what_an_example_is_for(options: dict[str, Any]) -> None:
    data = Given(split_column="set", **options)
    assert numbers(data, 1) == [[12, 15, 18, 21], [13, 16, 19, 22], [14, 17, 20, 23]]
    assert data.split == "official"


def test_a_fixed_split_of_clients_that_are_dealt() -> None:
    data = Given(split_column="set", partition=IID(), num_clients=2)
    both = [sorted(a + b) for a, b in zip(numbers(data, 0), numbers(data, 1), strict=True)]
    assert both == [np.flatnonzero(np.isin(SETS, names)).tolist() for names in (["train"], ["Validation", "dev"], ["test"])]


def patients(data: TableData) -> list[list[set[str]]]:
    """The patients of each client's parts."""
    return [[{*PATIENTS[rows]} for rows in numbers(data, client)] for client in range(data.num_clients)]


@pytest.mark.parametrize("options", [{"client": "user"}, {"partition": IID(), "num_clients": 2}])
def test_rows_of_a_group_stay_together(options: dict[str, Any]) -> None:
    """A patient who was trained on is not tested on, and shares count patients."""
    data = Given(group="patient", val_share=0.2, test_share=0.2, **options)
    parts = [part for client in patients(data) for part in client]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 18
    assert sum(client.num_train + client.num_val + client.num_test for client in data.clients) == 36
    apart = [part for client in patients(Given(val_share=0.2, test_share=0.2, **options)) for part in client]
    assert sum(map(len, apart)) > 18
    limited = Given(group="patient", limit_examples=1, **options)
    assert all(client.num_train == 2 for client in limited.clients)


def test_a_group_is_in_one_set_and_with_one_client() -> None:
    sets = np.array([("train", "val", "test")[int(name[1:]) % 3] for name in PATIENTS])
    data = Given(sets=sets, group="patient", client="user")
    assert [[len(part) for part in client] for client in patients(data)] == [[2, 2, 2]] * 3
    assert numbers(data, 0) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    for options, message in (
        ({"client": "user", "group": "visit"}, "Rows whose visit is 'v3' differ in 'user' .x and y., but rows of a group stay"),
        ({"split_column": "set", "group": "patient"}, "Rows whose patient is 'p0' differ in 'set' .train and val., but"),
        ({"group": "gaps"}, "2 of 36 rows have nothing in the column 'gaps'"),
        ({"group": "pateint"}, "has no column 'pateint'"),
    ):
        with pytest.raises(FederationError, match=message):
            Given(**options).setup()
    divided = patients(Given(split_column="set", split="pooled", group="patient", client="user"))  # its sets are not used
    assert sum(len(part) for client in divided for part in client) == 18


def test_sets_of_the_data_count_as_well_and_a_column_counts_more() -> None:
    halves = np.repeat(["train", "test"], 18)
    data = Given(sets=halves, partition=IID(), num_clients=2, val_share=0)
    assert sorted(numbers(data, 0)[2] + numbers(data, 1)[2]) == list(range(18, 36))
    data = Given(sets=halves, split_column="set", client="user")
    assert numbers(data, 0)[2] == [2, 5, 8, 11]


def test_pooled_if_asked_or_if_there_is_no_test_set() -> None:
    for data in (
        Given(split_column="set", client="user", split="pooled"),
        Given(split_column="set", client="user", test_share=0.2),
        Given(client="user"),
    ):
        data.setup()
        assert data.split == "pooled"
        assert sum(map(len, numbers(data, 0))) == 12


def test_a_validation_set_alone_is_tested_on() -> None:
    assert roles_of(np.array(["train", "val"]), None).tolist() == [TRAIN, TEST]
    assert roles_of(np.array(["train", "val", "test"]), None).tolist() == [TRAIN, VAL, TEST]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": "user", "partition": IID()}, "client='user' and partition=IID.*give one of them"),
        ({"client": "person"}, "no column 'person', its columns are: user, set"),
        ({"split_column": "fold"}, "no column 'fold', its columns are: user, set"),
        ({"split_column": "user"}, "The column 'user' has 'x', 'y', 'z': expected one of train"),
        ({"sets": np.full(36, "test")}, "The division into sets has no training set"),
        ({"targets": []}, "Given has no examples"),
        ({"targets": [0.5, 1.0]}, "2 numbers such as 0.5, in row 0, which are not whole"),
        ({"targets": np.arange(36) ** 2}, "36 examples are 36 different numbers such as 1225, which looks like a quantity"),
        ({"targets": np.array(["a", None], dtype=object)}, "Some examples have no target"),
        ({"split": "official"}, "Given has no official test set: set split to pooled"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        Given(**options).setup()


def test_read_must_be_written() -> None:
    with pytest.raises(NotImplementedError, match="override read"):
        TableData().setup()


# ------------------------------------------------------------------------------------------- classes that are known beforehand


def test_known_classes_have_the_same_numbers_whichever_are_found() -> None:
    """And nothing is read to know how many there are."""
    classes = ["c", "a", "b"]
    everywhere, here = (
        Given(targets, classes=classes, partition=IID(), num_clients=1) for targets in (["a", "b", "c"] * 12, ["a", "b"] * 18)
    )
    assert (here.num_classes, here.class_names, here.reads) == (3, classes, 0)
    assert here.clients[0].label_counts[0] == 0
    assert len(here.clients[0].label_counts) == len(everywhere.clients[0].label_counts) == 3
    _, labels, *_ = Given(["a", "b"] * 18, classes=classes).load()
    assert labels.tolist() == [1, 2] * 18
    _, labels, *_ = Given(np.arange(36) % 2, names=["b", "c"], classes=classes).load()
    assert labels.tolist() == [2, 0] * 18
    _, labels, *_ = Given(np.arange(36) % 2, classes=["0", "1", "2"]).load()
    assert labels.tolist() == [0, 1] * 18


def test_classes_that_are_not_named_are_refused() -> None:
    with pytest.raises(
        FederationError, match="Given found 'c' among the targets, but classes are 'a', 'b': name all that there are"
    ):
        Given(["a", "b", "c"] * 12, classes=["a", "b"]).load()
    with pytest.raises(FederationError, match="name each class once"):
        Given(classes=["a", "a"])
