"""Loggers: one, several or none, told what is played, and pointed to at the end."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from often import mostly_slow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_experiment_plugin_data, parse_session_start_info_plugin_data
from tiny import METHODS, data_for, new_data, new_federation, new_method, new_trainer

from lightning_fed.__main__ import main
from lightning_fed.callbacks.board import page
from lightning_fed.callbacks.hyperparameters import columns, hyperparameters
from lightning_fed.callbacks.progress import where_to_look
from lightning_fed.federation.federation import Federation


class Noted(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, Any] = {}
        self.rounds: list[int | None] = []
        self.status = ""

    name = "noted"
    version = 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params |= params

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rounds.append(step)

    def finalize(self, status: str) -> None:
        self.status = status


def fit(logger: Any, method: str = "PFedLoRA", rounds: int = 2, **options: Any) -> Federation:
    federation = new_federation(rounds, "runs", logger=logger, trainer=new_trainer, **options)
    federation.fit(new_method(method), data_for(method))
    return federation


@pytest.mark.often(1)
@pytest.mark.parametrize("several", [list, tuple])
def test_several_loggers_all_get_everything(several: type) -> None:
    one, other = Noted(), Noted()
    federation = fit(several([one, True, other]))
    assert [type(logger) for logger in federation.run.loggers] == [Noted, TensorBoardLogger, Noted]
    assert one.rounds == other.rounds == [1, 2]
    assert one.params == other.params == hyperparameters(federation.run)
    assert (one.status, other.status) == ("success", "success")
    assert list(Path("runs/version_0").glob("events.*"))


@pytest.mark.often(1)
@pytest.mark.parametrize("nothing", [False, [], [False]])
def test_none(nothing: Any) -> None:
    assert fit(nothing).run.loggers == []
    assert not list(Path("runs/version_0").glob("events.*"))


def test_a_list_on_the_command_line() -> None:
    csv = {"class_path": "CSVLogger", "init_args": {"save_dir": "elsewhere"}}
    Path("own.yaml").write_text(yaml.safe_dump({"federation": {"logger": [True, csv], "progress": False, "rounds": 1}}))
    main(["fit", "--config", "quickstart", "--config", "own.yaml", "--data.init_args.num_clients=2"])
    assert list(Path("runs/quickstart/version_0").glob("events.*"))
    assert "after/test_accuracy/mean" in Path("elsewhere/lightning_logs/version_0/metrics.csv").read_text()
    saved = yaml.safe_load(Path("runs/quickstart/version_0/config.yaml").read_text())["federation"]["logger"]
    assert (saved[0], saved[1]["init_args"]["save_dir"]) == (True, "elsewhere")


# ------------------------------------------------------------------------------------------------------------- what is told


OFTEN = {"FML", "FedAvgFT", "FedHM", "PF2LoRA", "PFedLoRA", "SplitMix"}
"""Two networks, a phase of adaptation, ranks, adapters, several phases, several networks."""


@pytest.mark.often(3)
@pytest.mark.parametrize("method", mostly_slow(METHODS, OFTEN))
def test_names_are_words_of_which_none_is_a_folder_of_another(method: str) -> None:
    """A logger that keeps a file for each has no use for one that is a folder, too."""
    federation = fit(False, method, 1)
    words, row = hyperparameters(federation.run), federation.run.history[-1]
    for names in (list(words), list(row)):
        assert not any(other.startswith(f"{name}/") for name in names for other in names)
    assert all(type(word) in (bool, int, float, str) for word in words.values())
    assert not any("/" in name or name.startswith("_") or "._" in name for name in words)
    assert words["method"] == columns(federation.run)["method"] == method
    assert yaml.safe_load(yaml.safe_dump(words)) == words


def test_what_is_told() -> None:
    words = hyperparameters(fit(False).run)
    assert {name: words[name] for name in ("seed", "clients", "cohort", "rounds", "partition", "networks")} == {
        **{"seed": 0, "clients": 4, "cohort": 4, "rounds": 2, "partition": "Growing", "networks": "Net, WideNet"}
    }
    assert (words["model.hidden_dim"], words["model.mu"], words["lr.local"]) == (60, 0.9, 0.1)


@cache
def recorded(folder: str) -> EventAccumulator:
    return EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0}).Reload()


def test_tensorboard_begins_with_the_headline(tmp_path: Path) -> None:
    federation = fit(True)
    found, row = recorded(str(tmp_path / "runs/version_0")), federation.run.history[-1]
    tags = set(found.Tags()["scalars"])
    for name, column in {
        "accuracy": "after/test_accuracy/mean",
        "q25": "after/test_accuracy/q25",
        "worst": "after/test_accuracy/min",
        "selected": "selected/test_accuracy",
    }.items():
        assert found.Scalars(f"monitor/{name}")[-1].value == pytest.approx(row[column])
    charts = page("accuracy")
    assert list(charts) == ["monitor", "clients", "training", "cost"]
    shown = {tag for category in charts.values() for _, wanted in category.values() for tag in wanted if not tag.startswith("^")}
    assert shown <= tags
    assert found.Tensors("custom_scalars__config__")
    [text] = found.Tensors("configuration/text_summary")
    assert b"lr.local: 0.1" in text.tensor_proto.string_val[0]


def test_the_table_of_runs_has_words_and_results(tmp_path: Path) -> None:
    federation = fit(True)
    metadata = recorded(str(tmp_path / "runs/version_0")).summary_metadata
    experiment, start = (metadata[f"_hparams_/{tag}"].plugin_data.content for tag in ("experiment", "session_start_info"))
    table = parse_experiment_plugin_data(experiment)
    assert [info.display_name for info in table.hparam_infos][:5] == ["method", "seed", "partition", "networks", "lr"]
    assert [info.display_name for info in table.metric_infos] == ["last", "selected", "worst", "bytes"]
    session = parse_session_start_info_plugin_data(start)
    assert session.hparams["00 method"].string_value == "PFedLoRA"
    assert len(session.hparams) == len(columns(federation.run))
    assert "_hparams_/session_end_info" in metadata
    assert yaml.safe_load(Path("runs/version_0/hparams.yaml").read_text()) == hyperparameters(federation.run)


def test_columns_are_the_same_for_every_method() -> None:
    """TensorBoard takes those of one run for all."""
    tables = [list(columns(fit(False, method, 1).run)) for method in ("FedAvg", "Ditto")]
    assert tables[0] == tables[1]


# ---------------------------------------------------------------------------------------------------------- where to look


class Elsewhere(Logger):
    """Keeps things in no folder."""

    name = "elsewhere"
    version = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...


def test_the_last_lines_fit_the_loggers() -> None:
    federation = fit([True, CSVLogger("tables", name="mine"), Elsewhere()])
    assert list(where_to_look(federation.run)) == [
        "To see the curves:",
        "tensorboard --logdir runs/version_0",
        "  then open http://localhost:6006/#custom_scalars",
        "CSVLogger: tables/mine/version_0",
        "Logged by Elsewhere.",
    ]
    assert list(where_to_look(fit(False).run)) == ["Tables: runs/version_1"]


def test_a_run_of_a_python_program_is_pointed_to_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(1, "runs", logger=False, progress=True).fit(new_method("FedAvg"), new_data(2))
    said = capsys.readouterr().out
    assert "--model Standalone" not in said
    assert said.splitlines()[-1] == "Tables: runs/version_0"
