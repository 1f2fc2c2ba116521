"""Matthews' correlation as scikit-learn, and with it GLUE, has it."""

import pytest
import torch
from sklearn.metrics import matthews_corrcoef

from lightning_fed.tasks.metrics import Matthews


@pytest.mark.parametrize("classes", [2, 3])
def test_as_scikit_learn_has_it(classes: int) -> None:
    stream = torch.Generator().manual_seed(classes)
    labels = torch.randint(classes, (50,), generator=stream)
    predictions = torch.where(torch.rand(50, generator=stream) < 0.6, labels, torch.randint(classes, (50,), generator=stream))
    metric = Matthews(classes)
    for part in range(0, 50, 20):
        metric.update(predictions[part : part + 20], labels[part : part + 20])
    expected = matthews_corrcoef(labels, predictions)
    assert expected > 0.3
    assert metric.compute().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("predictions", "labels"), [([1] * 10, [1] * 7 + [0] * 3), ([1] * 10, [1] * 10), ([0, 1] * 5, [1] * 10)])
def test_what_is_constant_is_worth_nothing(predictions: list[int], labels: list[int]) -> None:
    metric = Matthews(2)
    metric.update(torch.tensor(predictions), torch.tensor(labels))
    assert metric.compute() == 0  # as scikit-learn has it, with a warning where there is one class only
