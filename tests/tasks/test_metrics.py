"""F1 and Matthews' correlation as scikit-learn, and with it GLUE, has them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from lightning_fed.tasks.metrics import F1, Matthews


def f1(labels: Any, predictions: Any) -> float:
    return f1_score(labels, predictions, average="binary" if len(labels.unique()) < 3 else "macro")


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize(("kind", "expected"), [(F1, f1), (Matthews, matthews_corrcoef)])
def test_as_scikit_learn_has_it(kind: type[F1 | Matthews], expected: Callable[[Any, Any], float], classes: int) -> None:
    stream = torch.Generator().manual_seed(classes)
    present = classes - (classes > 3)  # one class does not occur
    labels = torch.randint(present, (50,), generator=stream)
    predictions = torch.where(torch.rand(50, generator=stream) < 0.6, labels, torch.randint(present, (50,), generator=stream))
    metric = kind(classes)
    for part in range(0, 50, 20):
        metric.update(predictions[part : part + 20], labels[part : part + 20])
    assert expected(labels, predictions) > 0.3
    assert metric.compute().item() == pytest.approx(expected(labels, predictions), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "predictions", "labels"),
    [
        (Matthews, [1] * 10, [1] * 7 + [0] * 3),
        (Matthews, [1] * 10, [1] * 10),
        (Matthews, [0, 1] * 5, [1] * 10),
        (F1, [0] * 10, [0] * 10),
    ],
)
def test_what_is_constant_is_worth_nothing(kind: type[F1 | Matthews], predictions: list[int], labels: list[int]) -> None:
    metric = kind(2)
    metric.update(torch.tensor(predictions), torch.tensor(labels))
    assert metric.compute() == 0  # as scikit-learn has it, with a warning where there is one class only
