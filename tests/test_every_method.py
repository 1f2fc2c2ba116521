"""What every method must keep, whatever it does: a new file in lightning_fed/methods is held to all of this."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny import (
    METHODS,
    NoisyNet,
    Recording,
    Shuffled,
    assert_same,
    data_for,
    new_federation,
    new_method,
    private_states,
    same,
    without_seconds,
)

import lightning_fed.methods
from lightning_fed.callbacks import FederationCallback
from lightning_fed.engines import InProcess
from lightning_fed.errors import FederationError
from lightning_fed.exchange import ClientUpdate, Lost, State, Turn
from lightning_fed.families.fine_tuning import FineTuning
from lightning_fed.federation import Federation
from lightning_fed.module import FederatedModule
from lightning_fed.run import Run

pytestmark = pytest.mark.parametrize("name", METHODS)
assert {"FedAvg", "PFedLoRA", "Standalone"} <= set(METHODS)


class InterruptInRound(FederationCallback):
    """Somebody presses Ctrl-C after the round's first turn."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_turn_end(self, run: Run, update: ClientUpdate) -> None:
        if run.round == self.round:
            raise KeyboardInterrupt


def fit(name: str, rounds: int = 2, **options: object) -> Federation:
    """Two of three clients in a round, measured at the end."""
    federation = new_federation(rounds, participation=0.7, **{"evaluate_every": 0} | options)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=100))
    return federation


@cache
def recorded(name: str) -> tuple[Federation, Recording]:
    """The run that the others are compared with; played once."""
    engine = Recording()
    return fit(name, engine=engine), engine


class Converting(InProcess):
    """The last client of a round sends something else than it was asked for."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | Lost]:
        updates = list(super().run(turns))
        last = updates[-1]
        assert isinstance(last, ClientUpdate)
        state = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in last.state.items()}
        yield from [*updates[:-1], replace(last, state=state or {"new": torch.zeros(1)})]


class Start(FederationCallback):
    """Keeps the server's state from before the first round."""

    def on_fit_start(self, run: Run) -> None:
        self.state = {key: tensor.clone() for key, tensor in run.server.state_dict().items()}


def client_modules(name: str, **options: object) -> list[FederatedModule]:
    return [new_method(name, **options).for_client(client) for client in data_for(name, num_clients=3, size=100).clients]


def test_a_run_leaves_its_mark(name: str) -> None:
    federation, engine = recorded(name)
    assert len(federation.run.history) == 2
    for row in federation.run.history:
        losses = [value for key, value in row.items() if key.startswith("train/") and key.endswith("_loss")]
        assert losses
        assert all(math.isfinite(loss) for loss in losses)
    assert 0 <= federation.run.history[-1]["after/test_accuracy/min"] <= federation.run.history[-1]["after/test_accuracy/max"] <= 1
    assert federation.run.results.keys() == {0, 1, 2}
    for client in {turn.client for turn in engine.turns if turn.verb == "fit"}:
        untrained = federation.run.model.for_client(client, federation.seed)
        trained = federation.run.server_module() if federation.run.model.centralised else federation.client_module(client.id)
        assert not same(trained.state_dict(), untrained.state_dict())


@pytest.mark.parametrize("backbone", [None, NoisyNet], ids=["default", "batch norm"])
def test_shared_private_gathered_and_frozen_are_disjoint_and_cover_the_state(name: str, backbone: type[NoisyNet] | None) -> None:
    if backbone and issubclass(getattr(lightning_fed.methods, name), FineTuning):
        pytest.skip("it is transformers that are fine-tuned")
    for module in client_modules(name, **({"backbone": backbone} if backbone else {})):
        names = module.state_dict().keys()
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        parts = [module.shared_names(), module.private_names(), module.statistics_names(), frozen]
        assert set().union(*parts) == names
        assert sum(map(len, parts)) == len(names)
        assert module.shared_state().keys() == parts[0]
        assert module.private_state().keys() == parts[1]
        assert module.statistics().keys() == parts[2]


def test_states_fit_back_in(name: str) -> None:
    for module in client_modules(name):
        before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        shared, private, statistics = module.shared_state(), module.private_state(), module.statistics()
        for tensor in module.state_dict().values():
            tensor.zero_()
        module.load_shared_state(shared)
        module.load_private_state(private)
        module.load_statistics(statistics)
        frozen = before.keys() - shared.keys() - private.keys() - statistics.keys()
        assert same(
            {k: t for k, t in module.state_dict().items() if k not in frozen}, {k: before[k] for k in before.keys() - frozen}
        )


def test_an_update_of_another_kind_is_refused_with_its_client_and_changes_nothing(name: str) -> None:
    start = Start()
    federation = new_federation(1, engine=Converting(), evaluate_every=0, callbacks=[start])
    data = data_for(name, num_clients=3, size=100)
    who = -1 if getattr(lightning_fed.methods, name).centralised else 2
    with pytest.raises(FederationError, match=rf"^The update of client {who} (has .* of torch.float16, expected|holds 'new')"):
        federation.fit(new_method(name), data)
    assert same(federation.run.server.state_dict(), start.state)


def test_no_private_name_crosses_the_wire(name: str) -> None:
    federation, engine = recorded(name)
    private = set().union(*(module.private_names() for module in client_modules(name)))
    assert [turn.client.id for turn in engine.turns if turn.verb == "evaluate" and turn.client.id >= 0] == [0, 1, 2]
    participants = 1 if federation.run.model.centralised else 2
    assert sum(turn.verb == "fit" for turn in engine.turns) == 2 * participants  # of two rounds
    payloads: list[State] = [turn.broadcast.state for turn in engine.turns] + [update.state for update in engine.updates]
    assert not any(private & state.keys() for state in payloads)
    assert not private & federation.run.server.state_dict().keys()


def test_an_update_looks_like_the_broadcast_or_a_part_of_it(name: str) -> None:
    _, engine = recorded(name)
    for update, turn in zip(engine.updates, engine.turns, strict=True):
        if turn.verb == "fit":
            assert update.state.keys() == turn.broadcast.state.keys()
            for key, sent in turn.broadcast.state.items():
                assert update.state[key].dim() == sent.dim()
                assert all(mine <= its for mine, its in zip(update.state[key].shape, sent.shape, strict=True))


def test_two_runs_are_bit_identical(name: str) -> None:
    assert_same(fit(name), recorded(name)[0])


def test_the_order_of_turns_changes_nothing(name: str) -> None:
    assert_same(fit(name, engine=Shuffled()), recorded(name)[0])


def test_a_store_without_memory_changes_nothing(name: str) -> None:
    assert_same(fit(name, store_limit_mb=1e-6), recorded(name)[0])


def test_measuring_changes_nothing(name: str) -> None:
    often, seldom = fit(name, evaluate_every=1), recorded(name)[0]
    assert same(often.run.server.state_dict(), seldom.run.server.state_dict())
    assert often.run.results == seldom.run.results


def test_another_seed_gives_other_numbers(name: str) -> None:
    other, federation = fit(name, rounds=1, seed=1), recorded(name)[0]
    assert without_seconds(other.run.history)[0] != without_seconds(federation.run.history)[0]


def test_who_does_not_take_part_keeps_its_private_state(name: str) -> None:
    """Their state is as in the run that ended a round earlier, bit for bit."""
    engine = Recording()
    after = private_states(fit(name, rounds=3, engine=engine))
    before = private_states(recorded(name)[0])
    participants = {turn.client.id for turn in engine.turns if turn.verb == "fit" and turn.round == 3}
    assert len(participants) == (1 if getattr(lightning_fed.methods, name).centralised else 2)
    assert all(same(before[client], after[client]) for client in before.keys() - participants)
    changed = {client for client in before.keys() & participants if not same(before[client], after[client])}
    assert changed == {client for client in before.keys() & participants if before[client]}


def test_a_finished_run_is_measured_as_it_ended(name: str) -> None:
    last = fit(name, run_dir="runs").run.history[-1]
    federation = new_federation(2, run_dir="runs")
    for verb, kind in ((federation.test, "test"), (federation.validate, "val")):
        metrics = verb(new_method(name), data_for(name, num_clients=3, size=100))
        assert metrics
        measured = {
            key: value for key, value in last.items() if f"/{kind}_" in key and not key.startswith(("before/", "selected/"))
        }
        assert metrics == measured


def test_an_interrupted_run_continues_as_if_nothing_had_happened(name: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(name, run_dir="runs", callbacks=[InterruptInRound(2)])
    federation = new_federation(2, run_dir="runs", participation=0.7, evaluate_every=0)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=100), ckpt_path="last")
    assert_same(federation, recorded(name)[0])


def test_a_clients_module_predicts_what_was_measured(name: str) -> None:
    federation, _ = recorded(name)
    for client in range(3):
        module = federation.client_module(client).eval()
        data = federation.run.data.client(client)
        images, labels = data.data[data.splits[2]]
        accuracy = (module(images).argmax(dim=1) == labels).float().mean().item()
        assert accuracy == pytest.approx(federation.run.results[client]["test/accuracy"])
