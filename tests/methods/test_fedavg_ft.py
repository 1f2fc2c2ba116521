"""FedAvg with local fine-tuning, and adapting before measuring as an option of every method."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import CLASSES, Net, NoisyNet, Recording, assert_same, momentum, new_data, new_federation, same, sgd, without_seconds
from tiny_rounds import fit

from lightning_fed.core import FineTuning
from lightning_fed.data.client_info import SERVER
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedAvgFT, FedHM, FedPer, FedRep, PF2LoRA

fit = partial(fit, rounds=2, evaluate_every=1)


@cache
def run_of_fedavg() -> Federation:
    """FedAvg's run, which others are compared with."""
    return fit(FedAvg(NoisyNet, CLASSES, momentum))


@cache
def run_of_its_own() -> Federation:
    """The method's run with its defaults."""
    return fit(FedAvgFT(NoisyNet, CLASSES, optimizer=momentum))


def without_adapting(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """What training and the global model say of a round."""
    own = ("after/", "selected/", "fine_tune/")
    return [{name: value for name, value in row.items() if not name.startswith(own)} for row in without_seconds(history)]


def test_without_fine_tuning_it_is_fedavg() -> None:
    assert_same(fit(FedAvgFT(NoisyNet, CLASSES, optimizer=momentum, fine_tuning=FineTuning(epochs=0))), run_of_fedavg())


@pytest.mark.often(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"fine_tuning": FineTuning(epochs=3)}, {"fine_tuning": FineTuning(steps=2)}, {"fine_tuning": FineTuning(part="head")}],
)
def test_what_is_shared_goes_fedavgs_way_bit_for_bit(options: dict[str, Any]) -> None:
    """So do costs, the global model, and what is measured before aggregation."""
    ours, theirs = fit(FedAvgFT(NoisyNet, CLASSES, optimizer=momentum, **options)) if options else run_of_its_own(), run_of_fedavg()
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())
    assert without_adapting(ours.run.history) == without_adapting(theirs.run.history)
    assert "global/test_accuracy" in ours.run.history[-1]
    assert ours.run.results != theirs.run.results


def test_measured_again_it_is_the_same() -> None:
    federation = fit(FedAvgFT(NoisyNet, CLASSES, optimizer=momentum), run_dir="runs")
    first = federation.run.results
    assert federation.run.measure("test") == federation.run.measure("test")
    assert federation.run.results == first
    continued = new_federation(2, run_dir="runs")
    continued.test(FedAvgFT(NoisyNet, CLASSES, optimizer=momentum), new_data(3, 120))
    assert continued.run.results == first


def test_nothing_of_it_is_kept() -> None:
    """Neither in the store, nor in what the next turn begins with, nor in a checkpoint."""
    federation = fit(FedAvgFT(Net, CLASSES, optimizer=momentum), run_dir="runs")
    assert not any(client in federation.run.store for client in range(3))
    plain = fit(FedAvg(Net, CLASSES, momentum), run_dir="plain")
    files = [
        safetensors.torch.load_file(sorted(Path(run, "version_0/checkpoints").iterdir())[-1] / "server.safetensors")
        for run in ("runs", "plain")
    ]
    assert same(*files)
    assert not same(plain.client_module(0).state_dict(), federation.client_module(0).state_dict())


def test_a_clients_module_is_the_adapted_one() -> None:
    """Whatever random state it is asked in, and without touching that."""
    federation = run_of_its_own()
    before = torch.get_rng_state()
    modules = [federation.run.client_module(1)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    modules.append(federation.run.client_module(1))
    assert same(modules[0].state_dict(), modules[1].state_dict())
    assert not same(modules[0].state_dict(), federation.run.server.state_dict())
    data = federation.run.data.client(1)
    images, labels = data.data[data.splits[2]]
    accuracy = (modules[0].eval()(images).argmax(dim=1) == labels).float().mean().item()
    assert accuracy == pytest.approx(federation.run.results[1]["test/accuracy"])
    assert same(federation.run.server_module().state_dict(), federation.run.server.state_dict())


def test_its_flops_are_apart() -> None:
    """An epoch of adapting everybody costs what an epoch of training everybody does."""
    row = fit(FedAvgFT(Net, CLASSES, optimizer=sgd), rounds=1).run.history[0]
    assert row["fine_tune/flops"] == row["fine_tune/total_flops"] == row["compute/flops"] > 0
    plain = fit(FedAvg(Net, CLASSES, sgd), rounds=1).run.history[0]
    assert "fine_tune/flops" not in plain
    assert plain["compute/flops"] == row["compute/flops"] == row["compute/total_flops"]


def test_the_stream_is_that_of_seed_round_and_client() -> None:
    """The order of batches differs between rounds and from that of training."""
    engine = Recording()
    seeds: list[int] = []
    federation = new_federation(2, evaluate_every=1, engine=engine)

    class Noted(FedAvgFT):
        def on_fit_start(self) -> None:
            super().on_fit_start()
            seeds.append(self.trainer.datamodule.order_seed)  # type: ignore[attr-defined]

    federation.fit(Noted(Net, CLASSES, optimizer=sgd), new_data(3, 120))
    assert len(seeds) == len(set(seeds)) == 12  # three clients train and adapt in two rounds


def test_with_layers_head_nothing_else_changes() -> None:
    federation = fit(FedAvgFT(NoisyNet, CLASSES, optimizer=momentum, fine_tuning=FineTuning(epochs=2, part="head")))
    before, after = federation.run.server.state_dict(), federation.client_module(0).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"backbone.head.weight", "backbone.head.bias"}


def test_with_layers_private_what_is_shared_stays_as_it_is() -> None:
    """The head, and the layer in front of it, where both stay with the client."""
    federation = fit(FedPer(Net, CLASSES, optimizer=momentum, private_layers=2, fine_tuning=FineTuning(epochs=2, part="private")))
    plain = fit(FedPer(Net, CLASSES, optimizer=momentum, private_layers=2))
    before, after = plain.client_module(0).state_dict(), federation.client_module(0).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == plain.client_module(0).private_names() != plain.client_module(0).state_dict().keys()


def test_adapting_last_measures_the_last_round_twice(tmp_path: Path) -> None:
    """As clients are, which is what a run without it finds, and adapted, which is what a run that always adapts finds."""
    method = partial(FedRep, Net, CLASSES, optimizer=sgd, epochs=1)
    at_last = FineTuning(2, part="head", when="last")
    last = fit(method(fine_tuning=at_last), run_dir=tmp_path)
    always = fit(method(fine_tuning=FineTuning(2, part="head")))
    never = fit(FedRep(Net, CLASSES, optimizer=sgd, epochs=1))
    own = ("fine_tune/", "fine_tuned/")
    as_they_are = [{name: v for name, v in row.items() if not name.startswith(own)} for row in without_seconds(last.run.history)]
    assert as_they_are == without_seconds(never.run.history)
    assert last.run.results == never.run.results
    first, end = last.run.history
    adapted = {name: value for name, value in end.items() if name.startswith(own)}
    tuned = {
        name.replace("after/", "fine_tuned/"): v for name, v in always.run.history[-1].items() if name.startswith(("after/", *own))
    }
    assert adapted.items() - {("fine_tune/total_flops", end["fine_tune/flops"])} <= tuned.items()
    assert "fine_tuned/test_accuracy/mean" in adapted
    assert not any(name.startswith(own) for name in first)
    assert end["fine_tuned/test_accuracy/mean"] != end["after/test_accuracy/mean"]
    again = new_federation(2, run_dir=tmp_path)
    found = again.test(method(fine_tuning=at_last), new_data(3, 120))
    assert {name: value for name, value in end.items() if name.startswith(("after/test_", "fine_tuned/test_"))} == found


def test_adapting_last_needs_something_that_adapts() -> None:
    with pytest.raises(FederationError, match="fine_tuning has when=last, but nothing is tuned: say for how long with epochs"):
        FedPer(Net, CLASSES, fine_tuning=FineTuning(epochs=0, when="last"))


def test_an_optimizer_of_its_own() -> None:
    still = fit(
        FedAvgFT(
            Net, CLASSES, optimizer=sgd, fine_tuning=FineTuning(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        )
    )
    assert same(still.client_module(0).state_dict(), still.run.server.state_dict())


@pytest.mark.slow
def test_a_servers_models_are_measured_as_they_are() -> None:
    """Statistics are the client's own."""
    tuned, plain = (
        fit(FedHM(NoisyNet, CLASSES, ratios=[1.0, 0.5], optimizer=sgd, fine_tuning=FineTuning(steps=steps))) for steps in (2, 0)
    )
    assert same(tuned.run.server.state_dict(), plain.run.server.state_dict())
    models = [{k: v for k, v in f.run.history[-1].items() if k.startswith(("global/", "rank_"))} for f in (tuned, plain)]
    assert models[0] == models[1]
    assert SERVER not in tuned.run.results


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FedAvg(Net, CLASSES, fine_tuning=FineTuning(epochs=1, steps=1)),
            "fine_tuning has epochs=1 and steps=1: give one of them",
        ),
        (lambda: PF2LoRA(Net, CLASSES, fine_tuning=FineTuning(steps=1)), "PF2LoRA has a training step of its own"),
    ],
)
def test_what_cannot_adapt_is_refused(make: Any, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        make()


def test_what_a_method_does_not_have_cannot_be_adapted_which_is_said_before_the_first_round() -> None:
    class Frozen(FedAvg):
        def build(self) -> None:
            super().build()
            self.backbone.head.requires_grad_(False)

    with pytest.raises(FederationError, match=r"^fine_tuning has part=head, but Frozen has no head that learns: set it to all"):
        fit(Frozen(Net, CLASSES, optimizer=sgd, fine_tuning=FineTuning(epochs=1, part="head")))
    with pytest.raises(FederationError, match=r"^fine_tuning has part=private, but FedAvg has nothing private that learns"):
        fit(FedAvg(Net, CLASSES, optimizer=sgd, fine_tuning=FineTuning(part="private")))
