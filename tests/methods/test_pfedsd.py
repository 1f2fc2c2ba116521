"""pFedSD: FedAvg whose clients are taught by what they were."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, Recording, momentum, new_data, private_states, same
from tiny_loops import drawn, step, stripped, turn_of
from tiny_rounds import UniformFedAvg, assert_same_runs, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.core import FineTuning
from lightning_fed.methods import FedAvg, PFedSD
from lightning_fed.tensors import State

BATCH = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(4)), torch.arange(8) % CLASSES


fit = partial(fit, rounds=3)


def test_rounds_are_those_of_a_bare_loop() -> None:
    data, epochs, lam, T = new_data(3, 120), 2, 0.7, 3.0
    federation = fit(PFedSD(Net, CLASSES, lam, T, weighting="examples", optimizer=momentum, epochs=epochs), data)

    template = drawn(FedAvg(Net, CLASSES))
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
    ours = PFedSD(NoisyNet, CLASSES, lam, weighting=weighting, optimizer=momentum, epochs=2)
    theirs = reference(NoisyNet, CLASSES, momentum, epochs=2)
    assert_same_runs(ours, theirs, "server", "losses", rounds=rounds, participation=0.7)


def test_who_has_no_personal_model_has_nothing_private_to_tune() -> None:
    plain, tuned = (
        fit(PFedSD(Net, CLASSES, fine_tuning=tuning), participation=0.4) for tuning in (None, FineTuning(steps=2, part="private"))
    )
    costs = [result.get("fine_tune/flops", 0) for result in tuned.run.results.values()]
    assert [cost > 0 for cost in costs] == [client in private_states(tuned) for client in tuned.run.results]
    assert all(tuned.run.results[client] == plain.run.results[client] for client, cost in enumerate(costs) if not cost)


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


# ------------------------------------------------------------------------------------------------------------ what is measured


def test_participants_are_measured_as_they_were_before_aggregation_and_others_as_they_last_were() -> None:
    engine = Recording()
    federation = fit(PFedSD(Net, CLASSES, optimizer=momentum), new_data(5, 200), participation=0.4, evaluate_every=1, engine=engine)
    before = {update.client: update.metrics["test/accuracy"] for update in engine.trained}
    assert 2 < len(before) < 5
    for client, result in federation.run.results.items():
        module = federation.client_module(client)
        if client in before:
            assert result["test/accuracy"] == before[client]
        else:
            assert torch.equal(module(BATCH[0]), module.backbone(BATCH[0]))
