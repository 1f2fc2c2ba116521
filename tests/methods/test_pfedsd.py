"""pFedSD: FedAvg whose clients are taught by what they were."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, Recording, momentum, new_data, private_states, same
from tiny_loops import batches, step, stripped, turn_of
from tiny_rounds import UniformFedAvg, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core import FineTuning
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.methods import FedAvg, PFedSD
from lightning_fed.seeding import INITIAL, seeded
from lightning_fed.tensors import State

INFO = new_data().clients[1]
BATCH = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(4)), torch.arange(8) % CLASSES


fit = partial(fit, rounds=3)


def test_rounds_are_those_of_a_bare_loop() -> None:
    data, epochs, lam, T = new_data(3, 120), 2, 0.7, 3.0
    federation = fit(PFedSD(Net, CLASSES, lam, T, weighting="examples", optimizer=momentum, epochs=epochs), data)

    with seeded(0, INITIAL):
        template = FedAvg(Net, CLASSES)
        template.configure_model()
    w: State = {name: tensor.clone() for name, tensor in template.backbone.state_dict().items()}
    personal: dict[int, nn.Module] = {}
    for round in (1, 2, 3):
        trained: list[nn.Module] = []
        for k in range(3):
            student = Net(CLASSES)
            student.load_state_dict(w)
            optimizer = momentum(student.parameters())
            for x, y in turn_of(data, k, round, epochs):
                logits = student(x)
                loss = cross_entropy(logits, y)
                if k in personal:
                    p = (personal[k](x).detach() / T).softmax(1)
                    q = (logits / T).softmax(1)
                    loss = loss + lam * T**2 * (p * (p.log() - q.log())).sum(1).mean()
                step(optimizer, loss)
            trained.append(student)
        personal = dict(enumerate(trained))
        n = [client.num_train for client in data.clients]
        states = [student.state_dict() for student in trained]
        w = {name: sum(n_k * s[name].double() for n_k, s in zip(n, states, strict=True)).div(sum(n)).float() for name in w}  # type: ignore[union-attr]

    torch.testing.assert_close(stripped(federation.run.server.state_dict()), w, rtol=1e-4, atol=1e-6)
    for k, network in personal.items():
        kept = federation.run.store.get(k)
        torch.testing.assert_close(stripped(kept, "personal."), network.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.often(2)
@pytest.mark.parametrize(("lam", "rounds"), [(0.0, 3), (2.0, 1)])
@pytest.mark.parametrize(("weighting", "reference"), [("uniform", UniformFedAvg), ("examples", FedAvg)])
def test_without_a_teacher_it_is_fedavg_bit_for_bit(lam: float, rounds: int, weighting: Any, reference: type[FedAvg]) -> None:
    """Without its weight in all rounds, and with any weight in the first."""
    options: dict[str, Any] = {"rounds": rounds, "participation": 0.7}
    ours = fit(PFedSD(NoisyNet, CLASSES, lam, weighting=weighting, optimizer=momentum, epochs=2), **options)
    theirs = fit(reference(NoisyNet, CLASSES, momentum, epochs=2), **options)
    assert same(ours.run.server.state_dict(), theirs.run.server.state_dict())
    assert [row["train/local_loss"] for row in ours.run.history] == [row["train/local_loss"] for row in theirs.run.history]
    assert ours.run.history[-1]["global/test_accuracy"] == theirs.run.history[-1]["global/test_accuracy"]


def test_who_takes_part_for_the_first_time_has_no_teacher() -> None:
    """In whatever round that is: the loss of its turn is FedAvg's from the same broadcast."""
    engine = Recording()
    federation = fit(PFedSD(Net, CLASSES, 50.0, optimizer=momentum), engine=engine, participation=0.4, rounds=4)
    seen: set[int] = set()
    plain = 0
    for turn, update in engine.fits():
        alone = fit_turn(FedAvg(Net, CLASSES, momentum), turn.broadcast.state, turn.client.id, turn.round)
        as_fedavg = same(update.state, alone)
        assert as_fedavg == (turn.client.id not in seen)
        plain += as_fedavg
        seen.add(turn.client.id)
    assert plain == len(seen) < len(engine.fits())
    assert private_states(federation).keys() == seen


def test_who_has_no_personal_model_has_nothing_private_to_tune() -> None:
    plain, tuned = (
        fit(PFedSD(Net, CLASSES, fine_tuning=tuning), participation=0.4) for tuning in (None, FineTuning(steps=2, part="private"))
    )
    costs = [result.get("fine_tune/flops", 0) for result in tuned.run.results.values()]
    assert [cost > 0 for cost in costs] == [client in private_states(tuned) for client in tuned.run.results]
    assert all(tuned.run.results[client] == plain.run.results[client] for client, cost in enumerate(costs) if not cost)


def fit_turn(model: FederatedModule, start: State, client: int, round: int) -> State:
    """A network that has trained as in a turn."""
    model.configure_model()
    model.load_shared_state(start)
    params = momentum(model.backbone.parameters())
    for x, y in batches(new_data(3, 120), client, round, 0):
        step(params, cross_entropy(model(x), y))
    return model.shared_state()


# ------------------------------------------------------------------------------------------------------------ the teacher


class Watching(PFedSD):
    """Notes the teacher when a turn begins and when it has trained."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.before = {name: tensor.clone() for name, tensor in self.personal.state_dict().items()}
        self.modes = []

    def distilled_loss(self, batch: Any) -> Tensor:
        self.modes.append((self.backbone.training, self.personal.training))
        return super().distilled_loss(batch)

    def on_train_end(self) -> None:
        super().on_train_end()
        assert same(self.before, dict(self.personal.state_dict()))
        assert all(p.grad is None for p in self.personal.parameters())
        assert set(self.modes) <= {(True, False)}


def test_the_teacher_is_still_in_eval_mode_and_only_swapped_at_the_end() -> None:
    """With batch norm and dropout."""
    engine = Recording()
    federation = fit(Watching(NoisyNet, CLASSES, optimizer=momentum), engine=engine)
    for client, private in private_states(federation).items():
        last = [update for update in engine.trained if update.client == client][-1]
        assert private.pop("trained")
        assert same({name.replace("personal", "backbone"): tensor for name, tensor in private.items()}, last.state)


def taught(network: type[Net], **options: Any) -> PFedSD:
    """A client that is its own teacher."""
    module = PFedSD(network, CLASSES, **options).for_client(INFO)
    module.after_training({})
    module.phase = module.phases()[0]
    return module


# ------------------------------------------------------------------------------------------------------------ what is measured


class Before(FederationCallback):
    """What participants reach when they have trained."""

    def __init__(self) -> None:
        self.accuracy: dict[int, float] = {}

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        if "test/accuracy" in update.metrics:
            self.accuracy[update.client] = update.metrics["test/accuracy"]


def test_participants_are_measured_as_they_were_before_aggregation_and_others_as_they_last_were() -> None:
    before = Before()
    federation = fit(
        PFedSD(Net, CLASSES, optimizer=momentum), new_data(5, 200), participation=0.4, evaluate_every=1, callbacks=[before]
    )
    assert 2 < len(before.accuracy) < 5
    for client, result in federation.run.results.items():
        module = federation.client_module(client)
        if client in before.accuracy:
            assert result["test/accuracy"] == before.accuracy[client]
        else:
            assert torch.equal(module(BATCH[0]), module.backbone(BATCH[0]))


def test_the_teachers_pass_is_counted() -> None:
    """Forward, in the rounds that have one: a third more than forward and backward, but that the first layer has no gradient to
    pass on.
    """
    first, second, third = (row["compute/flops"] for row in fit(PFedSD(Net, CLASSES)).run.history)
    plain = fit(FedAvg(Net, CLASSES)).run.history[0]["compute/flops"]
    assert first == plain
    assert second == third
    module = taught(Net)
    per_example = 2 * sum(p.numel() for p in module.backbone.parameters() if p.dim() == 2)
    assert second - first == per_example * sum(client.num_train for client in new_data(3, 120).clients)
