"""The comparison of golden runs notices what it is for, and knows what is only called differently."""

import json
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
import yaml
from golden_parts import Images, Kill, Watch
from play import Player, Record, cases, fingerprint
from safetensors.torch import save_file
from words import Renames, deep, flat

import lightning_fed.methods

OPTIONS = {"model.class_path": "lightning_fed.methods.FedAvg", "model.init_args.adapt_epochs": 0, "model.init_args.epochs": 2}
COLUMNS, ROW = ["round", "train/local_loss", "round/lost"], ["1.0", "0.5", "1.0"]


def recorded(folder: str, renames: dict[str, Any] | None = None, **changed: Any) -> compare.Side:
    """A side that has recorded one case, with something changed."""
    path = Path(folder)
    path.mkdir()
    (path / compare.TABLE).write_text(yaml.safe_dump(renames or {}))
    content = vars(Record()) | {
        "values": {"here/test/after/test_accuracy/mean": 0.25},
        "options": {"a.yaml": OPTIONS},
        "tables": {"here/metrics.csv": {"columns": COLUMNS, "rows": [ROW]}},
    }
    tensors = {"here/server/backbone.fc1.weight": torch.tensor([1.0, -2.0]), "here/server/count": torch.tensor(3)}
    tensors = changed.pop("tensors", {}) or tensors
    save_file(tensors, path / "case.safetensors")
    kept = {key: value for key, value in (content | changed).items() if key != "tensors"}
    (path / "case.json").write_text(json.dumps(kept))
    return compare.Side(path)


def said(capsys: pytest.CaptureFixture[str], head: compare.Side, **options: Any) -> str:
    """What is reported of a head that differs from the base."""
    assert not compare.report(recorded("base"), head, ["case"], **options)
    return capsys.readouterr().out


def test_what_is_the_same_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.report(recorded("base"), recorded("head"), ["case"])
    assert capsys.readouterr().out == "1 cases are equal, 0 differ; no number moved.\n"


class TestTensors:
    def test_a_changed_bit_is_seen_with_its_name_and_size(self, capsys: pytest.CaptureFixture[str]) -> None:
        weight = torch.tensor([1.0, -2.0])
        weight.view(torch.int32)[0] ^= 1
        moved = {"here/server/backbone.fc1.weight": weight, "here/server/count": torch.tensor(3)}
        out = said(capsys, recorded("head", tensors=moved))
        assert "here/server/backbone.fc1.weight: 1 of 2 numbers (relative 5.96e-08)" in out
        assert "the largest relative difference of a number is 5.96e-08" in out
        assert compare.report(compare.Side(Path("base")), compare.Side(Path("head")), ["case"], within=1e-7)

    def test_so_are_the_sign_of_a_zero_and_another_kind_of_number(self) -> None:
        zero, nan = torch.zeros(2), torch.tensor([torch.nan])
        count = torch.tensor(3)
        base, head = (recorded(f"side_{k}", tensors={"w": t, "here/server/count": count}) for k, t in enumerate((zero, -zero)))
        assert not compare.report(base, head, ["case"])
        assert compare.of_tensors("x", zero, zero.double()) is not None
        assert compare.of_tensors("x", zero, torch.zeros(2, 1)) is not None
        assert compare.of_tensors("x", nan, nan.clone()) is None
        assert compare.of_tensors("x", nan, zero[:1]).relative == torch.inf  # type: ignore[union-attr]

    def test_one_that_is_missing_is_seen_and_one_that_has_another_name_is_known(self, capsys: pytest.CaptureFixture[str]) -> None:
        renamed = {"here/server/network.fc1.weight": torch.tensor([1.0, -2.0]), "here/server/count": torch.tensor(3)}
        out = said(capsys, recorded("head", tensors=renamed))
        assert "here/server/backbone.fc1.weight: only in base (shape (2,))" in out
        assert "here/server/network.fc1.weight: only in head (shape (2,))" in out
        table = {"tensors": [["backbone.fc1", "network.fc1"]]}
        assert compare.report(compare.Side(Path("base")), recorded("with_table", table, tensors=renamed), ["case"])


class TestTables:
    def test_a_missing_column_is_seen(self, capsys: pytest.CaptureFixture[str]) -> None:
        table = {"here/metrics.csv": {"columns": COLUMNS[:2], "rows": [ROW[:2]]}}
        out = said(capsys, recorded("head", tables=table))
        assert "here/metrics.csv/columns: only in base ['round/lost'], only in head []" in out

    def test_so_is_another_order_and_another_digit(self, capsys: pytest.CaptureFixture[str]) -> None:
        table = {"here/metrics.csv": {"columns": [COLUMNS[k] for k in (1, 0, 2)], "rows": [["0.5000000000000001", "1.0", "1.0"]]}}
        out = said(capsys, recorded("head", tables=table))
        assert "here/metrics.csv/columns: in another order" in out
        assert "here/metrics.csv/0/train/local_loss: 0.5 in base, 0.5000000000000001 in head (relative 2.22e-16)" in out

    def test_one_that_has_another_name_is_known(self, capsys: pytest.CaptureFixture[str]) -> None:
        renamed = {"here/metrics.csv": {"columns": [*COLUMNS[:2], "round/failed_clients"], "rows": [ROW]}}
        assert "round/failed_clients" in said(capsys, recorded("head", tables=renamed))
        table = {"metrics": [["round/lost", "round/failed_clients"]]}
        assert compare.report(compare.Side(Path("base")), recorded("with_table", table, tables=renamed), ["case"])

    def test_seconds_are_noise(self) -> None:
        Path("metrics.csv").write_text("round,seconds/fit,train/seconds_loss\r\n1.0,0.3,2.0\r\n", newline="")
        record = Record()
        record.table("t", Path("metrics.csv"))
        assert record.tables == {"t": {"columns": ["round", "train/seconds_loss"], "rows": [["1.0", "2.0"]]}}


class TestOptions:
    def test_a_renamed_one_is_seen_and_known_with_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        leaves = {
            "model.class_path": "lightning_fed.core.FedAvg",
            "model.init_args.fine_tuning.epochs": 0,
            "model.init_args.epochs": 2,
        }
        out = said(capsys, recorded("head", options={"a.yaml": leaves}))
        assert "a.yaml: model.init_args.adapt_epochs: only in base (0)" in out
        assert "a.yaml: model.init_args.fine_tuning.epochs: only in head (0)" in out
        assert "a.yaml: model.class_path: lightning_fed.methods.FedAvg in base, lightning_fed.core.FedAvg in head" in out
        table = {
            "options": [["adapt_epochs", "fine_tuning.epochs"]],
            "classes": [["lightning_fed.methods.FedAvg", "lightning_fed.core.FedAvg"]],
        }
        assert compare.report(compare.Side(Path("base")), recorded("with_table", table, options={"a.yaml": leaves}), ["case"])

    def test_one_that_is_another_is_no_number_that_moved(self, capsys: pytest.CaptureFixture[str]) -> None:
        out = said(capsys, recorded("head", options={"a.yaml": OPTIONS | {"model.init_args.epochs": 3}}), within=10.0)
        assert "a.yaml: model.init_args.epochs: 2 in base, 3 in head\n" in out

    def test_what_counts_as_absent_may_be_missing(self, capsys: pytest.CaptureFixture[str]) -> None:
        leaves = {key: value for key, value in OPTIONS.items() if "adapt_epochs" not in key} | {"model.init_args.fine_tuning": None}
        assert "fine_tuning: only in head (None)" in said(capsys, recorded("head", options={"a.yaml": leaves}))
        table = {"absent": {"adapt_epochs": 0, "fine_tuning": None}}
        assert compare.report(compare.Side(Path("base")), recorded("with_table", table, options={"a.yaml": leaves}), ["case"])
        one_of = {"absent": {"adapt_epochs": [0, None], "fine_tuning": None}}
        assert compare.report(compare.Side(Path("base")), recorded("one_of", one_of, options={"a.yaml": leaves}), ["case"])
        given = {"a.yaml": leaves | {"model.init_args.fine_tuning": 3}}
        assert not compare.report(compare.Side(Path("base")), recorded("other", table, options=given), ["case"])

    def test_a_value_can_have_another_name(self) -> None:
        words = Renames({"values": [("average=taught", "average=notified")]})
        assert words.value_today("model.init_args.average", "taught") == "notified"
        assert words.original_value("model.init_args.average", "notified") == "taught"
        assert words.original_value("model.init_args.order", "notified") == "notified"


def test_what_is_left_out_is_not_compared_and_needs_a_reason_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"values": {"here/test/after/test_accuracy/mean": 0.5}}
    assert "0.25 in base, 0.5 in head" in said(capsys, recorded("head", **values))
    table = {"left_out": {"after/test_accuracy/mean": "measured otherwise"}}
    assert compare.report(compare.Side(Path("base")), recorded("with_table", table, **values), ["case"])


def test_what_failed_or_was_not_played_is_never_equal(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"failures": {"here": "RuntimeError: so"}}
    assert "failed on both sides" in (
        compare.report(recorded("base", **failed), recorded("head", **failed), ["case"]) or capsys.readouterr().out
    )
    assert not compare.report(compare.Side(Path("base")), compare.Side(Path("head")), ["other"])


def test_records_of_another_case_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert "record both with the same tests/golden" in said(capsys, recorded("head", fingerprint="of before"))
    assert len({fingerprint(name) for name in cases()}) == len(cases())


def test_words_are_whole_and_paths_come_back() -> None:
    words = Renames({"options": [("epochs", "fit.epochs"), ("a.b", "c")]})
    assert words.today("model.epochs", "options") == "model.fit.epochs"
    assert words.today("model.adapt_epochs.a.b", "options") == "model.adapt_epochs.c"
    assert words.original("model.fit.epochs", "options") == "model.epochs"
    tree = {"a": [{"b": 1}, {"b": [1, 2]}], "c": None, "d": []}
    assert deep(flat(tree)) == tree


class TestCases:
    def test_every_method_has_one(self) -> None:
        """Add a new method to ``cases.yaml``, by its name."""
        words = Renames.read(Path(compare.__file__).with_name(compare.TABLE))
        methods = {words.original(name, "classes") for name in lightning_fed.methods.__all__}
        assert methods - cases().keys() == set()
        assert {case["method"] for case in cases().values() if "base" in case} == methods

    def test_they_are_played_in_the_words_of_the_tree(self) -> None:
        table = {"options": [("adapt_epochs", "fine_tuning.epochs")], "values": [("adapt_layers=head", "adapt_layers=classifier")]}
        player = Player(Path(), Renames(table), cases()["FedAvg+adapted"])
        config = yaml.safe_load(Path(player.config("here", ["golden_parts.Watch"])).read_text())
        options = config["model"]["init_args"]
        assert (options["fine_tuning"], options["adapt_layers"]) == ({"epochs": 2}, "classifier")
        assert config["federation"]["callbacks"] == ["golden_parts.Watch"]

    def test_a_run_is_recorded_with_its_tensors_and_a_measured_one_with_its_exports(self) -> None:
        root = Path(lightning_fed.methods.__file__).parents[2]
        record = Player(root, Renames(), cases()["FedPer"]).play(["here", "measured"])
        assert record.failures == {}
        weights = {name for name in record.tensors if name.endswith("backbone.fc1.weight")}
        assert {f"here/round_{k}/server/backbone.fc1.weight" for k in (1, 2, 3)} | {
            "here/checkpoints/server/backbone.fc1.weight"
        } <= weights
        heads = {name for name in record.tensors if name.endswith("backbone.head.weight")}
        assert heads == {f"here/clients/client_{k:06d}/backbone.head.weight" for k in range(3)}
        assert {"here/export/client/model/fc1.weight", "here/export/client/model/head.weight"} <= record.tensors.keys()
        assert len(record.tables["here/metrics.csv"]["rows"]) == 3
        assert {"here/validate/after/val_accuracy/mean", "here/test/after/test_accuracy/mean"} <= record.values.keys()
        Path("out").mkdir()
        record.write(Path("out"), "FedPer")
        (Path("out") / compare.TABLE).write_text("{}")
        assert compare.report(compare.Side(Path("out")), compare.Side(Path("out")), ["FedPer"])

    def test_parts_are_importable_by_name(self) -> None:
        assert {part.__module__ for part in (Images, Kill, Watch)} == {"golden_parts"}
