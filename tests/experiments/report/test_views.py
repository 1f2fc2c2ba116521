"""Which of a run's rounds a number is of, by hand."""

import math

import pandas as pd
import pytest

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.views import View, lower_is_better

METRIC = "after/test_accuracy/mean"
ROUNDS = pd.DataFrame(
    {
        "round": [1, 2, 3, 4, 5],
        METRIC: [0.2, 0.7, math.nan, 0.5, 0.6],
        "after/val_accuracy/mean": [0.1, 0.2, math.nan, 0.9, 0.3],
        "after/test_loss/mean": [5, 1, math.nan, 2, 3],
    }
)


@pytest.mark.parametrize(
    ("at", "value", "round"),
    [("last", 0.6, 5), ("selected", 0.5, 4), ("best", 0.7, 2), ("mean1", 0.6, None), ("mean3", 0.6, None), ("mean4", 0.5, None)],
)
def test_a_number_and_its_round(at: str, value: float, round: int | None) -> None:
    assert View(at).value(ROUNDS, METRIC) == pytest.approx(value)
    row = View(at).row(ROUNDS, METRIC)
    assert (None if row is None else row["round"]) == round


def test_what_the_rounds_do_not_have_is_not_known() -> None:
    assert math.isnan(View("mean5").value(ROUNDS, METRIC))  # one was not measured
    assert math.isnan(View("selected").value(ROUNDS, "after/test_loss/mean"))
    assert math.isnan(View().value(ROUNDS, "global/test_accuracy"))


def test_an_evaluation_that_came_to_no_number_is_not_passed_over() -> None:
    rounds = ROUNDS.assign(**{METRIC: [0.2, 0.7, math.nan, 0.5, math.nan]})
    assert math.isnan(View("last").value(rounds, METRIC))
    assert math.isnan(View("mean2").value(rounds, METRIC))
    assert View("best").value(rounds, METRIC) == 0.7


def test_the_best_loss_is_the_smallest() -> None:
    assert View("best").value(ROUNDS, "after/test_loss/mean") == 1
    assert [lower_is_better(f"after/test_{name}/mean") for name in ("loss", "rmse", "accuracy")] == [True, True, False]


def test_training_losses_are_better_if_smaller_and_are_not_validation_data() -> None:
    rounds = ROUNDS.assign(**{"train/local_loss": [1.0, 0.5, 0.4, 0.3, 0.2]})
    assert View("best").value(rounds, "train/local_loss") == 0.2
    assert math.isnan(View("selected").value(rounds, "train/local_loss"))


@pytest.mark.parametrize("at", ["first", "mean", "mean0", "mean1.5", "last "])
def test_what_is_no_view_is_refused(at: str) -> None:
    with pytest.raises(FederationError, match="expected last, selected, best or, say, mean10"):
        View(at)
