"""Turns at sites: the same numbers as in one process, and whatever becomes of messages leaves no trace."""

import pickle
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from often import OFTEN, mostly_slow
from tiny import CLASSES, METHODS, Net, Stop, data_for, momentum, new_federation, new_method, private_states, same, without_seconds
from tiny_rounds import Losing
from tiny_sites import NAMES, STUDY, Clock, Memory, data_of, fit, kept_at, linked, new_site

from lightning_fed.core import PublicDistillation
from lightning_fed.core.client_modules import ClientModules
from lightning_fed.core.messages import Broadcast, Turn
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.deployment.data import DataAtSites
from lightning_fed.deployment.engine import Sites
from lightning_fed.deployment.link import Broken
from lightning_fed.deployment.site import OneClient, SiteStore
from lightning_fed.deployment.wire import SiteDescription, VerbSettings, pack, unpack
from lightning_fed.engines.compression import Compression
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import CentralizedLoRA, FedAvg, FedDF

Answering = Callable[[], bytes]
AT_SITES = [name for name in METHODS if not (new_method(name).centralized or isinstance(new_method(name), PublicDistillation))]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Nobody waits for real."""
    clock = Clock()
    monkeypatch.setattr("lightning_fed.deployment.engine.time", clock)
    return clock


@cache
def here(name: str, rounds: int = 3, evaluate_every: int = 0, lost: tuple[int, int] | None = None) -> Federation:
    """The same run in one process, in which perhaps a client's turn in a round is lost."""
    engine = Losing(lambda turn: turn.verb == "fit" and (turn.client.id, turn.round) == lost)
    federation = new_federation(rounds, engine=engine, participation=0.7, evaluate_every=evaluate_every)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=100))
    return federation


def assert_same_as_here(apart: Federation, link: Memory, together: Federation) -> None:
    """All that both know, bit for bit: the server's state, what was measured at the sites, and what these keep."""
    for ours, theirs in zip(without_seconds(apart.run.history), without_seconds(together.run.history), strict=True):
        ours = {name: value for name, value in ours.items() if not name.startswith("selected/")}
        assert ours == {name: theirs.get(name) for name in ours}
        pooled = tuple(f"{name}/" for name in together.run.server.global_models())
        assert all(name.startswith(("selected/", *pooled)) for name in theirs.keys() - ours.keys())
    assert apart.run.results == together.run.results
    assert same(apart.run.server.state_dict(), together.run.server.state_dict())
    stored = private_states(together)
    assert {client for client, site in link.sites.items() if kept_at(site)} == stored.keys()
    for client, state in stored.items():
        assert same(kept_at(link.sites[client])[together.run.last_rounds[client]], state)


@pytest.mark.parametrize("name", mostly_slow(NAMES, often={"PFedLoRA", "FedHM"}))
def test_numbers_are_those_of_one_process(name: str) -> None:
    link = linked(name)
    assert_same_as_here(fit(name, link, evaluate_every=1), link, here(name, evaluate_every=1))


def test_messages_are_as_small_as_those_of_one_process() -> None:
    compression = Compression("topk", "int8", share=0.2)
    link, together = linked("PFedLoRA", compression=compression), new_federation(3, participation=0.7, compression=compression)
    together.fit(new_method("PFedLoRA"), data_of("PFedLoRA"))
    assert_same_as_here(fit("PFedLoRA", link, compression=compression), link, together)


SENT_BY_DEFINITION = {
    "FedAMP": "a client's own model is what it sends",
    "FedALA": "the last layers are mixed with those that were trained, and sent, in the client's last turn",
    "FedKD": "the mentee as it was received, which a client keeps to know what has changed",
    "MOON": "the last model is the one that was trained, and sent, in the client's last turn",
    "PFedSD": "the teacher is the network that was trained, and sent, in the client's last turn",
    "SCAFFOLD": "a client sends how its control variate changes, which at first is all of it",
}
"""Methods whose private tensors have values that travel under another name, and why."""


@pytest.mark.often(3)
@pytest.mark.parametrize("name", mostly_slow(AT_SITES, often=OFTEN & set(AT_SITES)))
def test_private_states_do_not_leave_their_site(name: str) -> None:
    """Neither a name of theirs nor the bytes of one of their tensors, in anything that goes to a site or comes from it."""
    link = linked(name)
    federation = fit(name, link, rounds=2, run_dir="runs")
    private = [state for site in link.sites.values() for state in kept_at(site).values()]
    assert bool(private) == new_method(name).for_client(link.sites[0].info).has_private_state
    crossed = {name.partition("/")[2] for _, _, tensors in link.sent for name in tensors}
    crossed |= {name for _, tensors in link.answered for name in tensors}
    assert crossed or name == "Standalone"
    assert not crossed & {name for state in private for name in state}
    payloads = [*(tensors for *_, tensors in link.sent), *(tensors for _, tensors in link.answered)]
    messages = [tensor.numpy().tobytes() for tensors in payloads for tensor in tensors.values()]
    numbers = [tensor for state in private for tensor in state.values() if len(tensor.unique()) > 3]
    assert numbers or not private
    found = [tensor for tensor in numbers if any(tensor.numpy().tobytes() in message for message in messages)]
    assert bool(found) == (name in SENT_BY_DEFINITION)
    stamps = [federation.run.store.get(client) for client in federation.run.store]
    assert {name for stamp in stamps for name in stamp} == {"run", *(["round"] if private else [])}


# ---------------------------------------------------------------------------------------------------- what becomes of messages


def is_fit(head: dict[str, Any], client: int, round: int) -> bool:
    return head["ask"] == "turn" and (head["verb"], head["client"], head["round"]) == ("fit", client, round)


def in_cohort(name: str) -> tuple[int, int]:
    """A client that takes part in rounds 1 and 2, and the latter of these."""
    for client in range(3):
        if here(name, 1).run.last_rounds.get(client) == 1 and here(name, 2).run.last_rounds.get(client) == 2:
            return client, 2
    raise AssertionError("nobody does")


class Once:
    """Does something to one message, and nothing to the others.

    Args:
        name: of the method, which says which message: of a client that has a private state already.
        what: is given the client, and what has its site answer.
    """

    def __init__(self, name: str, what: Callable[[int, Answering], "bytes | Broken | None"]) -> None:
        self.which = in_cohort(name)
        self.what = what
        self.times = 0

    def __call__(self, client: int, head: dict[str, Any], answer: Answering) -> bytes | Broken | None:
        if is_fit(head, *self.which) and not self.times:
            self.times += 1
            return self.what(client, answer)
        return answer()


STATEFUL = ("PFedLoRA", "PF2LoRA")


@pytest.mark.parametrize("name", mostly_slow(STATEFUL, often={"PFedLoRA"}))
def test_a_reply_that_is_lost_leaves_no_trace(name: str) -> None:
    """The site has trained, and is asked again."""

    def lose(client: int, answer: Answering) -> Broken:
        answer()
        return Broken("the line was cut")

    fault = Once(name, lose)
    link = linked(name, fault)
    assert_same_as_here(fit(name, link), link, here(name))
    assert fault.times == 1


def test_a_turn_that_fails_once_leaves_no_trace() -> None:
    """The site has trained when something fails, and is asked again."""
    name, failed = "PFedLoRA", list[str]()
    link = linked(name)
    worker = link.sites[in_cohort(name)[0]]._worker
    passes = worker._passes_after_training

    def fail_once(*args: Any) -> Any:
        if not failed:
            failed.append("as it is told")
            raise RuntimeError(failed[0])
        return passes(*args)

    worker._passes_after_training = fail_once  # type: ignore[method-assign]
    assert_same_as_here(fit(name, link), link, here(name))
    assert failed


@pytest.mark.parametrize("name", ["PFedLoRA"])
def test_a_message_that_comes_twice_leaves_no_trace(name: str) -> None:
    def repeat(client: int, answer: Answering) -> bytes:
        answer()
        return answer()

    fault = Once(name, repeat)
    link = linked(name, fault)
    assert_same_as_here(fit(name, link), link, here(name))
    assert fault.times == 1


@pytest.mark.parametrize("name", ["PFedLoRA"])
def test_a_reply_that_comes_too_late_leaves_no_trace(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The site has trained; the round goes on without it, and its next turn starts from the state of the round before."""
    late: list[tuple[str, bytes]] = []

    def delay(client: int, answer: Answering) -> None:
        late.append((str(len(link.sent)), answer()))

    fault = Once(name, delay)
    link = linked(name, fault)
    federation = fit(name, link, patience={"quorum": 0.5})
    [(message_id, answer)] = late
    link.answers[message_id] = answer
    client, round = fault.which
    assert_same_as_here(federation, link, here(name, lost=(client, round)))
    assert federation.run.history[1]["round/failed_clients"] == 1
    assert f"Round 2: the turn of client {client} was lost: no answer in time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "when"),
    mostly_slow(
        [("PFedLoRA", "before"), ("PFedLoRA", "after"), ("PF2LoRA", "after")], often={("PFedLoRA", "before"), ("PFedLoRA", "after")}
    ),
)
def test_a_site_that_is_killed_and_comes_back(name: str, when: str) -> None:
    """In its turn, before or after it has trained."""

    def kill(client: int, answer: Answering) -> Broken:
        if when == "after":
            answer()
        link.sites[client] = new_site(name, client)
        return Broken("nobody answers at the site")

    fault = Once(name, kill)
    link = linked(name, fault)
    assert_same_as_here(fit(name, link), link, here(name))
    assert fault.times == 1


def test_a_site_that_is_away_gets_its_turn_when_it_is_back() -> None:
    looks = 0

    class Leaving(Memory):
        def online(self) -> set[int]:
            nonlocal looks
            looks += bool(self.away)
            if looks == 20:
                self.away = set()
            return set(super().online())

    def leave(client: int, answer: Answering) -> Broken:
        link.away = {client}
        return Broken("the node is not there", away=True)

    link = Leaving(linked("PFedLoRA").sites, Once("PFedLoRA", leave))
    assert_same_as_here(fit("PFedLoRA", link), link, here("PFedLoRA"))
    assert looks == 20


@pytest.mark.parametrize(
    ("name", "checkpoint_every", "dies"),
    mostly_slow([("PFedLoRA", 1, 2), ("PFedLoRA", 2, 3), ("PF2LoRA", 2, 3)], often={("PFedLoRA", 2, 3)}),
)
def test_a_server_that_dies_before_a_checkpoint_goes_on_from_the_last(name: str, checkpoint_every: int, dies: int) -> None:
    """Sites keep what the checkpoint refers to, though more rounds were merged since; and are not asked for what they dropped."""
    options: dict[str, Any] = {"run_dir": "runs", "checkpoint_every": checkpoint_every}
    link = linked(name)
    with pytest.raises(KeyboardInterrupt):
        fit(name, link, callbacks=[Stop(dies)], **options)
    again = linked(name)  # the machine was started again, and with it all of the sites
    federation = fit(name, again, ckpt_path="last", **options)
    assert_same_as_here(federation, again, here(name))
    for site in again.sites.values():
        assert len(kept_at(site)) <= 4  # two checkpoints, the best, the newest


def test_a_study_goes_on_with_the_sites_that_took_part(capsys: pytest.CaptureFixture[str]) -> None:
    """And knows the data of the one that it starts from."""
    link = linked("FedAvg")
    fit("FedAvg", link, 1, run_dir="runs")
    with pytest.raises(FederationError, match="was made with data = "):
        fit("FedAvg", link, 2, ckpt_path="last", run_dir="runs", unseen=[0])
    assert fit("FedAvg", link, 2, ckpt_path="last", run_dir="runs").run.round == 2
    fit("FedAvg", link, 1, init_from="runs/version_0")
    assert "other data" not in capsys.readouterr().out


def test_another_run_begins_without_private_states() -> None:
    """Those of the first stay for it."""
    link = linked("PFedLoRA")
    for _ in range(2):
        assert same(fit("PFedLoRA", link).run.server.state_dict(), here("PFedLoRA").run.server.state_dict())
    assert {len(list(site.store.folder.iterdir())) for site in link.sites.values()} == {2}


# ------------------------------------------------------------------------------------------------------------- who is refused


def test_a_site_with_another_study_is_refused_before_its_first_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """Naming what differs."""
    other = VerbSettings(
        {"model.class_path": "Tiny", "seed_everything": 1, "model.init_args.mu": 0.5}, STUDY.versions | {"torch": "1.0"}
    )
    link = linked("FedAvg")
    link.sites[1] = new_site("FedAvg", 1, settings=other)
    message = (
        r"^The site of client 1 cannot take part: this is another study: model.init_args.mu is 0.5 at the site and 'not set' at "
        r"the server; seed_everything is 1 at the site and 0 at the server; torch is '1.0' at the site "
        r"and '[\d.]+' at the server\.$"
    )
    with pytest.raises(FederationError, match=message):
        fit("FedAvg", link, run_dir="runs")
    assert {head["ask"] for _, head, _ in link.sent} == {"describe"}
    assert not any(Path("runs").glob("*"))
    assert "Refused: this is another study" in capsys.readouterr().err  # which the site is told as well


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"settings": VerbSettings({"seed_everything": 7}, STUDY.versions)}, "this is another study"),
        ({"data": "00000000"}, "the data differ from those that this run started with"),
    ],
)
def test_a_site_that_comes_back_as_another_is_refused(changed: dict[str, Any], message: str) -> None:
    """With another study, or with other data than it has described."""

    def come_back(client: int, answer: Answering) -> Broken:
        link.sites[client] = site = new_site("PFedLoRA", client, settings=changed.get("settings", STUDY))
        site._data = changed.get("data", site._data)
        return Broken("nobody answers at the site")

    link = linked("PFedLoRA", Once("PFedLoRA", come_back))
    with pytest.raises(FederationError, match=rf"Round 2: the turn of client \d was lost \({message}"):
        fit("PFedLoRA", link)


def test_another_pretrained_network_is_refused() -> None:
    """It never travels; here it is drawn with another seed."""
    link = linked("PF2LoRA")
    link.sites[1] = new_site("PF2LoRA", 1, seed=1)
    with pytest.raises(FederationError, match="the frozen part of the network, perhaps pretrained, has other weights than the ser"):
        fit("PF2LoRA", link, participation=1.0)
    assert not kept_at(link.sites[1])


def test_a_site_answers_for_its_own_client_alone() -> None:
    link = linked("FedAvg")
    link.sites[0], link.sites[1] = link.sites[1], link.sites[0]
    with pytest.raises(FederationError, match=r"The site of client 0 cannot take part: .*message is of client 1"):
        fit("FedAvg", link)
    assert not link.sites[0].store.folder.exists()


def test_a_private_state_that_is_missing_or_damaged_is_named() -> None:
    def forget(client: int, answer: Answering) -> bytes:
        for path in link.sites[client].store.folder.glob("*/round_000001*"):
            path.unlink()
        return answer()

    def damage(client: int, answer: Answering) -> bytes:
        for path in link.sites[client].store.folder.glob("*/round_000001*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        return answer()

    for what, message in ((forget, "there is no private state of round 1 of this run in sites"), (damage, "is damaged")):
        link = linked("PFedLoRA", Once("PFedLoRA", what))
        with pytest.raises(FederationError, match=rf"Round 2: the turn of client \d was lost \(.*{message}"):
            fit("PFedLoRA", link)


def test_a_run_needs_data_at_sites() -> None:
    engine = Sites(linked("FedAvg"), 3, STUDY)
    with pytest.raises(
        FederationError, match=r"The engine Sites got InMemory, but data are at the sites: give DataAtSites\(data\)"
    ):
        new_federation(1, engine=engine).fit(new_method("FedAvg"), data_of("FedAvg"))


def test_sites_with_other_classes_are_refused() -> None:
    link = linked("FedAvg")
    link.sites[2].info = OneClient(data_for("FedAvg", num_clients=3), 2, 2).client(2).info
    object.__setattr__(link.sites[2].info, "label_counts", (1, link.sites[2].info.num_train - 1))
    with pytest.raises(FederationError, match=r"Some sites count 2 labels and others 4: .*data.init_args.classes"):
        fit("FedAvg", link)


# -------------------------------------------------------------------------------------------------------- what they send


def sent_by_1(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]) -> Callable[..., Any]:
    """Client 1's updates, changed."""

    def fault(client: int, head: dict[str, Any], answer: Answering) -> Any:
        said = answer()
        if client != 1 or head["ask"] != "turn":
            return said
        answered, tensors = unpack(said, "The test's")
        changed = change(answered, tensors)
        return changed if isinstance(changed, bytes) else pack(answered, tensors)

    return fault


def says(**fields: Any) -> Callable[..., None]:
    return lambda head, tensors: head.update(fields)


def measured(metrics: dict[str, Any]) -> Callable[..., None]:
    return lambda head, tensors: head["metrics"].update(metrics)


def sends(name: str, tensor: torch.Tensor) -> Callable[..., None]:
    return lambda head, tensors: tensors.update({name: tensor})


def nan(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).fill_(float("nan"))


def silent(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del head["metrics"]["flops"]


def pickled(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    return pickle.dumps(tensors)


def old(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    return pack(head | {"protocol": 0}, tensors)


BIAS = "backbone.head.bias"
ENDLESS, TWO_LINES = measured({"flops": 10**400}), measured({"val/a\nround,1": 1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan, "The update of client 1 holds NaN or infinity"),
        (
            sends(BIAS, torch.zeros(CLASSES + 1)),
            r"has 'backbone.head.bias' of shape \(5,\), expected \(4,\)",
        ),
        (
            sends(BIAS, torch.zeros(CLASSES).double()),
            "The update of client 1 has 'backbone.head.bias' of torch.float64, expected torch.float32",
        ),
        (sends("evil", torch.zeros(1)), "The update of client 1 holds 'evil', which does not belong there"),
        (says(num_examples=10**9), "message counts 1000000000 training examples, 2[0-9] were described"),
        (measured({"flops": "many"}), "message has flops = 'many', expected float"),
        (ENDLESS, r"message has flops = 10+\.\.\.0+, expected float"),
        (says(num_examples=10**400), r"message has num_examples = 10+\.\.\.0+, expected a number from 0"),
        (TWO_LINES, r"a metric named 'val/a\\nround,1': give it a name"),
        (measured({"val/accuracy": 1e300}), r"message has val/accuracy = 1e\+300, which no model reaches"),
        (silent, "lacks the metric 'flops'"),
        (pickled, "message cannot be read"),
        (lambda head, tensors: b"", "message cannot be read"),
        (old, "message has protocol 0, this lightning-fed speaks 1"),
    ],
)
def test_what_sites_send_is_checked(change: Any, message: str) -> None:
    """The server is as it was before the round."""
    with pytest.raises(FederationError, match=message):
        fit("FedAvg", linked("FedAvg", sent_by_1(change)), participation=1.0, rounds=1, run_dir="runs")
    assert not any(Path("runs").iterdir())


@pytest.mark.parametrize("name", ["FedAvg", "PFedLoRA"])
def test_with_a_smaller_quorum_a_refused_update_is_a_lost_turn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It leaves no trace: not at the server, and not at the site, which has trained."""

    def diverge(client: int, answer: Answering) -> bytes:
        head, tensors = unpack(answer(), "The test's")
        nan(head, tensors)
        return pack(head, tensors)

    fault = Once(name, diverge)
    link = linked(name, fault)
    federation = fit(name, link, patience={"quorum": 0.5})
    assert_same_as_here(federation, link, here(name, lost=fault.which))
    client, _ = fault.which
    assert f"the turn of client {client} was lost: The update of client {client} holds NaN" in capsys.readouterr().out


def spoken(why: str, kind: str) -> Callable[..., bytes]:
    return lambda head, tensors: pack({"answer": kind, "client": 1, "why": why})


FORGED = "\x1b[2J\nRound 9: all is well\ud800" + "!" * 2**20


@pytest.mark.parametrize(
    "change",
    [
        says(metrics={}),
        measured({"test/accuracy": float("inf")}),
        measured({f"test/{number}": 1.0 for number in range(10_000)}),
        *(ENDLESS, TWO_LINES, pickled, spoken(FORGED, "refused"), spoken(FORGED, "failed")),
    ],
)
def test_whatever_a_site_says_costs_its_turn(change: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And neither the run, nor a line that is not the server's."""

    def fault(client: int, head: dict[str, Any], answer: Answering) -> Any:
        return sent_by_1(change)(client, head, answer) if head.get("verb") == "evaluate" else answer()

    link = linked("FedAvg", fault)
    federation = fit("FedAvg", link, rounds=1, patience={"quorum": 0.5}, run_dir="runs", logger=True)
    assert federation.run.results.keys() == {0, 2}
    [line] = [line for line in capsys.readouterr().out.splitlines() if "was lost" in line]
    assert line.startswith("Round 1: the turn of client 1 was lost: ")
    assert line.isprintable()
    assert len(line) < 1200
    columns = Path("runs/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {name for name in columns if name.startswith("after/")} == {
        f"after/{measured}/{name}"
        for measured in ("test_accuracy", "test_loss")
        for name in ("mean", "min", "q25", "median", "q75", "max")
    }


@pytest.mark.parametrize(
    "lie",
    [{"num_train": 10**400}, {"labels": [10**400]}, {"labels": [1]}, {"data": "\ud800"}, {"data": "x" * 2**20}],
    ids=["endless", "labels", "sum", "text", "megabyte"],
)
def test_what_a_site_says_of_its_data_is_checked(lie: dict[str, Any]) -> None:
    def fault(client: int, head: dict[str, Any], answer: Answering) -> bytes:
        said, _ = unpack(answer(), "The test's")
        return pack(said | (lie if client == 1 else {}))

    with pytest.raises(FederationError, match=r"^The site of client 1 cannot take part: .* message has ") as error:
        fit("FedAvg", linked("FedAvg", fault))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_a_finished_study_with_statistics_has_its_model_when_it_is_served_again() -> None:
    link = linked("FedHM")
    first = fit("FedHM", link, rounds=1, run_dir="runs").run.server_module()
    again = fit("FedHM", link, rounds=1, run_dir="runs", ckpt_path="last").run.server_module()
    assert same(again.state_dict(), first.state_dict())


def test_statistics_are_checked() -> None:
    def fault(client: int, head: dict[str, Any], answer: Answering) -> bytes:
        if client == 1 and head.get("verb") == "compute_statistics":
            change: Any = sent_by_1(lambda head, tensors: tensors.pop(next(iter(tensors))))
            return change(client, head, answer)
        return answer()

    with pytest.raises(FederationError, match=r"the turn of client 1 was lost \(The update of client 1 lacks '"):
        fit("FedHM", linked("FedHM", fault), participation=1.0, rounds=1)


class Failing(FedAvg):
    """Fails at client 1, with something in its words that must not leave the site."""

    def client_loss(self, batch: Any) -> torch.Tensor:
        assert self.client is not None
        if self.client.id == 1:
            raise ValueError("no such patient: Mary Miller")
        return super().client_loss(batch)


def test_what_goes_wrong_at_a_site_is_told_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The server hears what kind of error it was. It asks twice."""
    link = linked("FedAvg")
    for site in link.sites.values():
        site._worker.template = Failing(Net, CLASSES, momentum)
        site._worker.template.configure_model()
        site._worker.clients = ClientModules(site._worker.template, 0)
        site._worker._modules.clear()
    with pytest.raises(FederationError, match=r"was lost \(ValueError, of which the site's log says more\), and 2 of 3"):
        fit("FedAvg", link, participation=1.0)
    told = capsys.readouterr()
    assert told.err.count("ValueError: no such patient: Mary Miller") == 2
    assert not any("Miller" in str(head) for head, _ in link.answered)


def test_a_site_reads_no_message_that_names_a_folder() -> None:
    """Runs are folders, and what a server sends is checked as well."""
    site = new_site("FedAvg", 0)
    head = {"ask": "turn", **STUDY.head, "client": 0, "run": "../../elsewhere", "verb": "fit", "held": []}
    for wrong, message in (
        (head, "names the run '../../elsewhere', expected 32 hexadecimal digits"),
        (
            head | {"run": "0" * 32, "verb": "train_on_public"},
            "asks a site to 'train_on_public', expected fit, evaluate or compute_statistics",
        ),
        (head | {"run": "0" * 32, "round": 1, "last_round": -1, "num_clients": 3}, "has last_round = -1, expected a number from 0"),
        (head | {"client": 2}, "this is the site of client 0, not of client 2"),
    ):
        answer, _ = unpack(site.answer(pack(wrong)), "The site's")
        assert answer["answer"] == "refused"
        assert message in answer["why"]
    assert unpack(site.answer(b"?"), "The site's")[0]["answer"] == "refused"


def test_a_site_survives_every_message(capsys: pytest.CaptureFixture[str]) -> None:
    """And prints nothing of it that is more than a line."""
    site, told = new_site("FedAvg", 0), []

    def fault(client: int, head: dict[str, Any], answer: Answering) -> bytes:
        if head["ask"] == "turn":
            _, _, tensors = link.sent[-1]
            for key in head.keys() - {"protocol"}:
                for lie in (10**400, -1, float("nan"), None, [], {"a": FORGED}, FORGED):
                    said, _ = unpack(site.answer(pack(head | {key: lie}, tensors)), "The site's")
                    told.append(said["answer"])
        return answer()

    link = linked("FedAvg", fault)
    fit("FedAvg", link, rounds=1, participation=0.3)
    assert "refused" in told
    assert {"refused", "failed", "update"} >= set(told)
    refused = [line for line in capsys.readouterr().err.split("\n") if line.startswith("Refused: ")]
    assert len(refused) == told.count("refused")
    assert all(line.isprintable() and len(line) < 1200 for line in refused)


# ------------------------------------------------------------------------------------------------- waiting, and doing without


def test_who_is_not_there_in_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    link = linked("FedAvg")
    link.away = {0, 2}
    with pytest.raises(FederationError, match=r"The sites of clients 0, 2 were not online within 5 seconds: is lightning-fed join"):
        fit("FedAvg", link)
    assert capsys.readouterr().out == "Waiting for the sites of clients 0, 2.\n"


def test_below_the_quorum_the_run_ends_and_goes_on_later() -> None:
    """With the same numbers as if nothing had happened."""

    def leave(client: int, answer: Answering) -> Broken:
        link.away = {client}
        return Broken("the node is not there", away=True)

    link = linked("PFedLoRA", Once("PFedLoRA", leave))
    with pytest.raises(
        FederationError, match=r"\(the node is not there\), and 1 of 2 turns are fewer than the quorum of 1\. When its"
    ):
        fit("PFedLoRA", link, run_dir="runs")
    link.away = set()
    assert_same_as_here(fit("PFedLoRA", link, run_dir="runs", ckpt_path="last"), link, here("PFedLoRA"))


def test_a_quorum_is_counted_in_whole_turns() -> None:
    engine = Sites(linked("FedAvg"), 25, STUDY, quorum=0.28)  # 7.000000000000001 of 25
    engine._asked = 25
    lost = [Turn("fit", ClientInfo(client, 1, 1, 1, ()), 1, Broadcast({})) for client in range(19)]
    for turn in lost[:18]:
        engine.refused(turn, FederationError("no"))
    with pytest.raises(FederationError, match=r"6 of 25 turns are fewer than the quorum of 0\.28"):
        engine.refused(lost[18], FederationError("no"))


def test_what_a_server_without_data_cannot_do_is_left_out_or_refused() -> None:
    federation = fit("FedAvg", linked("FedAvg"), run_dir="runs", logger=True, progress=True, rounds=1)
    [row] = federation.run.history
    assert "after/test_accuracy/mean" in row
    assert not any(name.startswith("global/") for name in row)
    assert "majority" not in Path("runs/version_0/clients.csv").read_text()
    with pytest.raises(FederationError, match="Client 1's model is at its site"):
        federation.client_module(1)
    assert fit("FedHM", linked("FedHM"), rounds=1).run.monitored("test") == "after/test_accuracy/mean"  # there is no global one
    for model, message in (
        (FedDF(Net, CLASSES, optimizer=momentum), "The method needs public data at the server, and there are no data"),
        (new_method("CentralizedLoRA"), "The method asks for the pooled data, which stay at their sites"),
    ):
        assert isinstance(model, FedDF | CentralizedLoRA)
        with pytest.raises(FederationError, match=message):
            fit(model, linked("FedAvg"))
    with pytest.raises(FederationError, match="The data are at their sites"):
        DataAtSites(data_of("FedAvg")).client(0)


def test_a_store_keeps_what_is_asked_for_and_writes_whole_files() -> None:
    store = SiteStore(Path("states"))
    for round in (1, 2, 3):
        store.put("run", round, {"a": torch.full((2,), round)})
    store.put("run", 3, {"a": torch.full((2,), 9)})
    store.keep("run", {1, 3})
    assert store.get("run", 3)["a"].tolist() == [9, 9]
    assert sorted(store._files("run")) == [1, 3]
    assert len(list(Path("states/run").iterdir())) == 2


def test_nothing_is_unpickled() -> None:
    """Neither here nor where Flower's apps pass it on."""
    import lightning_fed

    folder = Path(str(lightning_fed.__file__)).parent
    sources = [path.read_text() for path in (folder / "deployment").rglob("*.py")]
    assert len(sources) > 5
    assert not any(re.search(r"import pickle|\.recv\(\)|(?<!safetensors\.)torch\.load\(", source) for source in sources)


def test_the_server_knows_what_turns_texts_and_images_into_inputs() -> None:
    data = data_of("FedAvg")
    data.tokenizer, data.image_size = "tokenizer", 8  # type: ignore[attr-defined]
    there = DataAtSites(data)
    assert (there.tokenizer, there.image_size) == ("tokenizer", 8)


def test_the_server_counts_labels_as_the_sites_do() -> None:
    """Of yes or no there are two, and one output."""
    there = DataAtSites(data_of("FedAvg"))
    there.num_classes = 1
    there.described([SiteDescription(ClientInfo(k, 7, 0, 2, (3, 4)), "checksum") for k in range(2)])
    assert there.num_labels == 2
    assert there.label_counts().tolist() == [[3, 4], [3, 4]]
