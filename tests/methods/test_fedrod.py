"""FedRoD: two heads that must not disturb each other."""

import pytest
import torch
from tiny import CLASSES, Net, new_data, new_federation, same, sgd, still
from tiny_loops import fixed
from tiny_rounds import fit
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.data import IID
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, FedRoD
from lightning_fed.models import CNN1
from lightning_fed.tensors import count_floats

INFO = new_data().clients[0]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES


def test_payloads() -> None:
    linear, hyper = (FedRoD(CNN1, 10, personal_head=kind).for_client(INFO) for kind in ("linear", "hyper"))
    assert count_floats(linear.shared_state()) == 2_621_558
    assert count_floats(linear.private_state()) == 5_010
    # 10·16 + 16 + 16·5,010 + 5,010 for the network that makes heads
    assert count_floats(hyper.shared_state()) == 2_621_558 + 85_346
    assert not hyper.private_state()


def test_without_balancing_the_generic_model_is_fedavgs() -> None:
    ours, theirs = (
        fit(each, rounds=2) for each in (FedRoD(fixed(Net), CLASSES, gamma=0, optimizer=sgd), FedAvg(fixed(Net), CLASSES, sgd))
    )
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())


@pytest.mark.parametrize("kind", ["linear", "hyper"])
def test_in_double_precision_the_prior_is_double_too(kind: str) -> None:
    module = FedRoD(Net, CLASSES, personal_head=kind).for_client(INFO).double()
    x, y = batch()
    counts = torch.tensor(INFO.label_counts, dtype=torch.float64)
    features = module.backbone.encode(x.double())
    generic, personal = module.backbone.classify(features), module.personal_logits(features)
    expected = cross_entropy(generic + counts.log(), y) + cross_entropy(generic + personal, y)
    assert module.client_loss((x.double(), y)).item() == pytest.approx(expected.item(), abs=1e-13)
    if kind == "hyper":
        flat = module.personal(counts / counts.sum())
        assert torch.equal(personal, features @ flat[:-CLASSES].view(CLASSES, -1).T + flat[-CLASSES:])


@pytest.mark.parametrize("kind", ["linear", "hyper"])
def test_the_personal_loss_reaches_the_personal_head_alone(kind: str) -> None:
    """The rest has the gradient of the generic loss."""
    module = FedRoD(Net, CLASSES, personal_head=kind, gamma=0).for_client(INFO)
    with torch.no_grad():
        for parameter in module.personal.parameters():
            parameter.add_(0.1)  # a head of zeros would pass no gradient on
    x, y = batch()
    shared, own = list(module.backbone.parameters()), list(module.personal.parameters())
    found = torch.autograd.grad(module.client_loss((x, y)), [*shared, *own])
    for one, other in zip(found, torch.autograd.grad(cross_entropy(module.backbone(x), y), shared), strict=False):
        torch.testing.assert_close(one, other)
    assert any(gradient.any() for gradient in found[len(shared) :])


def test_the_loss_that_is_logged_is_the_mean_of_the_two() -> None:
    """Without balancing and learning both heads say what FedAvg's one says."""
    methods = FedRoD(fixed(Net), CLASSES, gamma=0, optimizer=still), FedAvg(fixed(Net), CLASSES, still)
    ours, theirs = (fit(method, rounds=2) for method in methods)
    assert ours.run.history[0]["train/local_loss"] == theirs.run.history[0]["train/local_loss"]


def test_a_zero_head_predicts_what_the_generic_one_does() -> None:
    module = FedRoD(Net, CLASSES).for_client(INFO)
    x, _ = batch()
    assert torch.equal(module(x), module.backbone(x))


@pytest.mark.parametrize("kind", ["linear", "hyper"])
def test_the_generic_model_is_measured_and_so_is_that_with_everybodys_head(kind: str) -> None:
    data = new_data(3, 240)
    federation = new_federation(2)
    federation.fit(FedRoD(Net, CLASSES, personal_head=kind, optimizer=sgd), data)
    row, state = federation.run.history[-1], federation.run.server.state_dict()
    pooled = data.pooled()
    x, y = pooled.data[pooled.splits[-1]]
    network = Net(CLASSES)
    network.load_state_dict({name.removeprefix("backbone."): t for name, t in state.items() if name.startswith("backbone.")})
    logits = network(x)
    assert row["generic/test_accuracy"] == pytest.approx((logits.argmax(dim=1) == y).float().mean().item())
    assert ("everybody/test_accuracy" in row) == (kind == "hyper")
    assert "global/test_accuracy" not in row
    if kind == "hyper":
        counts = torch.tensor(pooled.info.label_counts).float()
        hidden = torch.relu(state["personal.0.weight"] @ (counts / counts.sum()) + state["personal.0.bias"])
        flat = state["personal.2.weight"] @ hidden + state["personal.2.bias"]
        logits = logits + network.encode(x) @ flat[:-CLASSES].view(CLASSES, -1).T + flat[-CLASSES:]
        assert row["everybody/test_accuracy"] == pytest.approx((logits.argmax(dim=1) == y).float().mean().item())
        assert same(federation.run.server_module().shared_state(), state)


@pytest.mark.parametrize("gamma", [1.0, 0.1])
def test_absent_classes_leave_the_softmax_and_make_no_nan(gamma: float) -> None:
    federation = fit(FedRoD(Net, CLASSES, gamma=gamma, optimizer=sgd), new_data(3, 120, partition=IID()), rounds=2)
    module = federation.client_module(0)
    object.__setattr__(module.client, "label_counts", (5, 0, 0, 3))
    x, y = batch()[0], torch.tensor([0, 3] * 4)
    loss = module.client_loss((x, y))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())
    present = module.backbone(x)[:, [0, 3]] + gamma * torch.tensor([5.0, 3.0]).log()
    expected = cross_entropy(present, torch.tensor([0, 1] * 4)) + cross_entropy(module(x), y)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_without_label_counts_it_says_what_it_needs() -> None:
    module = FedRoD(Net, CLASSES)
    module.configure_model()
    with pytest.raises(FederationError, match="label counts"):
        module.client_loss(batch())
