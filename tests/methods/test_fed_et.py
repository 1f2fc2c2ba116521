"""Fed-ET against its paper."""

from functools import cache
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, Recording, WideNet, momentum, same, still
from tiny_loops import learn, mean_of, step, turn_of
from tiny_public import PROXY, fit, public_batches, said_in, with_public
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.data.client_info import SERVER
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedDF, FedET
from lightning_fed.methods.fed_et import confidence_weights, consensus
from lightning_fed.seeding import INITIAL, PUBLIC, seeded

HEAD = ("backbone.head.weight", "backbone.head.bias")


class LargeNet(Net):
    """The server's, with as many features."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=11)


class OtherHead(Net):
    """One that cannot be given the others' head."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, width=2.0)


def new(**options: Any) -> FedET:
    settings = {"distill_steps": 7, "distill_batch_size": 16, "optimizer": momentum, "server_backbone": LargeNet}
    return FedET(**{"backbone": [Net, WideNet], "num_classes": CLASSES} | settings | options)


@cache
def played() -> Federation:
    """Two rounds, which tests look at."""
    return fit(new())


def logits(clients: int = 5, examples: int = 40) -> Tensor:
    return torch.randn(clients, examples, CLASSES, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- what they agree on


def test_who_agree_have_no_others() -> None:
    """Not even nearly: there is nothing that is divided by zero."""
    same_for_all = logits(1).expand(5, -1, -1)
    found = consensus(same_for_all)
    assert torch.equal(found.labels, same_for_all[0].argmax(1))
    assert not found.disagreed.any()
    assert torch.equal(found.others, torch.zeros_like(found.others))


def test_who_prefer_nothing_count_the_same() -> None:
    """All logits alike: no variance, and no NaN."""
    assert torch.equal(confidence_weights(torch.ones(4, 3, 5), "logits"), torch.full((4, 3), 0.25))
    assert consensus(torch.ones(4, 3, 5)).labels.tolist() == [0, 0, 0]


# ----------------------------------------------------------------------------------------------------------------- the loss


def student_of(said: Tensor, **options: Any) -> FedET:
    """The large model, taught by clients who said this."""
    module, found = new(**options).for_client(with_public().clients[0]), consensus(said)
    others = {"targets/others": found.others.float(), "targets/disagreed": found.disagreed} if module.diversity else {}
    module.load_payload({"targets/labels": found.labels} | others)
    return module


EVERY = PROXY, torch.arange(50)


def test_who_agree_teach_their_label_alone() -> None:
    """And without diversity so does everybody, exactly."""
    alike = logits(1, 50).expand(3, -1, -1)
    module = student_of(alike)
    assert torch.equal(module.student_loss(EVERY), cross_entropy(module(PROXY), alike[0].argmax(1)))
    said = logits(3, 50)
    module = student_of(said, diversity=0.0)
    assert torch.equal(module.student_loss(EVERY), cross_entropy(module(PROXY), consensus(said).labels))


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


@pytest.mark.parametrize(("confidence", "average"), [("logits", "batch"), ("probabilities", "disagreed")])
def test_rounds_are_those_of_a_bare_loop(confidence: Any, average: Any) -> None:
    data, steps, weight, clients = with_public(3, val_share=0.0), 7, 0.5, range(3)
    federation = fit(new(confidence=confidence, average=average, diversity=weight, epochs=8), data)
    assert all(0 < row["server/disagreement"] < 1 for row in federation.run.history)

    with seeded(0, INITIAL):
        template = new()
        template.configure_model()
        initial = template.configure_server(data.clients).state_dict()
    models: dict[int, nn.Module] = {0: Net(CLASSES), 1: WideNet(CLASSES), SERVER: LargeNet(CLASSES)}
    for place, model in models.items():
        prefix = f"{place}/backbone."
        model.load_state_dict({name.removeprefix(prefix): t for name, t in initial.items() if name.startswith(prefix)})
    large = models[SERVER]
    for round in (1, 2):
        sent: list[nn.Module] = []
        for k in clients:
            network = [Net, WideNet][k % 2](CLASSES)
            network.load_state_dict(models[k % 2].state_dict())
            learn(network, turn_of(data, k, round, 8), momentum)
            sent.append(network)
        large.load_state_dict(large.state_dict() | {f"head.{n}": t for n, t in mean_of([n.head for n in sent]).items()})  # type: ignore[misc]
        with torch.no_grad():
            s = torch.stack([network(PROXY) for network in sent]).double()
        optimizer = torch.optim.SGD(large.parameters(), lr=5e-3, momentum=0.9)
        for x, numbers in public_batches(data, 16, steps, PUBLIC, round, SERVER):
            z, loss, diverse = large(x).double(), torch.zeros(()), []
            for row, d in enumerate(numbers.tolist()):
                v = [s[k, d].var() if confidence == "logits" else s[k, d].softmax(0).var() for k in clients]
                y_s = sum(v[k] * s[k, d] for k in clients).argmax()  # type: ignore[union-attr]
                loss = loss - z[row].log_softmax(0)[y_s] / len(numbers)
                if against := [k for k in clients if s[k, d].argmax() != y_s]:
                    p = (sum(v[k] * s[k, d] for k in against) / sum(v[k] for k in against)).softmax(0)  # type: ignore[union-attr]
                    diverse.append((p * (p.log() - z[row].log_softmax(0))).sum())
            if diverse:
                loss = loss + weight * torch.stack(diverse).sum() / (len(numbers) if average == "batch" else len(diverse))
            step(optimizer, loss)
        for place, network in ((0, sent[::2]), (1, sent[1::2])):
            head = {f"head.{name}": tensor for name, tensor in large.head.state_dict().items()}  # type: ignore[union-attr]
            models[place].load_state_dict(mean_of(network) | head)

    for name, tensor in federation.run.server.state_dict().items():
        place, _, rest = name.partition("/backbone.")
        torch.testing.assert_close(tensor, models[int(place)].state_dict()[rest], rtol=2e-4, atol=1e-5)


def heads(states: dict[str, Tensor]) -> list[list[Tensor]]:
    return [[states[f"{place}/{name}"] for name in HEAD] for place in (SERVER, 0, 1)]


def test_after_a_round_all_heads_are_the_servers() -> None:
    """Also of an architecture that nobody had."""
    for cohort in (0.25, 1.0):
        server, *others = heads(fit(new(), participation=cohort, rounds=1).run.server.state_dict())
        for own in others:
            assert all(torch.equal(a, b) for a, b in zip(server, own, strict=True))


def test_without_steps_it_is_fedavg_of_each_architecture_with_a_common_head() -> None:
    """Bit for bit: bodies are those of FedDF without steps, heads the mean of all that were sent."""
    engine = Recording()
    ours = fit(new(distill_steps=0), engine=engine, rounds=1).run.server.state_dict()
    theirs = fit(FedDF([Net, WideNet], CLASSES, distill_steps=0, optimizer=momentum), rounds=1).run.server.state_dict()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor) is not name.endswith(HEAD)
    for name in HEAD:
        mean = (sum(update.state[name].double() for update in engine.trained) / 4).float()  # type: ignore[union-attr]
        assert all(torch.equal(own[HEAD.index(name)], mean) for own in heads(ours))
    assert said_in(engine) == []


# ------------------------------------------------------------------------------------------------------------ the server


def test_what_the_server_does_is_counted_apart() -> None:
    ours, plain = played().run.history, fit(new(distill_steps=0)).run.history
    for row, other in zip(ours, plain, strict=True):
        for column in ("compute/flops", "traffic/up_bytes", "traffic/down_bytes"):
            assert row[column] == other[column]
        assert (row["server/teachers"], row["server/steps"]) == (4, 7)
        assert "server/flops" not in other
    equal = fit(new(backbone=Net, optimizer=still)).run.history
    assert [row["server/disagreement"] for row in equal] == [0, 0]  # all that were sent are one model
    values = {net: sum(p.numel() for p in net(CLASSES).parameters() if p.dim() == 2) for net in (Net, WideNet, LargeNet)}
    asked = 2 * 2 * 50 * (values[Net] + values[WideNet])
    seen = 2 * (16 + 16 + 16) + 2  # in seven batches of 50 examples
    assert ours[0]["server/flops"] == asked + seen * (6 * values[LargeNet] - 2 * LargeNet(CLASSES).fc1.weight.numel())


def test_the_large_model_is_measured_and_handed_out() -> None:
    federation = played()
    columns = {"global/test_accuracy", "global_Net/test_accuracy", "global_WideNet/test_accuracy", "after/test_accuracy/mean"}
    assert columns <= federation.run.history[-1].keys()
    module = federation.run.server_module()
    assert isinstance(module.backbone, LargeNet)
    assert same(module.shared_state(), {n[3:]: t for n, t in federation.run.server.state_dict().items() if n.startswith("-1/")})


def test_a_table_beyond_the_limit_is_in_bfloat16() -> None:
    engine = Recording()
    fit(new(table_limit_mb=1e-4), engine=engine, rounds=1)
    table = next(turn.broadcast.state["targets/others"] for turn in engine.turns if turn.verb == "train_on_public")
    assert {tensor.dtype for tensor in (table, *said_in(engine))} == {torch.bfloat16}


def test_examples_are_looked_at_in_parts_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = played().run.server.state_dict()
    monkeypatch.setattr("lightning_fed.methods.fed_et.BLOCK", 3 * 4 * CLASSES)  # three of four clients' examples at a time
    assert same(whole, fit(new(), store_limit_mb=1e-6).run.server.state_dict())


def test_heads_of_other_shapes_are_refused() -> None:
    with pytest.raises(FederationError, match=r"one last layer, but that of backbone 1 has shapes .*\(4, 12\)"):
        fit(new(backbone=[Net, OtherHead]))
