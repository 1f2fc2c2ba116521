"""The properties that every method must have: each function here checks one of them."""

import math
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.messages import STAGES
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.robust import Median
from lightning_fed.core.server import PartialUpdate, ServerUpdate
from lightning_fed.data import ClientDataModule
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.privacy import ClientDP, ExampleDP
from lightning_fed.tensors import State
from lightning_fed.testing.compare import (
    assert_same,
    listed,
    unequal,
    unequal_ends,
    unequal_metrics,
    without_seconds,
)
from lightning_fed.testing.subject import VARIATIONS, RoundStates, Subject
from lightning_fed.testing.toys import NoisyNet, PartlyFrozenNet, new_federation, new_trainer
from lightning_fed.testing.watch import Counting, InterruptInRound, Recording


def _assert_names(found: Set[str], expected: Set[str], what: str) -> None:
    """Raise :class:`AssertionError` with missing and unexpected names."""
    lacking, besides = sorted(expected - found), sorted(found - expected)
    said = [f"lacks {listed(lacking)}"] * bool(lacking) + [f"has {listed(besides)} besides"] * bool(besides)
    assert not said, f"{what} {' and '.join(said)}."


# ----------------------------------------------------------------------------------------------------------------- the state


def shared_private_gathered_and_frozen_are_disjoint_and_cover_the_state(subject: Subject, folder: Path) -> None:
    """A frozen tensor is in neither part, unless the method declares it shared or private."""
    _check_parts(subject.modules())


def parts_of_a_network_with_batch_norm_are_disjoint_and_cover_it(subject: Subject, folder: Path) -> None:
    """Running statistics and counters belong to a part, too."""
    _check_parts(subject.modules(backbone=NoisyNet))


def _check_parts(modules: list[FederatedModule]) -> None:
    for module in modules:
        names, whose = module.state_dict().keys(), f"of client {_id(module)}"
        shared, private, statistics = module.shared_names(), module.private_names(), module.recomputed_buffers()
        frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad} - shared - private
        parts = {"shared": shared, "private": private, "gathered": statistics, "frozen": frozen}
        _assert_names(set().union(*parts.values()), names, f"What is shared, private, gathered or frozen {whose}")
        for name in sorted(names):
            its = [part for part, those in parts.items() if name in those]
            assert len(its) == 1, f"{name} {whose} is {' and '.join(its)}: it has to be one of them."
        _assert_names(module.shared_state().keys(), shared, f"shared_state() {whose}")
        _assert_names(module.private_state().keys(), private, f"private_state() {whose}")
        _assert_names(module.statistics().keys(), statistics, f"statistics() {whose}")
        _assert_names(module.update_state().keys(), shared | module.payload().keys(), f"update_state() {whose}")


def _id(module: FederatedModule) -> int:
    assert module.client is not None, "A module that for_client() has made knows no client."
    return module.client.id


def states_fit_back_in(subject: Subject, folder: Path) -> None:
    """State that is taken out of a module can be loaded again, unchanged."""
    for module in subject.modules():
        before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        shared, private, statistics = module.shared_state(), module.private_state(), module.statistics()
        for tensor in module.state_dict().values():
            tensor.zero_()
        module.load_shared_state(shared)
        module.load_private_state(private)
        module.load_statistics(statistics)
        back = shared.keys() | private.keys() | statistics.keys()
        lost = [name for name in unequal(dict(module.state_dict()), before) if name in back]
        assert not lost, f"What was taken out of client {_id(module)} and put back is not what it was: {listed(lost)}."


# --------------------------------------------------------------------------------------------------------------- the rounds


def a_run_leaves_its_mark(subject: Subject, folder: Path) -> None:
    """Losses are finite, all clients are evaluated, and the models of participants have changed."""
    federation, engine, _ = subject.recorded
    assert len(federation.run.history) == 2, f"{len(federation.run.history)} rounds have metrics, expected 2."
    for row in federation.run.history:
        losses = {key: value for key, value in row.items() if key.startswith("train/") and key.endswith("_loss")}
        assert losses, f"There is no train/…_loss in round {row['round']:.0f}."
        for key, loss in losses.items():
            assert math.isfinite(loss), f"{key} is {loss} in round {row['round']:.0f}."
    metric, last = f"after/test_{federation.run.metric}", federation.run.history[-1]
    assert math.isfinite(last[f"{metric}/mean"]), f"{metric}/mean is {last[f'{metric}/mean']} in the last round."
    smallest, largest = last[f"{metric}/min"], last[f"{metric}/max"]
    assert smallest <= largest, f"{metric}/min is {smallest}, {metric}/max {largest} in the last round."
    measured = federation.run.results.keys()
    assert measured == {0, 1, 2}, f"The clients {listed(sorted(measured))} were measured, expected 0, 1, 2."
    for client in {turn.client for turn in engine.turns if turn.verb == "fit"}:
        untrained = federation.run.model.for_client(client, federation.seed)
        trained = federation.run.server_module() if federation.run.model.centralized else federation.client_module(client.id)
        moved = unequal(trained.state_dict(), untrained.state_dict())
        assert moved, f"Client {client.id} has trained, but each of its tensors is what it was before."


def participants_of(federation: Federation, round: int) -> int:
    """Number of participants of a round: two of three clients, unless the method chooses them."""
    run = federation.run
    chosen = run.model.cohort(run.clients, round, federation.seed)
    return 1 if run.model.centralized else 2 if chosen is None else len(chosen)


def no_private_name_crosses_the_wire(subject: Subject, folder: Path) -> None:
    """Neither in broadcasts, nor in updates, nor in the server's checkpoint."""
    federation, engine, _ = subject.recorded
    private = set().union(*(module.private_names() for module in subject.modules()))
    measured = [turn.client.id for turn in engine.turns if turn.verb == "evaluate" and turn.client.id >= 0]
    assert measured == [0, 1, 2], f"The clients {listed(measured)} were measured, expected 0, 1, 2, once each."
    participants = participants_of(federation, 1) + participants_of(federation, 2)
    fits = sum(turn.verb == "fit" for turn in engine.turns)
    assert fits == participants, f"{fits} turns were trained in two rounds, expected {participants}."
    for turn, update in zip(engine.turns, engine.updates, strict=True):
        # Turns of the server's own models are not sent.
        if turn.client.id >= 0 or federation.run.model.centralized:
            _assert_public(turn.broadcast.state, private, f"the broadcast to client {turn.client.id} in round {turn.round}")
        if update.client >= 0:
            _assert_public(update.state, private, f"the update of client {update.client} in round {turn.round}")
    _assert_public(federation.run.server.state_dict(), private, "the server's checkpoint")


def _assert_public(state: State, private: Set[str], where: str) -> None:
    leaked = sorted(private & state.keys())
    assert not leaked, f"What is private is in {where}: {listed(leaked)}."


def a_partly_frozen_network_with_batch_norm_is_trained(subject: Subject, folder: Path) -> None:
    """Or it is refused with a message that says why. Frozen tensors keep their initial values and are not sent, and all state can
    be written to a checkpoint.
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
            assert any("fc1" in name for name in frozen), f"{type(drawn).__name__} freezes nothing of the network."
            now = federation.client_module(turn.client.id).state_dict()
            moved = unequal({name: now[name] for name in frozen}, frozen)
            assert not moved, f"What is frozen differs for client {turn.client.id}: {listed(moved)}."
            sent = [*turn.broadcast.state.values(), *update.state.values()]
            leaked = [name for name, its in frozen.items() if any(not unequal({"": tensor}, {"": its}) for tensor in sent)]
            assert not leaked, f"What is frozen was sent by or to client {turn.client.id}: {listed(leaked)}."


def an_update_looks_like_the_broadcast_or_a_part_of_it(subject: Subject, folder: Path) -> None:
    """In names, and in shapes not larger; with a dynamic payload, neither has private entries of the module."""
    federation, engine, _ = subject.recorded
    varies, shared = federation.run.model.dynamic_payload, federation.run.model.shared_names()
    own = federation.run.model.state_dict().keys()
    for turn, update in engine.fits():
        where = f"client {update.client} in round {turn.round}"
        if varies:
            for what, state in (("The broadcast to", turn.broadcast.state), ("The update of", update.state)):
                besides = sorted(state.keys() & own - shared)
                assert not besides, f"{what} {where} has {listed(besides)}, which is not shared."
            continue
        besides = sorted(update.state.keys() - turn.broadcast.state.keys())
        assert not besides, f"The update of {where} has {listed(besides)} besides what was sent."
        for key, came in update.state.items():
            mine, its = tuple(came.shape), tuple(turn.broadcast.state[key].shape)
            fits = len(mine) == len(its) and all(size <= most for size, most in zip(mine, its, strict=True))
            assert fits, f"The update of {where} has {key} of shape {mine}, which is no part of the broadcast's {its}."


def another_order_memory_and_measuring_change_nothing(subject: Subject, folder: Path) -> None:
    """Repeating a run gives the same result: a turn does not depend on other turns of its round, only private states stay with a
    client, and evaluation leaves nothing behind. If a run differs, each of :data:`VARIATIONS` is tried separately to find the
    cause.
    """
    federation, *_ = subject.recorded
    if differing := _unlike(subject.varied[0], federation):
        alone = {name: {key: make() for key, make in options.items()} for name, options in VARIATIONS.items()}
        found = {name: _unlike(subject.fit(**options), federation) for name, options in alone.items()}
        culprits = [name for name, places in found.items() if places]
        differing = found[culprits[0]] if culprits else differing
        when = ", or ".join(culprits or ["all of it comes together"])
        raise AssertionError(f"The run is another one when {when}: {listed(differing)} differ.")


def _unlike(run: Federation, recorded: Federation) -> list[str]:
    """Where two runs differ, except for the selected round and the costs of evaluation."""
    rows = zip(without_seconds(recorded.run.history), without_seconds(run.run.history), strict=True)
    other = ("selected/", "fine_tune/total_")
    differing = unequal_ends(run, recorded)
    for row, more in rows:
        differing += unequal_metrics(row, more, [key for key in row if not key.startswith(other)])
    return differing


def another_seed_gives_other_numbers(subject: Subject, folder: Path) -> None:
    """The method depends on the seed."""
    other, federation = subject.fit(rounds=1, seed=1), subject.recorded[0]
    one, same_round = without_seconds(federation.run.history)[0], without_seconds(other.run.history)[0]
    assert one != same_round, "All metrics of the first round are the same with the seeds 0 and 1."


def who_does_not_take_part_keeps_its_private_state(subject: Subject, folder: Path) -> None:
    """Bit for bit; that of participants changes, if they have one."""
    federation, _, watch = subject.recorded
    [before, after], [_, cohort] = watch.states, watch.cohorts
    expected = participants_of(federation, 2)
    assert len(cohort) == expected, f"{len(cohort)} clients trained in the second round, expected {expected}."
    absent = before.keys() - cohort
    assert absent or not before, "Everybody who has a private state took part in both rounds: there is nobody to look at."
    for client in sorted(before):
        moved = unequal(before[client], after[client])
        if client in absent:
            assert not moved, f"Client {client} took no part in round 2, but its private state has changed: {listed(moved)}."
        elif before[client]:
            assert moved, f"Client {client} took part in round 2, but nothing of its private state has changed."


def who_never_took_part_has_nothing_stored(subject: Subject, folder: Path) -> None:
    """Evaluation leaves nothing behind."""
    _, watch = subject.varied  # evaluates all clients after the first round
    assert len(watch.cohorts[0]) < len(subject.new_data().clients), "Everybody took part in the first round: nobody is absent."
    strangers = sorted(watch.states[0].keys() - watch.cohorts[0])
    kept = {client: listed(sorted(watch.states[0][client])) for client in strangers}
    assert not kept, f"After round 1 something is stored of clients that have only been measured: {kept}."


def an_unseen_client_is_personalized_and_leaves_no_trace(subject: Subject, folder: Path) -> None:
    """A client that never takes part in training has no merged turn, and nothing of it is stored: the server is that of a
    federation in which the client is only evaluated.
    """
    engine = Recording()
    run = subject.fit(rounds=3, participation=1.0, evaluate_every=1, unseen=[2], engine=engine).run
    turns = {turn.verb for turn in engine.turns if turn.client.id == 2}
    assert turns == {"personalize"}, f"An unseen client took the turns {listed(sorted(turns))}, expected personalize alone."
    assert 2 not in run.store, "Something is stored of a client that is never trained with."
    row = run.history[-1]
    for stage in STAGES:
        value = row[f"unseen/{stage}/test_{run.metric}/mean"]
        assert math.isfinite(value), f"An unseen client's {run.metric} is {value}, {stage.replace('_', ' ')}."
    if not run.model.centralized:
        other = subject.fit(rounds=3, participation=1.0, evaluate_every=1, eligible_clients=[0, 1]).run
        differing = unequal(run.server.state_dict(), other.server.state_dict())
        assert not differing, f"An unseen client has changed the server's {listed(differing)}."
        if not run.model.has_private_state and not run.model.fine_tuning_phases():
            received, personalized = (row[f"unseen/{stage}/test_{run.metric}/mean"] for stage in STAGES[:2])
            assert received == personalized, "Nothing stays with a client, but one that is never trained with was personalized."


def a_round_may_have_any_number_of_clients(subject: Subject, folder: Path) -> None:
    """Methods that choose the participants themselves refuse dropout; a round in which all drop out changes nothing."""
    options: dict[str, Any] = {"sampling": "poisson", "participation": 0.4, "seed": EMPTY_SECOND, "evaluate_every": 0}
    servers, watch = ServerStates(), RoundStates()
    try:
        run = subject.fit(rounds=3, callbacks=[servers, watch], **options).run
    except FederationError as error:
        if "chooses the participants itself" in str(error):
            return
        raise
    assert [row["round/clients"] for row in run.history] == [1.0, 0.0, 2.0], "The cohorts are other ones."
    moved = unequal(servers.states[0], servers.states[1])
    assert not moved, f"Nobody took part in round 2, but the server has changed: {listed(moved)}."
    for client, state in watch.states[0].items():
        moved = unequal(state, watch.states[1][client])
        assert not moved, f"Nobody took part in round 2, but client {client}'s private state has changed: {listed(moved)}."


def a_robust_rule_combines_what_is_sent_or_is_refused(subject: Subject, folder: Path) -> None:
    """If the server averages models with the same tensors, it can also take the median, entry by entry."""
    engine = Recording()
    try:
        run = subject.fit(rounds=1, participation=1.0, engine=engine, aggregation=Median()).run
    except FederationError as error:
        if "its server does not take a mean of models that are all alike" in str(error):
            return
        raise
    if type(run.server.update) in (ServerUpdate, PartialUpdate):
        sent = [update.state for _, update in engine.fits()]
        medians = {name: torch.stack([state[name] for state in sent]).median(dim=0).values for name in sent[0]}
        differing = unequal({name: run.server.state[name] for name in medians}, medians)
        assert not differing, f"The server's {listed(differing)} is not the median of what was sent."


def a_clients_share_is_bounded_or_privacy_is_refused(subject: Subject, folder: Path) -> None:
    """The server changes by at most the clip norm in a round; a method for which that is unknown is refused."""
    clip, servers = 0.01, ServerStates()
    privacy = ClientDP(clip=clip, delta=0.1, noise_multiplier=0.0)
    try:
        run = subject.fit(participation=1.0, callbacks=[servers], privacy=privacy).run
    except FederationError as error:
        if any(said in str(error) for said in ("privacy needs clients that are sampled", "got privacy, but its")):
            return
        raise
    if type(run.server.update) is ServerUpdate:
        first, second = ({name: state[name].double() for name in run.server.state} for state in servers.states)
        moved = math.sqrt(sum((second[name] - tensor).square().sum().item() for name, tensor in first.items()))
        assert 0 < moved <= clip * 1.001, f"The server has moved by {moved} in a round, and the clip norm is {clip}."


def an_examples_share_is_bounded_or_privacy_is_refused(subject: Subject, folder: Path) -> None:
    """Gradients of single examples are the same computed at once and one by one, where a part of the loss could be lost; a method
    that sends more of examples than these is refused.
    """
    ends = []
    for how in ("vmap", "loop"):
        privacy = ExampleDP(clip=0.1, delta=1e-3, noise_multiplier=0.0, per_example=how)
        try:
            ends.append(subject.fit(privacy=privacy).run.server.state_dict())
        except FederationError as error:
            if any(said in str(error) for said in ("got privacy of examples, but", "labels", "vmap cannot compute")):
                return
            raise
    lost = [name for name, tensor in ends[0].items() if not torch.allclose(tensor.float(), ends[1][name].float(), atol=1e-5)]
    assert not lost, f"Gradients of single examples are others computed at once (vmap) than one by one: {listed(lost)}."


EMPTY_SECOND = 16
"""A seed whose cohorts of three clients, drawn with probability 0.4 each, have one, none and two of them."""


class ServerStates(FederationCallback):
    """Stores the server's state after each round."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def on_round_end(self, run: RunView) -> None:
        self.states.append({name: tensor.clone() for name, tensor in run.server.state_dict().items()})


def steps_cost_as_much_without_values(subject: Subject, folder: Path) -> None:
    """The FLOPs of large networks are counted so. A method that reads tensor values must set ``flops_without_values = False``."""
    if subject.make().flops_without_values:
        data, engines = subject.data(num_clients=2, size=40), (Counting(small=0), Counting(small=math.inf))
        costs = [new_federation(1, engine=engine).fit(subject.make(), data)[0]["compute/flops"] for engine in engines]
        assert costs[0] == costs[1], (
            f"A round costs {costs[0]:.0f} FLOPs without values and {costs[1]:.0f} with them: say flops_without_values = False."
        )


# ------------------------------------------------------------------------------------------------------------- checkpoints


def an_interrupted_run_continues_as_if_nothing_had_happened(subject: Subject, folder: Path) -> None:
    """It resumes from the checkpoint of the previous round."""
    try:
        subject.fit(run_dir=folder, callbacks=[InterruptInRound(2)])
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("The run was not interrupted.")
    federation = new_federation(2, run_dir=folder, participation=0.7, evaluate_every=0)
    federation.fit(subject.make(), subject.new_data(), ckpt_path="last")
    assert_same(federation, subject.recorded[0])


def the_last_checkpoint_is_measured_as_the_run_was(subject: Subject, folder: Path) -> None:
    """``test`` and ``validate`` give the results of ``fit``."""
    run = subject.fit(run_dir=folder, trainer=new_trainer).run
    federation = new_federation(2, run_dir=folder, participation=0.7, trainer=new_trainer)
    for verb, kind in ((federation.test, "test"), (federation.validate, "val")):
        metrics = verb(subject.make(), subject.new_data())
        assert metrics, f"{verb.__name__}() has found nothing."
        then = {
            key: value
            for key, value in run.history[-1].items()
            if f"/{kind}_" in key and not key.startswith(("before/", "selected/"))
        }
        _assert_names(metrics.keys(), then.keys(), f"What {verb.__name__}() finds")
        wrong = [f"{name} {metrics[name]}, not {value}" for name, value in then.items() if metrics[name] != value]
        assert not wrong, f"{verb.__name__}() finds something else than the run: {listed(wrong)}."


def a_clients_module_predicts_what_was_measured(subject: Subject, folder: Path) -> None:
    """For use elsewhere; only if accuracy is the metric."""
    federation, *_ = subject.recorded
    for client, result in federation.run.results.items():
        data = federation.run.data.client(client)
        if "test/accuracy" in result and isinstance(data, ClientDataModule):
            inputs, targets = data.transform(data.data[data.splits[2]], None)
            module = federation.client_module(client).eval()
            accuracy = module.task.measures["accuracy"](module.num_classes)
            accuracy.update(*module.task.measured(module(inputs), targets))
            found, measured = accuracy.compute().item(), result["test/accuracy"]
            assert math.isclose(found, measured, rel_tol=1e-6), (
                f"client_module({client}) is right on {found:.1%} of the client's test data, but measured were {measured:.1%}."
            )


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
    an_unseen_client_is_personalized_and_leaves_no_trace,
    a_round_may_have_any_number_of_clients,
    a_robust_rule_combines_what_is_sent_or_is_refused,
    a_clients_share_is_bounded_or_privacy_is_refused,
    an_examples_share_is_bounded_or_privacy_is_refused,
    steps_cost_as_much_without_values,
    an_interrupted_run_continues_as_if_nothing_had_happened,
    the_last_checkpoint_is_measured_as_the_run_was,
    a_clients_module_predicts_what_was_measured,
)

OF_ANY_NETWORK = parts_of_a_network_with_batch_norm_are_disjoint_and_cover_it, a_partly_frozen_network_with_batch_norm_is_trained
"""Checks that give the method another network."""
