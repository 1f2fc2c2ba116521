"""Natural partitions: the data say who the clients are."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from tiny import new_federation, new_method, new_trainer

from lightning_fed.data import IID, ByColumn, FederatedDataModule, InMemory, Partitioner
from lightning_fed.data.partition.natural import by_name
from lightning_fed.errors import FederationError

SIZES = {"carol": 300, "ann": 2, "dave": 3, "bob": 41}


def users_of(sizes: dict[str, int] = SIZES) -> list[str]:
    """Mixed, each so often."""
    users = [user for user, size in sizes.items() for _ in range(size)]
    return [users[k] for k in np.random.default_rng(0).permutation(len(users))]


def natural(
    users: list[Any], test_users: list[Any] | None = None, partition: Partitioner | None = None, **options: Any
) -> InMemory:
    """Numbered examples."""
    count, tests = len(users), len(test_users or [])
    images = torch.arange(count + tests)[:, None].float()
    labels = torch.arange(count + tests) % 3
    given = {"columns": {"user": users}, "test_columns": {"user": test_users or []}} | options
    return InMemory(
        images[:count], labels[:count], 3, images[count:], labels[count:], partition=partition or ByColumn("user"), **given
    )


def names_of(data: FederatedDataModule) -> list[str]:
    data.setup()
    assert data.client_names is not None
    return list(data.client_names)


def held(data: FederatedDataModule, client: int) -> list[int]:
    return sorted(torch.cat([*data.client(client).splits]).tolist())


# --------------------------------------------------------------------------------------------------------------- clients


def test_each_value_is_a_client_and_holds_its_examples() -> None:
    users = users_of()
    data = natural(users)
    assert data.num_clients == 4
    assert data.client_names == ["ann", "bob", "carol", "dave"]
    for client, name in enumerate(data.client_names):
        assert held(data, client) == [k for k, user in enumerate(users) if user == name]


def test_numbers_come_in_their_order_and_before_names() -> None:
    names, parts = by_name(np.array(["10", "b", "9", "a", "9"]))
    assert names == ["9", "10", "a", "b"]
    assert [part.tolist() for part in parts] == [[2, 4], [0], [3], [1]]
    names, parts = by_name(np.array([30, 4, 30]))
    assert names == ["4", "30"]
    assert [part.tolist() for part in parts] == [[1], [0, 2]]


def test_parts_are_by_shares_but_never_empty_while_there_are_examples() -> None:
    data = natural(users_of())
    sizes = {name: (c.num_train, c.num_val, c.num_test) for name, c in zip(names_of(data), data.clients, strict=True)}
    assert sizes == {"ann": (1, 0, 1), "bob": (33, 4, 4), "carol": (240, 30, 30), "dave": (1, 1, 1)}


def test_a_split_depends_on_the_client_alone() -> None:
    """Who else takes part changes nothing: neither fewer clients nor those that are left out."""
    everybody = natural(users_of())
    for data in (natural(users_of(), num_clients=2), natural(users_of(), partition=ByColumn("user", 30))):
        for client, name in enumerate(names_of(data)):
            same = everybody.client(names_of(everybody).index(name)).splits
            assert all(map(torch.equal, data.client(client).splits, same))


def test_so_many_clients_are_drawn_by_the_seed() -> None:
    users = [f"user{k}" for k in range(40) for _ in range(4)]
    drawn = [names_of(natural(users, num_clients=5, seed=seed)) for seed in range(6)]
    assert all(len(names) == 5 and names == sorted(names) for names in drawn)
    assert len({tuple(names) for names in drawn}) == 6
    assert names_of(natural(users, num_clients=5, seed=3)) == drawn[3]


def test_small_clients_are_left_out_if_asked() -> None:
    assert names_of(natural(users_of(), partition=ByColumn("user", 3))) == ["bob", "carol", "dave"]
    assert names_of(natural(users_of(), partition=ByColumn("user", 42))) == ["carol"]
    assert "zoe" not in names_of(natural([*users_of(), "zoe"], partition=ByColumn("user", 1)))


def test_official_sets_go_to_whom_they_belong() -> None:
    users, tests = ["a", "b", "a", "b", "b", "a"], ["b", "a", "b"]
    data = natural(users, tests, split="official", val_share=0)
    assert [[part.tolist() for part in data.client(k).splits] for k in range(2)] == [[[0, 2, 5], [], [7]], [[1, 3, 4], [], [6, 8]]]


class Marked(InMemory):
    """With a validation set of its own."""

    def validation(self) -> NDArray[np.bool_]:
        return np.array([True, False, False, True, False, False, True, False])


def test_an_official_validation_set_is_used() -> None:
    for partition, options in ((ByColumn("user"), {}), (IID(), {"num_clients": 2})):
        images = torch.arange(12)[:, None].float()
        columns: dict[str, Any] = {"columns": {"user": ["a", "b"] * 4}, "test_columns": {"user": ["a", "b"] * 2}}
        own = {"partition": partition, "split": "official", **columns, **options}
        data = Marked(images[:8], torch.zeros(8).long(), 1, images[8:], torch.zeros(4).long(), **own)
        held_out = torch.cat([data.client(k).splits[1] for k in range(2)])
        assert sorted(held_out.tolist()) == [0, 3, 6]
        assert sorted(torch.cat([data.client(k).splits[0] for k in range(2)]).tolist()) == [1, 2, 4, 5, 7]


def test_a_partition_of_ones_own() -> None:
    class ByInitial(Partitioner):
        def holders(self, column: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
            return column("user").astype("U1")

    data = natural(["ann", "anna", "bob", "bo", "ada", "ben"], partition=ByInitial(), test_share=0.3)
    assert names_of(data) == ["a", "b"]
    assert held(data, 0) == [0, 1, 4]


def test_clients_of_very_different_size_train_together() -> None:
    users = users_of({"a": 150, "b": 2, "c": 3, "d": 45})
    whole = torch.randn(200, 3, 4, 4)
    data = InMemory(whole, torch.arange(200) % 4, 4, columns={"user": users}, partition=ByColumn("user"), batch_size=16)
    federation = new_federation(2, "runs", trainer=new_trainer)
    history = federation.fit(new_method("FedAvg"), data)
    with Path("runs/version_0/clients.csv").open(newline="") as file:
        assert [(row["client"], row["name"]) for row in csv.DictReader(file)] == list(zip("0123", "abcd", strict=True))
    assert len(federation.run.results) == 4
    assert 0 <= history[-1]["after/val_accuracy/mean"] <= 1  # of those who have validation examples


def test_a_changed_column_is_another_federation() -> None:
    assert natural(["a", "b"] * 10).fingerprint() != natural(["a"] * 10 + ["b"] * 10).fingerprint()


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (natural(["a", "b"], columns={}), "no column 'user', its columns are: none"),
        (
            natural(["a"] * 9 + ["b"]),
            r"1 of 2 clients lack .*: 1 train \+ 0 val \+ 0 test\): "
            r"set the partition, in place of client, to ByColumn\(column='user', min_examples=1\) to leave them out\.$",
        ),
        (natural(["a", "b"] * 5, ["a"], split="official"), r"1 of 2 .*'b': 4 train \+ 1 val \+ 0 test.*split to pooled"),
        (natural(["a", "b"] * 5, num_clients=3), "num_clients=3, but the data have 2 clients"),
        (natural(["a", "b"] * 5, partition=ByColumn("user", 6)), "None of the 2 clients has 6 examples"),
        (natural(["a", "", "b"]), r"1 of 3 examples, number \[1\] among them, do not say"),
        (natural(["a", None, "b"]), "1 of 3 examples"),
        (natural(["a", float("nan"), "b"]), "1 of 3 examples"),
        (natural([1.0, float("nan"), 2.0]), "1 of 3 examples"),
        (natural(["a", pd.NA, "b"]), "1 of 3 examples"),
        (natural(["a", "b"], columns={"user": ["a"]}), "assigns 1 examples to clients, but there are 2"),
    ],
)
def test_what_cannot_be_is_refused(data: InMemory, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        data.setup()


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(FederationError, match=r"column 'user' has the shape \(2, 1\): give one value per example"):
        natural(["a", "b"], columns={"user": [["a"], ["b"]]})
    with pytest.raises(FederationError, match="min_examples=0"):
        ByColumn("user", 0)


def test_data_without_columns_say_so() -> None:
    class Plain(FederatedDataModule):
        num_classes = 2

        def load(self) -> Any:
            return torch.zeros(20, 1), torch.arange(20) % 2, torch.zeros(0, 1), torch.zeros(0).long()

    with pytest.raises(FederationError, match="Plain has no columns, so 'user' cannot say"):
        Plain(partition=ByColumn("user")).setup()
