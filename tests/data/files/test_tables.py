"""Tables of one's own: categories, gaps and scales."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.data import CSVFiles, TableData
from lightning_fed.errors import FederationError

LINES = {
    "north": ["30,1,120,no,train", "50,2,?,yes,train", "40,1,140,no,test"],
    "south": ["60,3,,yes,train", "70,1,200,no,train", "90,?,NA,yes,test"],
}


def write(**changed: list[str]) -> None:
    Path("sites").mkdir(exist_ok=True)
    for name, lines in (LINES | changed).items():
        Path(f"sites/{name}.csv").write_text("\n".join(["age,pain,pressure,sick,set", *lines]) + "\n")


def table(**options: Any) -> CSVFiles:
    given: dict[str, Any] = {"target": "sick", "client": "file", "split_column": "set", "categorical": ["pain"], "impute": "mean"}
    return CSVFiles("sites", **given | {"val_share": 0.0} | options)


def rows(data: TableData, client: int, part: int) -> Tensor:
    own = data.client(client)
    return own.data[own.splits[part]][0]  # type: ignore[return-value]


def test_categories_become_columns_and_gaps_the_mean_of_training_rows() -> None:
    write()
    data = table()
    assert rows(data, 0, 0).tolist() == [[30, 1, 0, 0, 120], [50, 0, 1, 0, 160]]
    assert rows(data, 1, 0).tolist() == [[60, 0, 0, 1, 160], [70, 1, 0, 0, 200]]
    assert rows(data, 1, 2).tolist() == [[90, 0.5, 0.25, 0.25, 160]]
    assert data.titles == ["age", "pain=1", "pain=2", "pain=3", "pressure"]


def test_the_median_is_another_number() -> None:
    write(south=["60,3,,yes,train", "70,1,200,no,train", "70,1,130,no,train", "90,1,NA,yes,test"])
    assert rows(table(impute="median"), 1, 2)[0, -1] == 130


def test_each_clients_own_scale_and_gaps() -> None:
    write()
    data = table(standardize="client")
    raw = torch.tensor([[30.0, 1, 0, 0, 120], [50, 0, 1, 0, 120]])  # the mean of its own pressures
    std = raw.std(dim=0)
    expected = (raw - raw.mean(dim=0)) / torch.where(std > 0, std, 1.0)
    assert torch.allclose(rows(data, 0, 0), expected)
    assert torch.allclose(
        rows(data, 0, 2), (torch.tensor([[40.0, 1, 0, 0, 140]]) - raw.mean(dim=0)) / torch.where(std > 0, std, 1.0)
    )


def test_what_is_tested_on_says_nothing_about_a_scale() -> None:
    write()
    before = rows(table(standardize="all"), 0, 0)
    write(south=[*LINES["south"][:2], "90000,1,900,yes,test"])
    assert torch.equal(rows(table(standardize="all"), 0, 0), before)


def test_categories_that_are_named_are_the_same_everywhere() -> None:
    write()
    data = table(categorical={"pain": ["3", "2", "1", "4"]}, input=["pain"])
    assert rows(data, 0, 0).tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"impute": "none", "categorical": None, "input": ["pressure"]},
            r"north.csv, line 3, has '\?' in the column 'pressure', which is not a number.*impute mean",
        ),
        ({"impute": "none", "input": ["pain"]}, r"south.csv, line 4, has '\?' in the column 'pain'"),
        ({"categorical": {"pain": ["1", "2"]}}, "south.csv, line 2, has '3' in the column 'pain', whose categories are '1', '2'"),
        ({"categorical": ["pain", "weight"]}, "but no input weight"),
        ({"categorical": ["pain"], "input": ["age"]}, r"Got categorical=\['pain'\], but the inputs are age"),
        ({"impute": "zero"}, "Got impute='zero': give one of mean, median, none"),
        ({"standardize": "site"}, "Got standardize='site': give one of client, all, none"),
    ],
)
def test_bad_input_gets_a_line_with_file_and_column(options: dict[str, Any], message: str) -> None:
    write()
    with pytest.raises(FederationError, match=message):
        table(**options).setup()


def test_a_column_without_a_number_is_named() -> None:
    write(north=["30,1,?,no,train", "50,2,?,yes,train", "40,1,140,no,test"], south=["60,3,,yes,train", "70,1,200,no,test"])
    with pytest.raises(FederationError, match="No training row has a number in the column 'pressure'"):
        table().setup()


def test_what_is_neither_missing_nor_a_number_is_refused_though_gaps_are_imputed() -> None:
    write(north=["30,1,?,no,train", "50,2,low,yes,train", "40,1,140,no,test"])
    with pytest.raises(FederationError, match=r"north.csv, line 3, has 'low' in the column 'pressure'"):
        table().setup()
