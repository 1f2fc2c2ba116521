"""Tables of one's own: categories, gaps and scales."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import new_federation
from torch import Tensor

from lightning_fed.data import IID, CSVFiles, InMemory, TableData
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.models import MLP

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
    """Of categories there is none: a missing one has their frequencies, however numbers are imputed."""
    write(south=["60,3,,yes,train", "70,1,200,no,train", "70,1,130,no,train", "90,?,NA,yes,test"])
    [row] = rows(table(impute="median"), 1, 2)
    assert row.tolist() == pytest.approx([90, 0.6, 0.2, 0.2, 130])  # of five training rows of both clients


@pytest.mark.parametrize("wrong", [{"client": "hospital"}, {"split_column": "hospital"}], ids=["client", "set"])
def test_a_column_that_is_missing_is_named_before_others_are_read(wrong: dict[str, str]) -> None:
    Path("sites").mkdir()
    Path("sites/all.csv").write_text("site,age,pain,sick,set\n" + "north,30,1,no,train\nsouth,60,2,yes,test\n" * 9)
    with pytest.raises(FederationError, match="CSVFiles has no column 'hospital', its columns are: site, age"):
        table(**wrong).column("age")


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


def test_the_fingerprint_is_that_of_the_numbers_as_they_were_read_and_of_their_scale() -> None:
    write()
    scales: list[dict[str, Any]] = [{}, {"standardize": "all"}, {"standardize": "client"}, {"impute": "median"}]
    before = [table(**options).fingerprint() for options in scales]
    assert len(set(before)) == 4
    own = table(standardize="all")
    own.setup()
    own._data.images.mul_(1.0000001)  # type: ignore[union-attr]  # as another machine would have it
    assert own.fingerprint() == before[1]
    write(south=[*LINES["south"][:2], "91,?,NA,yes,test"])
    assert not {table(**options).fingerprint() for options in scales} & {*before}


@pytest.mark.parametrize("scope", ["client", "all"])
def test_numbers_far_from_zero_are_standardised_exactly(scope: str) -> None:
    """In single precision their mean is rounded by as much as the numbers differ."""
    Path("t.csv").write_text("\n".join(["x,y,set", *(f"{16_000_000 + k},{k % 2},train" for k in range(40)), "16000050,1,test"]))
    data = CSVFiles("t.csv", "y", split_column="set", standardize=scope, partition=IID(), num_clients=1, val_share=0)
    numbers = torch.arange(40.0, dtype=torch.float64)
    assert torch.allclose(rows(data, 0, 0)[:, 0].double().sort().values, (numbers - 19.5) / numbers.std(), rtol=0, atol=1e-6)
    assert rows(data, 0, 2).dtype == torch.float32


def test_some_columns_are_standardised() -> None:
    write()
    own = rows(table(standardize="all", standardized=["age"]), 0, 0)
    assert torch.equal(own[:, 1:], rows(table(), 0, 0)[:, 1:])
    assert torch.equal(own[:, 0], rows(table(standardize="all"), 0, 0)[:, 0])


def test_what_is_tested_on_says_nothing_about_a_scale() -> None:
    write()
    before = rows(table(standardize="all"), 0, 0)
    write(south=[*LINES["south"][:2], "90000,1,900,yes,test"])
    assert torch.equal(rows(table(standardize="all"), 0, 0), before)


@pytest.mark.parametrize("options", [{"standardize": "all", "impute": "none"}, {"standardize": "all"}, {"standardize": "none"}])
def test_clients_that_are_not_seen_set_no_scale(options: dict[str, Any]) -> None:
    write()
    data = table(**options)
    data.set_aside([])
    with pytest.raises(FederationError, match="with unseen clients, whose training examples would count in the statistics"):
        data.set_aside([1])
    for fine in ({"standardize": "client"}, {"impute": "none"}):
        table(**fine).set_aside([1])


@pytest.mark.parametrize("impute", ["none", "mean"])
def test_a_client_without_training_rows_has_the_scale_of_all(impute: str) -> None:
    write(west=["45,1,150,no,test", "60,2,170,yes,test"])
    given: dict[str, Any] = {"impute": impute, "input": ["age"], "categorical": None}
    found = rows(table(standardize="client", **given), 2, 2)
    assert torch.equal(found, rows(table(standardize="all", **given), 2, 2))
    assert found.isfinite().all()


def test_categories_that_are_named_are_the_same_everywhere() -> None:
    write()
    data = table(categorical={"pain": ["3", "2", "1", "4"]}, input=["pain"])
    assert rows(data, 0, 0).tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


def test_a_category_called_none_is_one_if_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    write(
        north=["30,none,100,no,train", "50,mild,120,yes,train", "40,,110,no,test"],
        south=["60, none,,yes,train", "9,mild,1,no,test"],
    )
    assert rows(table(categorical=["pain"], input=["pain"]), 0, 0).tolist() == [[1], [1]]  # the mean of what is known
    assert "'none' in the column 'pain' counts as missing, in 2 examples" in caplog.text
    caplog.clear()
    data = table(categorical={"pain": ["none", "mild"]}, input=["pain"])
    assert rows(data, 0, 0).tolist() == [[1, 0], [0, 1]]
    assert rows(data, 1, 0).tolist() == [[1, 0]]
    assert "missing" not in caplog.text


def test_a_category_may_be_written_with_a_point_where_its_column_has_gaps() -> None:
    write(south=["60,3.0,,yes,train", "70,1.0,200,no,train", "90,?,NA,yes,test"])
    for categories in (["pain"], {"pain": ["1", "2", "3"]}, {"pain": ["1.0", "2.0", "3.0"]}):
        data = table(categorical=categories)
        assert rows(data, 1, 0).tolist() == [[60, 0, 0, 1, 160], [70, 1, 0, 0, 200]]
        assert data.titles == ["age", "pain=1", "pain=2", "pain=3", "pressure"]


@pytest.mark.parametrize("impute", ["mean", "median"])
def test_a_column_that_is_constant_but_for_its_gaps_is_only_centred(impute: str) -> None:
    """In single precision the mean of two hundred 36.6 is not 36.6, and the deviation was the difference."""
    write(north=[*(f"30,1,{'' if k % 7 == 0 else 36.6},no,train" for k in range(300)), "30,1,37.6,yes,test"])
    data = table(standardize="client", impute=impute)
    assert rows(data, 0, 0)[:, -1].abs().max() < 1e-5
    assert rows(data, 0, 2)[:, -1].tolist() == pytest.approx([1], abs=1e-5)


def test_a_column_that_is_constant_and_the_only_one_is_only_centred() -> None:
    """The deviation of 36.6, 36.6, … in single precision is not always 0."""
    Path("t.csv").write_text("\n".join(["x,y,set", *(f"36.6,{k % 2},train" for k in range(9)), "36.7,1,test"]))
    data = CSVFiles("t.csv", "y", split_column="set", standardize="all", partition=IID(), num_clients=1, val_share=0)
    assert rows(data, 0, 0).abs().max() < 1e-5
    assert rows(data, 0, 2).tolist() == [[pytest.approx(0.1, abs=1e-5)]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"impute": "none", "categorical": None, "input": ["pressure"]},
            r"north.csv, line 3, has '\?' in the column 'pressure', which is not a number.*impute mean",
        ),
        (
            {"impute": "none", "input": ["pain"]},
            r"south.csv, line 4, has '\?' in the column 'pain', which counts as missing: name it and all others",
        ),
        ({"categorical": {"pain": ["1", "2"]}}, "south.csv, line 2, has '3' in the column 'pain', whose categories are '1', '2'"),
        ({"categorical": ["pain", "weight"]}, "but no input weight"),
        ({"categorical": ["pain"], "input": ["age"]}, r"Got categorical=\['pain'\], but the inputs are age"),
        ({"impute": "zero"}, "Got impute='zero': give one of mean, median, none"),
        ({"standardize": "site"}, "Got standardize='site': give one of client, all, none"),
        ({"standardize": "all", "standardized": ["weight"]}, r"Got standardized=\['weight'\], but the columns are age, pain=1"),
        ({"standardized": ["age"]}, r"Got standardized=\['age'\] with standardize=none"),
        ({"target": "age", "task": "binary", "input": ["pain"]}, "sites has 6 classes in the column 'age'.*task binary needs two"),
        (
            {"target": "pressure", "task": "regression", "input": ["pain"]},
            r"line 3, has '\?' in the column 'pressure', which is a target",
        ),
        (
            {"target": "sick", "task": "regression"},
            "north.csv, line 2, has 'no' in the column 'sick', which is not a number: correct it",
        ),
        ({"target": "sick", "task": "survival"}, r"Got target=\['sick'\] with task=survival: give event and time"),
        ({"target": ["died", "age"], "task": "survival"}, "but no target 'died'"),
        (
            {"target": ["age", "pressure"], "task": "survival", "input": ["pain"]},
            r"line 3, has '\?' in the column 'pressure', which is a target",
        ),
        ({"delimiter": ", "}, "Got delimiter=', ': give one character"),
        (
            {"input": ["set"], "categorical": None},
            "'train' in the column 'set', which is not a number: .*, name it in .*categorical",
        ),
        ({"input": ["age", "sick"]}, "Got the column 'sick' as input and as target, which could be read off"),
        ({"target": ["age", "age"], "task": "regression"}, r"Got target=\['age', 'age'\]: name each column once"),
        ({"classes": ["no"], "task": "regression"}, "Got classes=.* with task=regression, which has none"),
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


@pytest.mark.parametrize("wrong", ["low", "1_0"])
def test_what_is_neither_missing_nor_a_number_is_refused_though_gaps_are_imputed(wrong: str) -> None:
    write(north=["30,1,?,no,train", f"50,2,{wrong},yes,train", "40,1,140,no,test"])
    with pytest.raises(FederationError, match=rf"north.csv, line 3, has '{wrong}' in the column 'pressure'"):
        table().setup()


def survivors(**options: Any) -> CSVFiles:
    """Three patients each of two hospitals, in one file, of whom nobody of the second has died."""
    lines = [
        "hospital,age,died,days",
        "north,30,1,5",
        "north,40,0,7",
        "north,50,1,2",
        "south,60,0,9",
        "south,70,0,9",
        "south,80,0,4",
    ]
    Path("all.csv").write_text("\n".join(lines))
    given: dict[str, Any] = {
        "target": ["died", "days"],
        "task": "survival",
        "client": "hospital",
        "val_share": 0,
        "test_share": 0.34,
    }
    return CSVFiles("all.csv", **given | options)


def test_event_and_time_are_predicted_and_partitioned_by_the_event(caplog: pytest.LogCaptureFixture) -> None:
    data = survivors()
    inputs, targets = data.client(0).data[torch.arange(6)]
    assert isinstance(inputs, Tensor)
    assert inputs.tolist() == [[30], [40], [50], [60], [70], [80]]
    assert targets.tolist() == [[1, 5], [0, 7], [1, 2], [0, 9], [0, 9], [0, 4]]
    assert (data.num_classes, data.num_labels, data.problem) == (1, 2, "survival")
    assert data.label_counts()[1].tolist() == [2, 0]
    assert data.majority_accuracy() is None
    assert "all.csv: 1 of 2 clients has no event in the column 'died'" in caplog.text
    assert "all.csv: 2 of 2 clients have fewer training examples than a batch has (64): 'north', 'south'." in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("south,70,0,-9", "has '-9' in the column 'days', expected a time from 0 on"),
        ("south,70,2,9", "has '2' in the column 'died', expected 0 or 1"),
        ("south,70,NA,9", "has 'NA' in the column 'died', which is a target"),
    ],
)
def test_an_odd_event_or_time_is_named_with_its_site(line: str, message: str) -> None:
    data = survivors()
    Path("all.csv").write_text(Path("all.csv").read_text().replace("south,70,0,9", line))
    with pytest.raises(FederationError, match=f"all.csv, line 6, of 'south', {message}"):
        data.setup()


def test_numbers_are_predicted_and_partitioned_by_quarters() -> None:
    write()
    data = table(target="age", task="regression", input=["pain"], categorical=None)
    _, targets = data.client(0).data[torch.arange(4)]
    assert targets.tolist() == [30, 50, 60, 70]  # those that are trained on come first
    assert (data.num_classes, data.num_labels, data.predicts_labels) == (1, 4, False)
    both = table(target=["age", "pain"], task="regression", input=["pressure"], categorical=None, impute="mean")
    with pytest.raises(FederationError, match=r"south.csv, line 4, has '\?' in the column 'pain', which is a target"):
        both.setup()


def test_a_warning_names_ten_clients_and_counts_the_others(caplog: pytest.LogCaptureFixture) -> None:
    Path("many.csv").write_text("\n".join(["site,age,ill", *(f"{site},{age},{age % 2}" for site in range(12) for age in range(4))]))
    CSVFiles("many.csv", target="ill", client="site").setup()
    assert caplog.messages[-1].startswith("many.csv: 12 of 12 clients have fewer training examples than a batch has (64): '0', '1'")
    assert caplog.messages[-1].endswith(" and 2 more.")


def test_yes_or_no_has_one_output_and_two_labels(caplog: pytest.LogCaptureFixture) -> None:
    write(south=["60,3,,yes,train", "70,1,200,yes,train", "90,1,NA,yes,test"])
    data = table(task="binary", batch_size=2)
    assert (data.num_classes, data.num_labels, data.class_names) == (1, 2, ["no", "yes"])
    assert caplog.messages == ["sites: 1 of 2 clients has training examples of one class only in the column 'sick': 'south'."] * (
        len(caplog.messages)
    )
    assert data.label_counts().tolist() == [[1, 1], [0, 2]]


@pytest.mark.parametrize(
    ("no", "yes", "classes", "expected"),
    [("negative", "Positive", None, "Positive"), ("N", "y", None, "y"), ("9", "10", None, "10"), ("a", "b", ["b", "a"], "a")],
)
def test_yes_is_the_second_class_in_the_order_of_names_whatever_their_case(
    no: str, yes: str, classes: list[str] | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run says it, and its facts have it."""
    Path("t.csv").write_text("\n".join(["x,y", *(f"{k % 7},{yes if k % 3 else no}" for k in range(24))]))
    data = CSVFiles("t.csv", target="y", task="binary", num_clients=2, classes=classes)
    model = FedAvg(partial(MLP, inputs=1, hidden=[2]), task="binary", optimizer=partial(torch.optim.SGD, lr=0.1))
    new_federation(1, "runs", progress=True).fit(model, data)
    said = capsys.readouterr().out.splitlines()[1]
    assert said == f"Predicted is whether an example is {expected!r} (otherwise it is {no if expected == yes else yes!r})."
    assert json.loads(Path("runs/version_0/run.json").read_text())["positive_class"] == expected
    own = data.client(0).data
    assert sum(own.labels.tolist()) == (16 if expected == yes else 8)


ROWS = [f"{100 + k},{k % 7},{1700000000 + k},{'ab'[k % 2]}{k // 2},{k % 2}" for k in range(30)]


@pytest.mark.parametrize(
    ("options", "columns"),
    [({}, ["id", "time"]), ({"categorical": ["name"]}, ["id", "time", "name"]), ({"input": ["id", "x", "time"]}, [])],
)
def test_an_input_that_looks_like_an_identifier(options: Any, columns: list[str], caplog: pytest.LogCaptureFixture) -> None:
    keep = slice(None) if "categorical" in options else [0, 1, 2, 4]
    lines = [line.split(",") for line in ["id,x,time,name,y", *ROWS]]
    Path("t.csv").write_text("\n".join(",".join(np.array(line)[keep]) for line in lines))
    CSVFiles("t.csv", target="y", num_clients=2, **options).setup()
    doubtful = [line.partition("the column '")[2].partition("'")[0] for line in caplog.messages if "identifier" in line]
    assert doubtful == columns


def test_digits_that_float32_does_not_keep(caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"{1700000000 + k},{1700000000.3 + k},{2**25 * (k % 3)},{2**25 + 3.9 * k},{k % 2}" for k in range(30)]
    Path("t.csv").write_text("\n".join(["time,exact,large,mass,y", *lines]))
    CSVFiles("t.csv", target="y", num_clients=2, input=["time", "exact", "large", "mass"]).setup()
    lost = "has numbers above 16777216, which float32 rounds: of 30 different ones 1 are left."
    assert [line.partition(" Subtract")[0] for line in caplog.messages] == [
        f"t.csv: the column '{name}' {lost}" for name in ("time", "exact")
    ]
    caplog.clear()
    InMemory(np.array([line.split(",")[:4] for line in lines]).astype(float), np.arange(30) % 2)
    assert [line.partition(" Subtract")[0] for line in caplog.messages] == [f"images: the column {k} {lost}" for k in (0, 1)]


def test_a_class_that_is_only_tested(caplog: pytest.LogCaptureFixture) -> None:
    write(south=["60,3,,yes,train", "70,1,200,no,train", "90,1,NA,maybe,test"])
    table(batch_size=1).setup()
    assert [line for line in caplog.messages if "test examples only" in line] == [
        "CSVFiles: 'maybe' among the targets occurs in test examples only, so no client can learn it: move some to the training "
        "set, or take them out."
    ]


def test_files_without_a_header_and_of_parquet_are_read_alike() -> None:
    write()
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    names = ["age", "pain", "pressure", "sick", "set"]
    expected = table().client(0).data.images
    for folder in ("bare", "packed"):
        Path(folder).mkdir()
    for name, lines in LINES.items():
        Path(f"bare/{name}.csv").write_text("\n".join(lines) + "\n")
        values = zip(*(line.split(",") for line in lines), strict=True)
        columns = {title: [None if value == "" else value for value in column] for title, column in zip(names, values, strict=True)}
        columns["age"] = [int(age) for age in columns["age"] if age is not None]  # type: ignore[misc]
        parquet.write_table(arrow.table(columns), f"packed/{name}.parquet")
    given: dict[str, Any] = {"target": "sick", "client": "file", "split_column": "set", "categorical": ["pain"], "impute": "mean"}
    bare = CSVFiles("bare", columns=names, val_share=0.0, **given)
    packed = CSVFiles("packed", val_share=0.0, **given)
    assert torch.equal(bare.client(0).data.images, expected)  # type: ignore[arg-type]
    assert torch.equal(packed.client(0).data.images, expected)  # type: ignore[arg-type]
    with pytest.raises(FederationError, match=r"Got columns=\['age', .* but packed/north.parquet has the names of its own"):
        CSVFiles("packed", columns=names, **given).setup()
    for sick, expected_classes in ((b"yes", ["no", "yes"]), (b"\xff", None)):  # some programs write text as bytes
        columns |= {"sick": [b"no", sick, sick]}
        parquet.write_table(arrow.table(columns), "packed/south.parquet")
        if expected_classes is None:
            with pytest.raises(FederationError, match=r"south.parquet, row 2, has bytes that are not text in UTF-8 \(b'\\xff'\)"):
                CSVFiles("packed", **given).setup()
        else:
            again = CSVFiles("packed", **given)
            again.setup()
            assert again.class_names == expected_classes
    Path("packed/north.parquet").write_text("age,pain")
    with pytest.raises(FederationError, match=r"north.parquet cannot be read as Parquet"):
        CSVFiles("packed", **given).setup()
