"""What every method must keep, whatever it does: each function here is one property of a method."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_fed.callbacks import FederationCallback
from lightning_fed.data import ClientDataModule, FederatedDataModule
from lightning_fed.errors import FederationError
from lightning_fed.exchange import ClientUpdate, State
from lightning_fed.federation import Federation
from lightning_fed.module import FederatedModule
from lightning_fed.run import Run
from lightning_fed.testing.compare import assert_same, same, same_end, states_of, without_seconds
from lightning_fed.testing.toys import NoisyNet, PartlyFrozenNet, new_federation
from lightning_fed.testing.watch import Recording, Shuffled


class RoundStates(FederationCallback):
    """Keeps who took part in each round, and everybody's private state after it."""

    def __init__(self) -> None:
        self.participants: list[set[int]] = []
        self.states: list[dict[int, State]] = []
        self._arrived: set[int] = set()

    def on_turn_end(self, run: Run, update: ClientUpdate) -> None:
        """Note whose."""
        self._arrived.add(update.client)

    def on_round_end(self, run: Run) -> None:
        """Note the round, in copies."""
        self.participants.append(self._arrived)
        self._arrived = set()
        kept = states_of(run).items()
        self.states.append({client: {name: tensor.clone() for name, tensor in state.items()} for client, state in kept})


VARIATIONS: dict[str, dict[str, Callable[[], Any]]] = {
    "played again": {},
    "in another order of turns": {"engine": Shuffled},
    "with private states on disk": {"store_limit_mb": lambda: 1e-6},
    "measured after every round": {"evaluate_every": lambda: 1},
}
"""What changes no number of a run: options of the federation, and what makes them."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A method that is checked.

    Args:
        make: makes it, given options that replace its own.
        data: makes data that it can train on, given ``num_clients`` and ``size``, the number of examples.
        any_network: whether it can train a network with batch norm and dropout, for images.
    """

    make: Callable[..., FederatedModule]
    data: Callable[..., FederatedDataModule]
    any_network: bool = True

    def new_data(self) -> FederatedDataModule:
        """Three clients' data."""
        return self.data(num_clients=3, size=100)

    def fit(self, rounds: int = 2, **options: Any) -> Federation:
        """Two of three clients in a round, measured at the end."""
        federation = new_federation(rounds, **{"participation": 0.7, "evaluate_every": 0} | options)
        federation.fit(self.make(), self.new_data())
        return federation

    @cached_property
    def recorded(self) -> tuple[Federation, Recording, RoundStates]:
        """The run that the others are compared with; played once."""
        engine, watch = Recording(), RoundStates()
        return self.fit(engine=engine, callbacks=[watch]), engine, watch

    @cached_property
    def varied(self) -> tuple[Federation, RoundStates]:
        """The same run with all that should not matter, see :data:`VARIATIONS`; played once."""
        watch = RoundStates()
        options = {name: make() for options in VARIATIONS.values() for name, make in options.items()}
        return self.fit(**options, callbacks=[watch]), watch

    def modules(self, **options: Any) -> list[FederatedModule]:
        """The clients' modules, before they take part."""
        return [self.make(**options).for_client(client) for client in self.new_data().clients]


class InterruptInRound(FederationCallback):
    """Somebody presses Ctrl-C after the round's first turn."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_turn_end(self, run: Run, update: ClientUpdate) -> None:
        """Press it."""
        if run.round == self.round:
            raise KeyboardInterrupt


@contextmanager
def _interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        return
    raise AssertionError("The run was not interrupted.")


# ----------------------------------------------------------------------------------------------------------------- the state


def shared_private_gathered_and_frozen_are_disjoint_and_cover_the_state(subject: Subject, folder: Path) -> None:
    """A frozen tensor is in neither part, unless the method says that it travels or stays."""
    _check_parts(subject.modules())


def parts_of_a_network_with_batch_norm_are_disjoint_and_cover_it(subject: Subject, folder: Path) -> None:
    """Running statistics and counters belong somewhere, too."""
    _check_parts(subject.modules(backbone=NoisyNet))


def _check_parts(modules: list[FederatedModule]) -> None:
    for module in modules:
        names = module.state_dict().keys()
        shared, private, statistics = module.shared_names(), module.private_names(), module.statistics_names()
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad} - shared - private
        parts = [shared, private, statistics, frozen]
        assert set().union(*parts) == names
        assert sum(map(len, parts)) == len(names)
        assert module.shared_state().keys() == shared
        assert module.private_state().keys() == private
        assert module.statistics().keys() == statistics
        assert module.update_state().keys() == shared | module.payload().keys()


def states_fit_back_in(subject: Subject, folder: Path) -> None:
    """What is taken out of a module can be put back, and then is what it was."""
    for module in subject.modules():
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


# --------------------------------------------------------------------------------------------------------------- the rounds


def a_run_leaves_its_mark(subject: Subject, folder: Path) -> None:
    """Losses are finite, everybody is measured, and who took part has another model than before."""
    federation, engine, _ = subject.recorded
    assert len(federation.run.history) == 2
    for row in federation.run.history:
        losses = [value for key, value in row.items() if key.startswith("train/") and key.endswith("_loss")]
        assert losses
        assert all(math.isfinite(loss) for loss in losses)
    metric = f"after/test_{federation.run.metric}"
    assert math.isfinite(federation.run.history[-1][f"{metric}/mean"])
    assert federation.run.history[-1][f"{metric}/min"] <= federation.run.history[-1][f"{metric}/max"]
    assert federation.run.results.keys() == {0, 1, 2}
    for client in {turn.client for turn in engine.turns if turn.verb == "fit"}:
        untrained = federation.run.model.for_client(client, federation.seed)
        trained = federation.run.server_module() if federation.run.model.centralised else federation.client_module(client.id)
        assert not same(trained.state_dict(), untrained.state_dict())


def no_private_name_crosses_the_wire(subject: Subject, folder: Path) -> None:
    """Neither down, nor up, nor into the server's checkpoint."""
    federation, engine, _ = subject.recorded
    private = set().union(*(module.private_names() for module in subject.modules()))
    assert [turn.client.id for turn in engine.turns if turn.verb == "evaluate" and turn.client.id >= 0] == [0, 1, 2]
    participants = 1 if federation.run.model.centralised else 2
    assert sum(turn.verb == "fit" for turn in engine.turns) == 2 * participants  # of two rounds
    # What the server does with a model of its own crosses no wire.
    sent = [turn.broadcast.state for turn in engine.turns if turn.client.id >= 0 or federation.run.model.centralised]
    payloads: list[State] = sent + [update.state for update in engine.updates if update.client >= 0]
    assert not any(private & state.keys() for state in payloads)
    assert not private & federation.run.server.state_dict().keys()


def a_partly_frozen_network_with_batch_norm_is_trained(subject: Subject, folder: Path) -> None:
    """Or refused, by a message that says why. What is frozen stays as it was drawn and crosses no wire, and all that is kept can be
    written to a checkpoint.
    """
    engine = Recording()
    federation = new_federation(1, run_dir=folder, participation=0.7, evaluate_every=0, engine=engine)
    try:
        federation.fit(subject.make(backbone=PartlyFrozenNet), subject.data(num_clients=3, size=40))
    except FederationError as error:
        if "fc1" in str(error) and "frozen" in str(error):
            return
        raise
    for turn, update in zip(engine.turns, engine.updates, strict=True):
        if turn.client.id >= 0:
            drawn = federation.run.model.for_client(turn.client, federation.seed)
            stays = drawn.frozen_names - drawn.shared_names() - drawn.private_names()
            frozen = {name: tensor for name, tensor in drawn.state_dict().items() if name in stays}
            assert any("fc1" in name for name in frozen)
            now = federation.client_module(turn.client.id).state_dict()
            assert same({name: now[name] for name in frozen}, frozen)
            sent = [*turn.broadcast.state.values(), *update.state.values()]
            assert not any(same({"": tensor}, {"": its}) for tensor in sent for its in frozen.values())


def an_update_looks_like_the_broadcast_or_a_part_of_it(subject: Subject, folder: Path) -> None:
    """In names, and in shapes not larger; where a payload varies, that part of it which does not."""
    federation, engine, _ = subject.recorded
    if federation.run.model.payload_varies:
        shared = federation.run.model.shared_names()
        assert all(shared <= update.state.keys() and shared <= turn.broadcast.state.keys() for turn, update in engine.fits())
        return
    for turn, update in engine.fits():
        assert update.state.keys() == turn.broadcast.state.keys()
        for key, sent in turn.broadcast.state.items():
            assert update.state[key].dim() == sent.dim()
            assert all(mine <= its for mine, its in zip(update.state[key].shape, sent.shape, strict=True))


def another_order_memory_and_measuring_change_nothing(subject: Subject, folder: Path) -> None:
    """Nor does playing it again: a turn depends on no other one of its round, private states are all that stays with a client, and
    being measured leaves nothing behind. If a run differs, each of :data:`VARIATIONS` is tried alone, to say which it is.
    """
    federation, *_ = subject.recorded
    if not _as_recorded(subject.varied[0], federation):
        alone = {name: {key: make() for key, make in options.items()} for name, options in VARIATIONS.items()}
        culprits = [name for name, options in alone.items() if not _as_recorded(subject.fit(**options), federation)]
        raise AssertionError(f"The run is another one when {', or '.join(culprits or ['all of it comes together'])}.")


def _as_recorded(run: Federation, recorded: Federation) -> bool:
    """Whether all is the same that both have found, but for the round that they would select, and what measuring has cost."""
    rows = zip(without_seconds(run.run.history), without_seconds(recorded.run.history), strict=True)
    other = ("selected/", "adapt/total_")
    known = all({key: more.get(key) for key in row if not key.startswith(other)}.items() <= row.items() for more, row in rows)
    return known and same_end(run, recorded)


def another_seed_gives_other_numbers(subject: Subject, folder: Path) -> None:
    """Something is random."""
    other, federation = subject.fit(rounds=1, seed=1), subject.recorded[0]
    assert without_seconds(other.run.history)[0] != without_seconds(federation.run.history)[0]


def who_does_not_take_part_keeps_its_private_state(subject: Subject, folder: Path) -> None:
    """Bit for bit; that of the others changes, where there is one."""
    federation, _, watch = subject.recorded
    [before, after], [_, participants] = watch.states, watch.participants
    assert len(participants) == (1 if federation.run.model.centralised else 2)
    assert before.keys() - participants or not before
    assert all(same(before[client], after[client]) for client in before.keys() - participants)
    changed = {client for client in before.keys() & participants if not same(before[client], after[client])}
    assert changed == {client for client in before.keys() & participants if before[client]}


def who_never_took_part_has_nothing_stored(subject: Subject, folder: Path) -> None:
    """Being measured leaves nothing behind."""
    _, watch = subject.varied  # in which all are measured after the first round
    assert len(watch.participants[0]) < len(subject.new_data().clients)
    assert watch.states[0].keys() <= watch.participants[0]


def steps_cost_as_much_on_the_meta_device(subject: Subject, folder: Path) -> None:
    """Where those of large networks are counted. A method that looks at numbers has to say so, by ``flops_on_meta = False``."""
    if subject.make().flops_on_meta:
        data = subject.data(num_clients=1, size=20)
        costs = []
        for small in (0, math.inf):  # parameters
            with patch("lightning_fed.measure.flops.SMALL", small):
                costs.append(new_federation(1).fit(subject.make(), data)[0]["compute/flops"])
        assert costs[0] == costs[1]


# ------------------------------------------------------------------------------------------------------------- checkpoints


def an_interrupted_run_continues_as_if_nothing_had_happened(subject: Subject, folder: Path) -> None:
    """From the checkpoint of the round before."""
    with _interrupted():
        subject.fit(run_dir=folder, callbacks=[InterruptInRound(2)])
    federation = new_federation(2, run_dir=folder, participation=0.7, evaluate_every=0)
    federation.fit(subject.make(), subject.new_data(), ckpt_path="last")
    assert_same(federation, subject.recorded[0])


def the_last_checkpoint_is_measured_as_the_run_was(subject: Subject, folder: Path) -> None:
    """``test`` and ``validate`` find what ``fit`` found."""
    run = subject.fit(run_dir=folder).run
    federation = new_federation(2, run_dir=folder)
    for verb, kind in ((federation.test, "test"), (federation.validate, "val")):
        metrics = verb(subject.make(), subject.new_data())
        assert metrics
        assert metrics == {
            key: value
            for key, value in run.history[-1].items()
            if f"/{kind}_" in key and not key.startswith(("before/", "selected/"))
        }


def a_clients_module_predicts_what_was_measured(subject: Subject, folder: Path) -> None:
    """For use elsewhere; where accuracy is what is measured."""
    federation, *_ = subject.recorded
    for client, result in federation.run.results.items():
        data = federation.run.data.client(client)
        if "test/accuracy" in result and isinstance(data, ClientDataModule):
            inputs, labels = data.data[data.splits[2]]
            guesses = federation.client_module(client).eval()(inputs).argmax(dim=1)
            assert math.isclose((guesses == labels).float().mean().item(), result["test/accuracy"], rel_tol=1e-6)


CHECKS = (
    a_run_leaves_its_mark,
    shared_private_gathered_and_frozen_are_disjoint_and_cover_the_state,
    parts_of_a_network_with_batch_norm_are_disjoint_and_cover_it,
    states_fit_back_in,
    no_private_name_crosses_the_wire,
    a_partly_frozen_network_with_batch_norm_is_trained,
    an_update_looks_like_the_broadcast_or_a_part_of_it,
    another_order_memory_and_measuring_change_nothing,
    another_seed_gives_other_numbers,
    who_does_not_take_part_keeps_its_private_state,
    who_never_took_part_has_nothing_stored,
    steps_cost_as_much_on_the_meta_device,
    an_interrupted_run_continues_as_if_nothing_had_happened,
    the_last_checkpoint_is_measured_as_the_run_was,
    a_clients_module_predicts_what_was_measured,
)

OF_ANY_NETWORK = parts_of_a_network_with_batch_norm_are_disjoint_and_cover_it, a_partly_frozen_network_with_batch_norm_is_trained
"""Those that give the method another network."""
