"""Metrics as scikit-learn has them, in every precision, and where they are undefined."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef, r2_score, roc_auc_score
from tiny import CLASSES, Net, new_data, new_trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.data import IID, InMemory
from lightning_fed.data.batches import INPUT, TARGETS
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.tasks.metrics import F1, R2, Matthews, MeanPearson, MeanSpearman
from lightning_fed.tasks.task import TASKS


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


@pytest.mark.parametrize(("center", "scale"), [(0, 1), (1000, 1), (0, 1e-5)])
def test_r2_is_exact_wherever_the_targets_are(center: float, scale: float) -> None:
    stream = torch.Generator().manual_seed(0)
    targets = torch.randn(60, 2, generator=stream) * scale + center
    outputs = targets + torch.randn(60, 2, generator=stream) * scale / 2
    metric = R2()
    for part in range(0, 60, 25):
        metric.update(outputs[part : part + 25], targets[part : part + 25])
    assert metric.compute().item() == pytest.approx(r2_score(targets.double(), outputs.double()), abs=1e-6)


def test_what_is_undefined_is_no_number() -> None:
    """So that it does not count in means over clients: of one example, or with constant predictions or targets."""
    for metric in (R2(), MeanSpearman(1), MeanPearson()):
        metric.update(torch.ones(1), torch.zeros(1))
        assert metric.compute().isnan()
    several = MeanSpearman(1)
    several.update(torch.ones(3), torch.arange(3.0))
    assert several.compute().isnan()
    for value in torch.linspace(-3, 3, 50):
        metric = MeanPearson()
        for count in (512, 88):
            metric.update(value.expand(count), torch.rand(count))
        assert metric.compute().isnan()
    constant = R2()
    constant.update(torch.arange(3.0), torch.ones(3))
    assert constant.compute() == r2_score([1, 1, 1], [0, 1, 2]) == 0


def test_confident_predictions_keep_their_order() -> None:
    logits, labels = torch.linspace(17, 22, 40)[:, None], torch.arange(40) >= 20
    for name, task, count in (("auroc", "binary", 1), ("average_precision", "multilabel", 2)):
        metric = TASKS[task].measures[name](count)
        metric.update(*TASKS[task]().measured(logits.expand(-1, count), labels.float()[:, None].expand(-1, count)))
        assert metric.compute() == 1, name


def test_metrics_of_half_precision_are_computed_in_single() -> None:
    """Rounded probabilities would be tied, and neither targets nor sums fit into eight bits."""
    stream = torch.Generator().manual_seed(0)
    labels = (torch.rand(400, generator=stream) < 0.5).float()
    logits = (3 * torch.randn(400, 1, generator=stream) + 6 * labels[:, None]).bfloat16()
    area = TASKS["binary"].measures["auroc"](1)
    area.update(*TASKS["binary"]().measured(logits, labels))
    assert area.compute().item() == pytest.approx(roc_auc_score(labels, logits.float()[:, 0]), abs=1e-6)
    task, targets = TASKS["regression"](), 1000 + 10 * torch.rand(400, generator=stream)
    outputs = targets[:, None].bfloat16()
    error = TASKS["regression"].measures["rmse"](1)
    error.update(*task.measured(outputs, targets))
    expected = mse_loss(outputs[:, 0].float(), targets)
    assert error.compute().item() == pytest.approx(expected.sqrt().item())
    assert task.criterion(outputs, targets).item() == pytest.approx(expected.item())


def test_sums_stay_in_single_precision_in_a_half_precision_module() -> None:
    """In bfloat16 a sum of 256 errors of 1 would no longer grow."""
    module = FedAvg(partial(nn.Linear, 1), 1, task="regression")
    module.configure_model()
    nn.init.zeros_(module.backbone.network.weight), nn.init.zeros_(module.backbone.network.bias)
    examples = DataLoader(TensorDataset(torch.ones(600, 1), torch.ones(600)), batch_size=1)
    [result] = new_trainer(precision="bf16-true").test(module, examples, verbose=False)
    assert module.dtype == torch.bfloat16
    assert (result["test/mae"], result["test/rmse"]) == (1, 1)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(ignore_index=255), partial(cross_entropy, ignore_index=255)])
def test_what_the_loss_ignores_is_not_measured(loss: Any) -> None:
    stream = torch.Generator().manual_seed(0)
    task, outputs = TASKS["multiclass"](loss), torch.randn(2, 3, 4, 4, generator=stream)
    targets = torch.randint(3, (2, 4, 4), generator=stream)
    targets[:, :2] = 255  # of images of 4 x 4 pixels the upper half
    lower, known = outputs[:, :, 2:], targets[:, 2:]
    assert task.criterion(outputs, targets).item() == pytest.approx(cross_entropy(lower, known).item())
    for name, make in TASKS["multiclass"].measures.items():
        measured, expected = make(3), make(3)
        measured.update(*task.measured(outputs, targets))
        expected.update(lower, known)
        assert measured.compute().item() == pytest.approx(expected.compute().item()), name


def test_targets_that_a_loss_ignores_unnoticed_are_refused() -> None:
    """They would count as wrong."""

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, ignore_index=255)

    module = FedAvg(partial(nn.Conv2d, 1, kernel_size=1), 3, loss=own)
    images, targets = torch.ones(4, 1, 2, 2), torch.tensor([[0, -100], [2, 255]]).repeat(4, 1, 1)
    pixels = DataLoader(TensorDataset(images, targets))
    with pytest.raises(FederationError, match=r"A target is 255, but classes go from 0 to 2.* \(loss.ignore_index = 255\)\."):
        new_trainer().test(module, pixels, verbose=False)
    own.ignore_index = 255  # type: ignore[attr-defined]
    targets[targets == -100] = 1
    new_trainer().test(module, pixels, verbose=False)


@pytest.mark.parametrize("targets", [torch.full((2, 4), -100), torch.zeros(0, dtype=torch.long)], ids=["ignored", "empty"])
def test_a_batch_of_which_everything_is_ignored_has_no_loss_and_no_gradient(targets: Tensor) -> None:
    outputs = torch.randn(len(targets), 3, *targets.shape[1:], requires_grad=True)
    loss = TASKS["multiclass"]().criterion(outputs, targets)
    loss.backward()
    assert loss == 0
    assert outputs.grad is not None
    assert not outputs.grad.any()


def test_a_loss_of_many_terms_does_not_depend_on_the_batches() -> None:
    """Each term counts once, and what is ignored does not, in a batch of its own either."""
    stream = torch.Generator().manual_seed(0)
    images, targets = torch.randn(10, 3, 2, 2, generator=stream), torch.randint(3, (10, 2, 2), generator=stream)
    targets[::2, 1], targets[1] = -100, -100
    losses = []
    for size in (1, 4, 10):
        data = InMemory({INPUT: images, TARGETS: targets}, [0] * 10, 3, num_clients=1, test_share=0.8, eval_batch_size=size)
        data.partition, data.predicts_labels = IID(), False
        torch.manual_seed(0)
        [result] = new_trainer().test(FedAvg(partial(nn.Conv2d, 3, kernel_size=1), 3), datamodule=data.client(0), verbose=False)
        losses.append(result["test/loss"])
    assert losses == pytest.approx([losses[-1]] * 3)


def test_a_weighted_mean_does_not_depend_on_the_batches() -> None:
    loss, losses = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 0.2, 3.0])), []
    for size in (4, 7, 1000):
        torch.manual_seed(0)
        [result] = new_trainer().test(
            FedAvg(Net, CLASSES, loss=loss), datamodule=new_data(1, 200, eval_batch_size=size).client(0), verbose=False
        )
        losses.append(result["test/loss"])
    assert losses == pytest.approx([losses[-1]] * 3)


def test_an_own_loss_may_say_what_it_wants_of_its_reduction() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum") / len(targets)

    loss.reduction = "sum"  # type: ignore[attr-defined]
    FedAvg(Net, CLASSES, loss=loss)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_no_mean_is_refused(reduction: str) -> None:
    with pytest.raises(FederationError, match=f"CrossEntropyLoss with reduction='{reduction}', but a loss must be a mean"):
        FedAvg(Net, CLASSES, loss=nn.CrossEntropyLoss(reduction=reduction))
    with pytest.raises(FederationError, match=f"partial with reduction='{reduction}', but a loss must be a mean"):
        FedAvg(Net, CLASSES, loss=partial(cross_entropy, reduction=reduction))
