"""FedDF against its paper."""

from functools import cache, partial
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, Net, NoisyNet, Recording, WideNet, momentum, new_trainer, same, still
from tiny_loops import batches, learn, mean_of
from tiny_public import PROXY, fit, public_batches, with_public
from tiny_rounds import UniformFedAvg
from torch import nn

from lightning_fed.data import PublicShare
from lightning_fed.engines.worker import Worker
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedDF
from lightning_fed.methods.families.distillation import EnsembleServer
from lightning_fed.methods.feddf import teacher_outputs
from lightning_fed.seeding import INITIAL, PUBLIC, seeded


def new(**options: Any) -> FedDF:
    settings = {"distill_steps": 7, "distill_batch_size": 16, "optimizer": momentum, "validate_every": 100}
    return FedDF(**{"backbone": [Net, WideNet], "num_classes": CLASSES} | settings | options)


@cache
def played() -> Federation:
    """Two rounds, which tests look at."""
    return fit(new())


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


@pytest.mark.parametrize(
    ("distill_loss", "temperature"),
    mostly_slow(product(["avg_logits", "avg_losses"], [1.0, 3.0]), often={("avg_logits", 1.0), ("avg_losses", 3.0)}),
)
def test_rounds_are_those_of_a_bare_loop(distill_loss: Any, temperature: float) -> None:
    T = temperature
    data, steps = with_public(val_share=0.0), 7
    slow = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # Adam makes much of a last bit
    model = new(distill_loss=distill_loss, temperature=T, distill_optimizer=slow, distill_clip=0.5)
    federation = fit(model, data)

    with seeded(0, INITIAL):
        template = new()
        template.configure_model()
        initial = template.configure_server(data.clients).state_dict()
    students: list[nn.Module] = [Net(CLASSES), WideNet(CLASSES)]
    for place, student in enumerate(students):
        prefix = f"{place}/backbone."
        student.load_state_dict({name.removeprefix(prefix): t for name, t in initial.items() if name.startswith(prefix)})
    for round in (1, 2):
        sent: list[nn.Module] = []
        for k in range(4):
            network = [Net, WideNet][k % 2](CLASSES)
            network.load_state_dict(students[k % 2].state_dict())
            learn(network, batches(data, k, round, 0), momentum)
            sent.append(network.eval())
        with torch.no_grad():
            z = torch.stack([network(PROXY) for network in sent])
        for place, student in enumerate(students):
            student.load_state_dict(mean_of(sent[place::2]))
            optimizer = slow(student.parameters())
            for taken, (x, numbers) in enumerate(public_batches(data, 16, steps, PUBLIC, round, place)):
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * (1 + torch.cos(torch.tensor(taken / steps * torch.pi)).item()) / 2
                q = (student(x) / T).log_softmax(1)
                if distill_loss == "avg_logits":
                    p = (z[:, numbers].mean(0) / T).softmax(1)
                    loss = (p * (p.log() - q)).sum(1).mean()
                else:
                    p = (z[:, numbers] / T).softmax(2)
                    loss = (p * (p.log() - q)).sum(2).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5)
                optimizer.step()

    for name, tensor in federation.run.server.state_dict().items():
        place, _, rest = name.partition("/backbone.")
        torch.testing.assert_close(tensor, students[int(place)].state_dict()[rest], rtol=2e-4, atol=1e-5)


def test_without_steps_it_is_fedavg_of_each_architecture_bit_for_bit() -> None:
    """Which is that of the clients that have it."""
    ours = fit(new(backbone=NoisyNet, distill_steps=0), participation=0.7)
    theirs = fit(UniformFedAvg(NoisyNet, CLASSES, momentum), with_public(), participation=0.7)
    state = {name.removeprefix("0/"): tensor for name, tensor in ours.run.server.state_dict().items()}
    assert same(state, theirs.run.server.state_dict())
    assert ours.run.history[-1]["global/test_accuracy"] == theirs.run.history[-1]["global/test_accuracy"]
    engine = Recording()
    two = fit(new(distill_steps=0), engine=engine, rounds=1)
    for place in (0, 1):
        own = [update.state for update in engine.trained if update.client % 2 == place]
        mean = {name: (sum(state[name].double() for state in own) / len(own)).float() for name in own[0]}  # type: ignore[union-attr]
        assert same(
            {name.removeprefix(f"{place}/"): t for name, t in two.run.server.state_dict().items() if name[0] == str(place)}, mean
        )


# ------------------------------------------------------------------------------------------------------------ the students


def test_who_is_best_on_validation_data_stays_and_patience_ends_the_training() -> None:
    """With a rate that spoils everything, the first validated student is as good as any later one."""
    spoiling = partial(torch.optim.SGD, lr=50.0)
    data = with_public(val_share=0.2)
    options = {"distill_steps": 40, "distill_optimizer": spoiling, "distill_clip": None}
    patient = fit(new(**options, validate_every=2, patience=6), data, rounds=1, trainer=new_trainer).run.history[0]
    endless = fit(new(**options, validate_every=2, patience=None), data, rounds=1, trainer=new_trainer).run.history[0]
    assert patient["server/steps"] < endless["server/steps"] == 2 * 40
    last = fit(new(**options), with_public(val_share=0.0), rounds=1).run
    assert last.history[0]["server/steps"] == 2 * 40


# ------------------------------------------------------------------------------------------------------------ the server


def test_what_the_server_does_is_counted_apart() -> None:
    ours, plain = played().run.history, fit(new(distill_steps=0)).run.history
    for row, other in zip(ours, plain, strict=True):
        assert row["compute/flops"] == other["compute/flops"]
        assert row["traffic/up_bytes"] == other["traffic/up_bytes"]
        assert row["traffic/down_bytes"] == other["traffic/down_bytes"]
        assert (row["server/teachers"], row["server/steps"]) == (4, 2 * 7)
        assert "server/flops" not in other
    assert ours[1]["server/total_flops"] == 2 * ours[0]["server/flops"] > 0
    assert all("seconds/server" in row for row in ours)


def test_a_pass_of_each_teacher_and_the_students_steps_are_counted() -> None:
    row = fit(new(backbone=Net), with_public(val_share=0.0), rounds=1).run.history[0]
    values = sum(p.numel() for p in Net(CLASSES).parameters() if p.dim() == 2)
    first = Net(CLASSES).fc1.weight.numel()
    seen = 2 * (16 + 16 + 16) + 2  # in seven batches of 50 examples
    assert row["server/flops"] == 2 * 4 * 50 * values + seen * (6 * values - 2 * first)


def test_each_architectures_model_is_measured() -> None:
    row = played().run.history[-1]
    assert {"global_Net/test_accuracy", "global_WideNet/test_accuracy", "after/test_accuracy/mean"} <= row.keys()
    assert "global/test_accuracy" in fit(new(backbone=Net), rounds=1).run.history[-1]


def test_the_server_hands_out_the_model_of_the_first_architecture() -> None:
    """Where one is wanted and no client is named."""
    federation = played()
    module, state = federation.run.server_module(), federation.run.server.state_dict()
    assert isinstance(module.backbone, Net)
    assert all(name.startswith(("0/backbone.", "1/backbone.")) for name in state)
    assert same(module.shared_state(), {name[2:]: tensor for name, tensor in state.items() if name.startswith("0/")})


def test_who_knows_nothing_does_not_teach() -> None:
    """All that are no better than chance: the averages stay."""
    model = new(drop_worst=True, optimizer=still)
    run = fit(model, with_public(val_share=0.3), rounds=1, trainer=new_trainer)
    row = run.run.history[0]
    assert row["server/teachers"] < 4
    if row["server/teachers"] == 0:
        assert row["server/steps"] == 0
    with pytest.raises(FederationError, match="drop_worst needs validation data"):
        fit(new(drop_worst=True), with_public(val_share=0.0), rounds=1)


def test_public_data_may_be_a_share_of_the_clients_own() -> None:
    row = fit(new(), with_public(public=PublicShare(0.2)), rounds=1).run.history[0]
    assert row["server/steps"] == 14


def test_a_table_beyond_the_limit_is_in_bfloat16() -> None:
    """Teachers' words and their mean; students learn nearly the same."""
    ends = []
    for limit in (1.0, 50 * CLASSES * 4 / 2**20, 50 * CLASSES * 4 / 2**20 - 1e-6):
        engine = Recording()
        federation = fit(new(table_limit_mb=limit, distill_optimizer=partial(torch.optim.SGD, lr=0.1)), engine=engine, rounds=1)
        ends.append(federation.run.server.state_dict())
        said = [
            update.state["outputs"]
            for turn, update in zip(engine.turns, engine.updates, strict=True)
            if turn.verb == "predict_public"
        ]
        tables = [turn.broadcast.state["targets/avg_logits"] for turn in engine.turns if turn.verb == "train_on_public"]
        dtype = torch.bfloat16 if len(ends) == 3 else torch.float32
        assert {tensor.dtype for tensor in (*said, *tables)} == {dtype}
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])
    torch.testing.assert_close(ends[2], ends[0], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("distill_loss", ["avg_logits", "avg_losses"])
def test_the_loss_is_the_divergence_from_the_teachers(distill_loss: Any) -> None:
    """From their mean logits, or the mean of those from each: its value too, not its gradient alone."""
    module = new(distill_loss=distill_loss, temperature=2.0)
    module.configure_model()
    x, teachers = torch.randn(6, 3, 4, 4), 3 * torch.randn(3, 6, CLASSES)
    words = torch.stack([teacher_outputs(logits, distill_loss, 2.0) for logits in teachers])
    module.load_payload({f"targets/{distill_loss}": words.mean(0)})
    guess = (module(x) / 2).log_softmax(1)
    each = [teachers.mean(0)] if distill_loss == "avg_logits" else teachers
    apart = [(p * (p.log() - guess)).sum(1).mean() for p in ((logits / 2).softmax(1) for logits in each)]
    torch.testing.assert_close(module.student_loss((x, torch.arange(6))), torch.stack(apart).mean())


def test_one_teacher_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for one by one, when the one before has spoken."""
    order: list[str] = []
    teacher, answer = EnsembleServer.teacher, Worker.predict_public
    monkeypatch.setattr(EnsembleServer, "teacher", lambda *given: order.append("asked") or teacher(*given))
    monkeypatch.setattr(Worker, "predict_public", lambda *given: order.append("spoke") or answer(*given))
    fit(new(), rounds=1)
    assert order == ["asked", "spoke"] * 4


def test_a_teacher_that_is_asked_about_a_part_is_refused() -> None:
    """By an option of the trainer's that is for something else."""
    trainer = partial(L.Trainer, accelerator="cpu", devices=1, limit_predict_batches=1)
    with pytest.raises(FederationError, match="predicted 16 of 50 public examples: remove limit_predict_batches"):
        fit(new(), trainer=trainer)
