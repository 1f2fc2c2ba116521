"""DS-FL against its paper."""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, Net, Recording, WideNet, momentum, private_states, same, same_states
from tiny_loops import batches, learn, step, stripped
from tiny_public import PROXY, fit, losing, public_epochs, with_public
from tiny_rounds import Changing
from torch import Tensor, nn

from lightning_fed.core import FineTuning
from lightning_fed.core.messages import ClientUpdate, Turn
from lightning_fed.data.client_info import SERVER
from lightning_fed.engines import InProcess
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import DSFL, Standalone
from lightning_fed.methods.ds_fl import entropy, era
from lightning_fed.models import Adapters
from lightning_fed.seeding import INITIAL, PUBLIC, PUBLIC_TRAINING, SERVER_ROUND, seeded

OPEN = 20


def new(**options: Any) -> DSFL:
    settings = {"open_size": OPEN, "distill_batch_size": 8, "distill_epochs": 2, "optimizer": momentum, "temperature": 0.3}
    return DSFL(**{"backbone": [Net, WideNet], "num_classes": CLASSES} | settings | options)


@cache
def played(**options: Any) -> Federation:
    """Two rounds, which tests look at."""
    return fit(new(**options))


# ---------------------------------------------------------------------------------------------------- entropy reduction


def with_largest(value: float, classes: int = 10) -> Tensor:
    """One class has so much, the others share the rest."""
    row = torch.full((1, classes), (1 - value) / (classes - 1), dtype=torch.float64)
    row[0, 3] = value
    return row


@pytest.mark.parametrize(("largest", "sharpened"), [(0.5, 0.904), (0.9, 0.9988)])
def test_the_largest_is_sharpened(largest: float, sharpened: float) -> None:
    assert era(with_largest(largest), 0.1)[0, 3].item() == pytest.approx(sharpened, abs=5e-4 if largest < 0.9 else 5e-5)


def test_entropy_may_rise() -> None:
    """Of many classes, none of which stands out."""
    mean = with_largest(0.3, 100)
    assert (round(entropy(mean), 2), round(entropy(era(mean, 0.1)), 2)) == (3.83, 4.30)


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


@pytest.mark.parametrize(
    ("aggregation", "order"),
    mostly_slow(
        product(["ERA", "SA"], ["train_then_distill", "distill_then_train"]),
        often={("ERA", "train_then_distill"), ("SA", "distill_then_train")},
    ),
)
def test_rounds_are_those_of_a_bare_loop(aggregation: Any, order: Any) -> None:
    data, rounds, epochs = with_public(val_share=0.0), 3, 2
    model = new(aggregation=aggregation, order=order, server_backbone=WideNet, distill_optimizer=momentum)
    federation = fit(model, data, rounds=rounds)

    with seeded(0, INITIAL):
        template = new(server_backbone=WideNet)
        template.configure_model()
        drawn = template.configure_server(data.clients).state
    networks: list[nn.Module] = [template.for_client(client).backbone for client in data.clients]
    networks.append(WideNet(CLASSES))
    networks[SERVER].load_state_dict({name.removeprefix("backbone."): tensor for name, tensor in drawn.items()})

    def distill(who: int, labels: Tensor, examples: Tensor, *stream: int) -> None:
        optimizer, table = momentum(networks[who].parameters()), dict(zip(examples.tolist(), labels, strict=True))
        playing = public_epochs(data, 8, *stream, examples=examples)
        for _ in range(epochs):
            for x, numbers in next(playing):
                said = torch.stack([table[int(number)] for number in numbers])
                step(optimizer, -(said * networks[who](x).log_softmax(1)).sum(1).mean())

    learned: tuple[Tensor, Tensor] | None = None
    for round in range(1, rounds + 1):
        with seeded(0, SERVER_ROUND, round):
            examples = torch.randperm(50)[:OPEN].sort().values
        said = []
        for k in range(4):
            if order == "distill_then_train" and learned is not None:
                distill(k, *learned, PUBLIC_TRAINING, round, k)
            learn(networks[k], batches(data, k, round, 0), momentum)
            with torch.no_grad():
                said.append(networks[k](PROXY[examples]).softmax(1))
        mean = torch.stack(said).mean(0)
        learned = (mean / 0.3).softmax(1) if aggregation == "ERA" else mean, examples
        distill(SERVER, *learned, PUBLIC, round, SERVER)
        if order == "train_then_distill":
            for k in range(4):
                distill(k, *learned, PUBLIC_TRAINING, round, k)

    close = {"rtol": 2e-4, "atol": 1e-5}
    torch.testing.assert_close(stripped(federation.run.server.state), networks[SERVER].state_dict(), **close)
    for client, state in private_states(federation).items():
        torch.testing.assert_close(stripped(state), networks[client].state_dict(), **close)


def test_without_distillation_it_is_standalone_bit_for_bit() -> None:
    ours, theirs = played(distill_epochs=0), fit(Standalone([Net, WideNet], CLASSES, momentum), with_public())
    assert same_states(private_states(ours), private_states(theirs))
    assert "server/steps" not in ours.run.history[-1]


def test_the_orders_differ_for_who_stays_away() -> None:
    """It distils what was said when it took part, or what was said last."""
    strong = partial(torch.optim.SGD, lr=2.0)
    ends = [
        fit(new(order=order, distill_optimizer=strong, temperature=0.1), participation=0.5, rounds=4).run
        for order in ("train_then_distill", "distill_then_train")
    ]
    name = "backbone.fc1.weight"
    assert (ends[0].server.state[name] - ends[1].server.state[name]).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------------ what is exchanged


@pytest.mark.parametrize(("order", "first", "later"), [("train_then_distill", 4 * 8, 4 * 8), ("distill_then_train", 4 * 4, 4 * 8)])
def test_traffic_is_a_row_per_open_example_each_way(order: Any, first: int, later: int) -> None:
    """Down come labels and, of each example, its number: once to speak about it, and once with its label."""
    rows = played(order=order).run.history
    floats = 4 * OPEN * CLASSES  # of four clients
    assert [row["traffic/up_parameters"] for row in rows] == [floats, floats]
    assert [row["traffic/up_bytes"] for row in rows] == [4 * floats, 4 * floats]
    assert [row["traffic/down_parameters"] for row in rows] == [floats if first == later else 0, floats]
    numbers = [first * OPEN, later * OPEN]
    assert [row["traffic/down_bytes"] - 4 * row["traffic/down_parameters"] for row in rows] == numbers


def test_open_examples_are_drawn_anew_and_are_a_function_of_the_seed() -> None:
    def drawn(seed: int, open_size: int = OPEN) -> list[list[int]]:
        engine = Recording()
        fit(new(open_size=open_size, distill_epochs=0), engine=engine, seed=seed)
        return [turn.broadcast.state["open/examples"].tolist() for turn in engine.turns if turn.verb == "fit"][::4]

    first, second = drawn(0)
    assert first == sorted(set(first)) != second
    assert len(first) == OPEN
    assert drawn(0) == [first, second] != drawn(1)
    assert drawn(0, open_size=1000) == [list(range(50))] * 2  # more than there are


@pytest.mark.parametrize("adapters", [None, Adapters(r=2, target_modules=["fc1"])])
def test_the_server_has_a_network_of_its_own(adapters: Adapters | None) -> None:
    """Drawn like no client's; it is what is measured as global, and handed out."""
    federation = fit(new(server_backbone=WideNet, backbone=Net, adapters=adapters))
    module = federation.run.server_module()
    assert isinstance(module.backbone, WideNet)
    assert same(module.shared_state(), federation.run.server.state)
    assert "global/test_accuracy" in federation.run.history[-1]
    federation = fit(new(backbone=Net, distill_epochs=0))
    modules = [*map(federation.client_module, range(4)), federation.run.server_module()]
    drawn = [module.backbone.state_dict() for module in modules]
    assert len({tuple(state["fc1.weight"].flatten().tolist()) for state in drawn}) == 5


def test_clients_may_fine_tune_what_is_private() -> None:
    """That is their whole network; nothing of the server's model is."""
    row = fit(new(fine_tuning=FineTuning(steps=2, part="private")), rounds=1).run.history[-1]
    assert row["fine_tune/flops"] > 0


# ----------------------------------------------------------------------------------------------------------- what it costs


def test_entropies_and_the_servers_own_work_are_in_the_table() -> None:
    ours, plain = fit(new(temperature=0.1)).run.history, played(distill_epochs=0).run.history
    for row in ours:
        assert 0 < row["server/entropy_after"] < row["server/entropy_before"] < torch.tensor(float(CLASSES)).log()
        assert row["server/steps"] == 2 * 3  # epochs of 20 examples in batches of 8
        assert row["server/flops"] > 0
        assert {"train/distill_loss", "train/local_loss", "server/distill_loss", "seconds/server"} <= row.keys()
    values = [sum(p.numel() for p in net(CLASSES).parameters() if p.dim() == 2) for net in (Net, WideNet)]
    firsts = [net(CLASSES).fc1.weight.numel() for net in (Net, WideNet)]
    lessons = sum(2 * OPEN * (6 * values[k % 2] - 2 * firsts[k % 2]) for k in range(4))
    assert ours[0]["compute/flops"] == plain[0]["compute/flops"] + lessons
    sa = fit(new(aggregation="SA"), rounds=1).run.history[0]
    assert sa["server/entropy_after"] == sa["server/entropy_before"] == ours[0]["server/entropy_before"]


def test_clients_are_measured_as_they_are_after_the_lesson() -> None:
    """``before`` is before the server spoke."""
    strong = partial(torch.optim.SGD, lr=0.5)
    row = fit(new(distill_optimizer=strong, epochs=5)).run.history[-1]
    assert row["before/test_accuracy/mean"] != row["after/test_accuracy/mean"]
    row = fit(new(distill_optimizer=strong, epochs=5, order="distill_then_train")).run.history[-1]
    assert row["before/test_accuracy/mean"] == row["after/test_accuracy/mean"]


def test_a_client_whose_lesson_is_lost_goes_on_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    lost, plain, taught = (
        fit(new(**options), engine=engine, rounds=1)
        for options, engine in (({}, losing(servers=False, place=2)), ({"distill_epochs": 0}, InProcess()), ({}, InProcess()))
    )
    assert "the turn of client 2 was lost" in capsys.readouterr().out
    states, untaught, others = map(private_states, (lost, plain, taught))
    assert same(states[2], untaught[2])
    for client in (0, 1, 3):
        assert same(states[client], others[client])
    assert lost.run.history[0]["compute/flops"] < taught.run.history[0]["compute/flops"]


def test_what_comes_of_a_lesson_is_checked() -> None:
    """Here it is not said what a lesson took."""

    def unsaid(turn: Turn, update: ClientUpdate) -> ClientUpdate:
        return replace(update, metrics={}) if turn.verb == "train_on_public" and update.client != SERVER else update

    with pytest.raises(FederationError, match=r"^The update of client 0 lacks the metric 'flops'"):
        fit(new(), engine=Changing(unsaid), rounds=1)
