"""What has another name now is said to whoever uses the old one, where that is read, and is used nowhere else."""

import inspect
from pathlib import Path

import pytest
from written_runs import write_run

import lightning_fed.data
import lightning_fed.methods
from lightning_fed import Federation, FederationError
from lightning_fed.cli.refusals import parameters_of
from lightning_fed.core import FineTuning
from lightning_fed.experiments.renames import METRICS, OPTIONS, hint
from lightning_fed.experiments.report import load_runs
from lightning_fed.experiments.sweep.plan import ReportOptions


def known_options() -> set[str]:
    homes = [Federation, *(getattr(home, name) for home in (lightning_fed.methods, lightning_fed.data) for name in home.__all__)]
    homes.append(ReportOptions)
    own = {name for home in homes if inspect.isclass(home) for name in parameters_of(home)}
    return own | {f"fine_tuning.{name}" for name in parameters_of(FineTuning)}


def test_options_have_their_new_names_and_not_the_old_ones() -> None:
    known = known_options()
    assert set(OPTIONS.values()) <= known
    assert not OPTIONS.keys() & known


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("adapted/test_accuracy/mean", "fine_tuned/test_accuracy/mean"),
        ("round/lost", "round/failed_clients"),
        ("after/test_f1", None),
    ],
)
def test_metrics_by_their_whole_name_or_its_beginning(old: str, new: str | None) -> None:
    assert hint(old, METRICS) == (f" (it is called {new} now)" if new else "")


def test_a_report_of_an_old_metric_says_the_new_name(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5])
    with pytest.raises(
        FederationError, match=r"No run has adapted/test_accuracy/mean \(it is called fine_tuned/test_accuracy/mean now\)"
    ):
        load_runs(tmp_path, metric="adapted/test_accuracy/mean")
