"""Losses, metrics and monitored of one's own; several labels at once, and numbers."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from often import OFTEN, mostly_slow
from sklearn.metrics import f1_score
from tiny import (
    CLASSES,
    METHODS,
    ON_IMAGES,
    Growing,
    Net,
    Recording,
    Tempered,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    new_texts,
    new_trainer,
    private_states,
    same,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper

import lightning_fed.methods
from lightning_fed.callbacks.progress import summary_table
from lightning_fed.data import ClassesPerClient, Diabetes, DigitAttributes, InMemory
from lightning_fed.data.batches import INPUT, TARGETS
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedHM, FedPer, FedProto, FedRoD, HeteroFL, PFedLoRA
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.methods.families.model_sizes import SizedModule
from lightning_fed.models import MLP
from lightning_fed.tasks.task import TASKS

OUTPUTS = 3


class Numbers(InMemory):
    """Three numbers, or labels, that follow from the input; classes are what data are partitioned by."""

    num_labels = CLASSES
    predicts_labels = False

    def __init__(self, problem: str, **kwargs: Any) -> None:
        data = new_data(1)
        images, labels, *_ = data.load()
        values = images.flatten(1)[:, :OUTPUTS]
        targets = values if problem == "regression" else (values > 0).float()
        super().__init__({INPUT: images, TARGETS: targets}, labels, OUTPUTS, partition=Growing(), batch_size=16, **kwargs)
        self.problem = problem


class Tokens(Numbers):
    """The same of tokenised texts."""

    def __init__(self, problem: str, **kwargs: Any) -> None:
        super().__init__(problem, **kwargs)
        texts, labels, *_ = new_texts(1).load()
        values = torch.stack([texts["input_ids"][:, 1], *([labels] * (OUTPUTS - 1))], dim=1).float()
        targets = values if problem == "regression" else (values > 2).float()
        self._pools = (
            {**texts, TARGETS: targets},
            labels,
            {**{k: t[:0] for k, t in texts.items()}, TARGETS: targets[:0]},
            labels[:0],
        )


def fit(model: Any, data: Any = None, rounds: int = 2, **options: Any) -> Federation:
    federation = new_federation(rounds, trainer=new_trainer, **options)
    federation.fit(model, data or new_data(2, 80))
    return federation


def built(model: Any) -> Any:
    model.configure_model()
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("name", METHODS)
def test_every_method_honours_the_loss_or_refuses_it(name: str) -> None:
    """Three times the cross-entropy is three times the loss; another kind is refused where classes are what a method is about."""
    method = getattr(lightning_fed.methods, name)

    class Louder(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return 3 * super().forward(input, target)

    louder, plain = (new_method(name, loss=loss) for loss in (Louder(), None))
    batch = next(iter(data_for(name, num_clients=1, size=60).client(0).train_dataloader()))
    client = data_for(name, num_clients=1, size=60).clients[0]
    batch = [batch] * plain.batches_per_step if plain.batches_per_step > 1 else batch
    losses = []
    for template in (plain, louder):
        module = template.for_client(client).eval()
        per_phase = []
        for phase in module.phases():
            module.phase = phase
            module.manual_backward = lambda loss: loss.backward()
            torch.manual_seed(0)
            per_phase.append(module.compute_gradients(batch).item())
        losses.append(per_phase)
    # Penalties and what peers say are not multiplied, and inner steps are longer.
    rough = {"FML": 0.7, "FedKD": 0.7, "MOON": 0.7, "HETLoRA": 0.5, "FedHM": 0.5, "FedHMDelta": 0.5}
    rough |= {"PF2LoRA": 0.2, "PerFedAvgLoRA": 0.01, "PerFedAvg": 0.2}
    inexact = rough.get(name, 1e-4)
    assert losses[1] == pytest.approx([3 * loss for loss in losses[0]], rel=inexact)
    assert losses[1] != losses[0]
    if name in ("FedRoD", "FD", "FedKD", "PFedSD") or issubclass(method, SizedModule):
        with pytest.raises(FederationError, match=rf"{name} got the loss MultiMarginLoss, but it"):
            new_method(name, loss=nn.MultiMarginLoss())
    else:
        new_method(name, loss=nn.MultiMarginLoss())


def test_label_smoothing_and_class_weights() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    module = built(FedAvg(Net, CLASSES, loss=nn.CrossEntropyLoss(weights, label_smoothing=0.2)))
    x, y = torch.randn(6, 3, 4, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    assert torch.equal(module.client_loss((x, y)), cross_entropy(module(x), y, weights, label_smoothing=0.2))


def test_a_loss_moves_with_the_module_and_is_in_no_state() -> None:
    loss = nn.CrossEntropyLoss(torch.ones(CLASSES))
    module = built(FedAvg(Net, CLASSES, loss=loss)).double()
    assert module.task.loss.weight.dtype == torch.float64
    assert loss.weight is not None
    assert loss.weight.dtype == torch.float32
    assert not any("loss" in name for name in module.state_dict())
    assert "weight" in loss.state_dict()  # the user's own is as it was


TRAIN_PARTS = {
    "APFL",
    "Ditto",
    "FedBABU",
    "FedDecomp",
    "FedKD",
    "FedRep",
    "FedSALoRA",
    "FML",
    "PFedGate",
    "PFedLoRA",
    "PFedMe",
    "PFedSD",
}
"""Methods whose phases name what learns of the networks."""


@pytest.mark.parametrize("name", mostly_slow(METHODS, often={"FedAvg", "FedBABU", "FedRolex", "SplitMix"}))
def test_parameters_of_a_loss_are_trained_or_refused(name: str) -> None:
    engine, model = Recording(), new_method(name, loss=Tempered())
    if name in TRAIN_PARTS:
        with pytest.raises(FederationError, match=f"^{name} does not train parameters of the loss, but Tempered has log_scale"):
            fit(model, data_for(name), 1)
        return
    federation = fit(model, data_for(name), 1, engine=engine)
    states = [*(update.state for update in engine.trained), *private_states(federation).values()]
    found = [state["task.loss.log_scale"] for state in states if "task.loss.log_scale" in state]
    assert found
    assert all(found)


def test_a_function_is_a_loss() -> None:
    plain, given = (fit(FedAvg(Net, CLASSES, loss=loss)) for loss in (None, cross_entropy))
    assert same(plain.run.server.state, given.run.server.state)


# --------------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("metric", ["accuracy", "f1", "matthews"])
def test_any_metric_of_the_task_is_the_headline(metric: str) -> None:
    for federation in (
        fit(FedAvg(Net, CLASSES, metric=metric)),
        fit(new_method("HOMLoRA", metric=metric), new_texts(2, 60)),
    ):
        assert federation.run.monitored("test") == f"after/test_{metric}/mean"
        assert {f"after/test_{metric}/mean", f"selected/test_{metric}", "after/test_accuracy/mean"} <= federation.run.history[
            -1
        ].keys()


def test_metrics_of_ones_own() -> None:
    top = MulticlassAccuracy(CLASSES, top_k=CLASSES)
    for model, data in (
        (FedAvg(Net, CLASSES, metrics={"top": top}, metric="top"), None),
        (new_method("HOMLoRA", metrics={"top": top}, metric="top"), new_texts(2, 60)),
    ):
        assert fit(model, data).run.history[-1]["selected/test_top"] == 1.0
    assert not top.update_called  # a copy was measured with


def test_unknown_metrics_are_refused() -> None:
    with pytest.raises(FederationError, match="metric is 'rmse', but what can be measured is accuracy, f1, matthews: choose"):
        built(FedAvg(Net, CLASSES, metric="rmse"))
    with pytest.raises(FederationError, match="metric is 'bleu', but what can be measured is accuracy, f1, matthews: choose"):
        built(new_method("HOMLoRA", metric="bleu"))
    with pytest.raises(FederationError, match=r"metrics has 'mine', which is no torchmetrics\.Metric"):
        FedAvg(Net, CLASSES, metrics={"mine": print})
    with pytest.raises(FederationError, match="metrics has 'loss', which is the name of the loss that is logged: give"):
        FedAvg(Net, CLASSES, metrics={"loss": MulticlassAccuracy(CLASSES)})
    with pytest.raises(FederationError, match="FedAvg got task='ranking': give one of multiclass, binary,"):
        FedAvg(Net, CLASSES, task="ranking")


def test_a_metric_of_several_numbers_is_refused() -> None:
    each = MulticlassRecall(CLASSES, average=None)
    for metric, said in ((each, r"MulticlassRecall, gives a tensor of shape \(4,\)"), (ClasswiseWrapper(each), "gives a dict")):
        with pytest.raises(FederationError, match=f"The metric 'mine', a .*{said}, expected a tensor of one number: give a metric"):
            fit(FedAvg(Net, CLASSES, metrics={"mine": metric}), rounds=1)


class Named(FedAvg):
    """Measured by its own metric alone."""

    monitor = "error"

    def configure_metrics(self) -> Any:
        from torchmetrics import MetricCollection

        return MetricCollection({"error": MeanSquaredError()})

    def update_metrics(self, metrics: Any, batch: Any) -> None:
        x, y = self.unpack(batch)
        metrics.update(self(x).argmax(dim=1).float(), y.float())


def test_the_best_is_the_smallest_where_less_is_better() -> None:
    federation = fit(Named(Net, CLASSES, momentum), rounds=4, target=100.0, evaluate_every=1)
    history = federation.run.history
    assert not federation.run.model.higher_is_better
    best = min(history, key=lambda row: row["after/val_error/mean"])
    assert history[-1]["selected/round"] == best["round"]
    assert history[-1]["selected/test_error"] == best["after/test_error/mean"]
    assert history[-1]["target/round"] == 1  # below 100 from the first round on
    columns = [list(column.cells) for column in summary_table(federation.run).columns]
    row = columns[0].index("→ after aggregation, all clients")
    assert float(str(columns[2][row])) >= float(str(columns[3][row]))  # the worst client has the largest error


def test_a_target_below_is_reached_from_above() -> None:
    assert "target/round" not in fit(Named(Net, CLASSES), target=-1.0).run.history[-1]


# ----------------------------------------------------------------------------------------------- labels at once, numbers


REFUSING = {
    "FedRoD": "its balanced softmax",
    "FedHM": "its mask",
    "FedHMDelta": "its mask",
    "HeteroFL": "its mask",
    "FedRolex": "its mask",
    "SplitMix": "its mask",
    "FML": "its networks teach each other",
    "FedKD": "its networks teach each other",
    "FD": "its teachers are probabilities",
    "FedDF": "it distils probabilities of classes",
    "FedET": "it distils probabilities of classes",
    "DSFL": "it exchanges probabilities of classes",
    "FedAS": "its clients keep the mean features of classes",
    "FedProto": "prototypes are those of classes",
    "PFedSD": "it distils softmax probabilities",
}
NO_MASK = {"FedRoD", "FML", "FedKD", "FD", "FedDF", "FedET", "DSFL", "FedProto", "FedAS", "PFedSD"}


PROBLEMS = ["multilabel", "regression"]
IN_TURN = {(name, PROBLEMS[place % 2]) for place, name in enumerate(METHODS) if name in OFTEN or name in REFUSING}


@pytest.mark.parametrize(("name", "problem"), mostly_slow(product(METHODS, PROBLEMS), often=IN_TURN))
def test_every_method_learns_more_than_classes_or_says_why_not(name: str, problem: str) -> None:
    method = getattr(lightning_fed.methods, name)
    texts = issubclass(method, AdapterModule) and name not in ON_IMAGES
    data = (Tokens if texts else Numbers)(problem, num_clients=2)
    options: dict[str, Any] = {"task": problem, "num_classes": OUTPUTS}
    if name in REFUSING:
        with pytest.raises(FederationError, match=f"{name} got task '{problem}', but {REFUSING[name]}"):
            new_method(name, **options)
        if name in NO_MASK:
            return
        options["masked"] = False
    federation = fit(new_method(name, **options), data, rounds=1)
    monitor = {"multilabel": "f1", "regression": "rmse"}[problem]
    adapted = "adapted_" if issubclass(method, lightning_fed.methods.PerFedAvg) else ""
    assert federation.run.metric == f"{adapted}{monitor}"
    assert federation.run.model.higher_is_better == (problem == "multilabel")
    row = federation.run.history[-1]
    assert math.isfinite(row[f"after/test_{adapted}{monitor}/mean"])
    assert row[f"selected/test_{adapted}{monitor}"] >= 0
    assert data.majority_accuracy() is None
    assert summary_table(federation.run).row_count > 3


def test_losses_and_metrics_of_several_labels() -> None:
    module = built(FedAvg(Net, 2, task="multilabel", metric="exact_match"))
    x, y = torch.randn(6, 3, 4, 4), torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1], [1, 1]])
    assert torch.equal(module.client_loss((x, y)), binary_cross_entropy_with_logits(module(x), y.float()))
    small = nn.Module.__call__(module, x) * 1e-3  # logits that might be taken for probabilities
    for metric in (metrics := module.configure_metrics()).values():
        metric.update(*module.task.measured(small, y))
    found, guesses = metrics.compute(), (small > 0).long()
    assert found["accuracy"].item() == pytest.approx((guesses == y).float().mean().item())
    assert found["exact_match"].item() == pytest.approx((guesses == y).all(dim=1).float().mean().item())
    assert found["f1"].item() == pytest.approx(f1_score(y, guesses, average="macro", zero_division=0))


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_one_number_has_one_dimension_or_two(shape: tuple[int, ...]) -> None:
    module = built(FedAvg(Net, 1, task="regression"))
    x, y = torch.randn(6, 3, 4, 4), torch.randn(shape)
    expected = (module(x).flatten() - y.flatten()).square().mean()
    assert module.client_loss((x, y)).item() == pytest.approx(expected.item())
    metrics = module.configure_metrics()
    module.update_metrics(metrics, (x, y))
    assert metrics.compute()["rmse"].item() == pytest.approx(expected.sqrt().item())


@pytest.mark.parametrize("metric", list(TASKS["regression"].measures))
@pytest.mark.parametrize("outputs", [1, OUTPUTS])
def test_every_metric_of_numbers(metric: str, outputs: int) -> None:
    module = built(FedAvg(Net, outputs, task="regression", metric=metric))
    metrics = module.configure_metrics()
    module.update_metrics(metrics, (torch.randn(6, 3, 4, 4), torch.randn(6, outputs)))
    assert math.isfinite(metrics.compute()[metric])


def test_outputs_are_not_repeated_for_targets() -> None:
    module = built(FedAvg(Net, 1, task="regression"))
    with pytest.raises(FederationError, match=r"outputs of shape \(6,\) for targets of shape \(6, 3\): set num_classes"):
        module.client_loss((torch.randn(6, 3, 4, 4), torch.randn(6, 3)))


def test_counts_of_other_labels_are_refused() -> None:
    """Data that count something else than the classes that are predicted."""
    for method, what in (
        (FedRoD, "FedRoD needs the client's examples of each of the 3 classes"),
        (HeteroFL, "HeteroFL masks classes"),
    ):
        data = Numbers("multiclass", num_clients=2)
        data._pools = ({**data._pools[0], TARGETS: data._pools[1] % OUTPUTS}, *data._pools[1:])  # type: ignore[dict-item]
        options: dict[str, Any] = {"widths": [1.0]} if method is HeteroFL else {}
        with pytest.raises(FederationError, match=what):
            fit(method(Net, OUTPUTS, **options), data)


# ------------------------------------------------------------------------------------------------------------------ data


def test_diabetes() -> None:
    data = Diabetes(num_clients=4, partition=ClassesPerClient(2))
    x, y = next(iter(data.client(0).train_dataloader()))
    assert x.shape == (64, 10)
    assert y.shape == (64,)
    assert sum(client.num_train + client.num_val + client.num_test for client in data.clients) == 442
    assert (data.label_counts() > 0).sum(dim=1).tolist() == [2] * 4
    shared = data._loaded().images
    assert isinstance(shared, dict)
    assert shared[TARGETS].std().item() == pytest.approx(1)
    assert fit(FedPer(MLP, 1, task="regression"), data).run.metric == "rmse"


def test_the_data_say_what_is_predicted_unless_the_module_was_told() -> None:
    data = Diabetes(num_clients=2)
    module = FedPer(MLP)
    assert fit(module, data, rounds=1).run.metric == "rmse"
    assert fit(FedPer(Net), new_data(2), rounds=1).run.metric == "accuracy"
    assert module.task.name == "multiclass"  # the module itself has not learned it
    alone = FedPer(MLP)
    new_trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(alone, data.client(0))
    assert alone.task.name == alone.hparams["task"] == "regression"
    with pytest.raises(FederationError, match=r"FedProto got task 'regression', but prototypes are those of classes"):
        fit(FedProto(MLP), data, rounds=1)
    with pytest.raises(FederationError, match=r"FedHM got task 'regression', but its mask of absent classes"):
        fit(FedHM(MLP, ratios=[1.0]), data, rounds=1)
    built = FedAvg(MLP, 1)
    built.configure_model()
    with pytest.raises(FederationError, match=r"FedAvg has been built to predict multiclass, but the task of the data is"):
        fit(built, data, rounds=1)
    said = Diabetes(num_clients=2)
    said.problem = "multilabel"
    assert fit(FedPer(MLP, task="regression"), said, rounds=1).run.metric == "rmse"


@pytest.mark.parametrize(
    ("problem", "targets", "said"),
    [
        ("multiclass", torch.eye(OUTPUTS), r"The targets are torch.float32 of shape \(\d+, 3\), but classes are expected as whole"),
        ("binary", torch.tensor([0.0, 1.0, 0.95]), r"A target is 0.95, expected 0 or 1 \(no or yes\), as the task is 'binary'"),
        ("multilabel", 2 * torch.eye(OUTPUTS) - 1, r"A target is -1, expected 0 or 1"),
        ("survival", torch.tensor([[0.0, 1.5], [1.0, 0.0], [2.0, 3.0]]), r"The event of an example is 2, expected 1, or 0 if"),
    ],
)
def test_targets_of_another_task_are_refused(problem: str, targets: Tensor, said: str) -> None:
    """Losses take them, but accuracy would take soft targets for class 0: refused before the first round, or when data that do not
    fit into memory are measured.
    """
    data = Numbers(problem, num_clients=2)
    rows, *rest = data.load()
    assert isinstance(rows, dict)
    rows[TARGETS] = targets[torch.arange(len(rows[INPUT])) % len(targets)]
    data.num_classes = 1 if problem in ("binary", "survival") else OUTPUTS
    data.load = lambda: (rows, *rest)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(FederationError, match=said):
        fit(FedAvg(MLP), data)
    module = FedProto(MLP, data.num_classes) if problem == "multiclass" else FedAvg(MLP, data.num_classes, task=problem)
    pairs = DataLoader(TensorDataset(rows[INPUT], rows[TARGETS]), batch_size=8)
    with pytest.raises(FederationError, match=said):
        new_trainer().test(module, pairs, verbose=False)


def test_the_labels_of_data_that_are_read_on_demand_are_not_taken_for_their_targets() -> None:
    class OnDemand(LazyInputs):
        def __init__(self, rows: dict[str, Tensor]) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows[INPUT])

        def read(self, rows: Tensor) -> dict[str, Tensor]:
            return {name: tensor[rows] for name, tensor in self.rows.items()}

    data = Numbers("multilabel", num_clients=2)
    rows, labels, nothing, none = data.load()
    assert isinstance(rows, dict)
    assert isinstance(nothing, dict)
    assert labels.max() > 1
    lazily = OnDemand(rows), labels, OnDemand(nothing), none
    data.load = lambda: lazily  # type: ignore[method-assign, assignment, return-value]
    fit(FedAvg(Net), data, rounds=1)


def test_digit_attributes() -> None:
    data = DigitAttributes(num_clients=2, image_size=8)
    module = data.client(0)
    x, y = next(iter(module.train_dataloader()))
    assert (x.shape, x.dtype, y.shape) == ((64, 3, 8, 8), torch.uint8, (64, 4))
    images, _ = module.on_after_batch_transfer((x, y), 0)
    assert images.dtype == torch.float32  # normalized, as images are
    table, digits = data._loaded().images, data._loaded().labels
    assert isinstance(table, dict)
    assert {int(d): table[TARGETS][digits == d][0].tolist() for d in (2, 9)} == {2: [0, 0, 1, 0], 9: [1, 1, 0, 1]}


def test_methods_keep_their_own_loss_beside_the_given_one() -> None:
    """The proximal weighting of pFedLoRA's two branches, on a loss that is not cross-entropy."""
    module = built(PFedLoRA(Net, CLASSES, mu=0.7, loss=nn.MultiMarginLoss()))
    x, y = torch.randn(6, 3, 4, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    branch = module.adapter(module.backbone.encode(x))
    margin = nn.MultiMarginLoss()
    assert module.client_loss((x, y)).item() == pytest.approx((0.3 * margin(branch, y) + 0.7 * margin(module(x), y)).item())
    assert module.adapter_loss((x, y)).item() == pytest.approx(margin(branch, y).item())
    assert new_method("HOMLoRA", loss=margin).criterion(module(x), y) == margin(module(x), y)
