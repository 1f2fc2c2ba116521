"""The engine for turns at sites: it sends messages to the sites and waits for their answers."""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torchmetrics import Metric

from lightning_fed.core.aggregation import REQUIRED, check_form
from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.deployment.data import DataAtSites
from lightning_fed.deployment.link import Broken, Link
from lightning_fed.deployment.wire import (
    SiteDescription,
    TurnRequest,
    VerbSettings,
    counted,
    frozen_checksum,
    pack,
    read_field,
    unpack,
    unpack_update,
)
from lightning_fed.engines.base import Engine
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.federation.cohorts import least_of
from lightning_fed.formatting import escaped
from lightning_fed.storage.client_store import ClientStore
from lightning_fed.tensors import State

log = logging.getLogger(__name__)

TRIES = 2
"""Maximum number of attempts with a site that answers with an error, or not at all."""


T = TypeVar("T")


@dataclass(eq=False)
class _Message(Generic[T]):
    """A message to a site, and its result.

    Args:
        client: client of the site.
        pack: creates the message, anew for each attempt.
        read: converts the answer's head and tensors, and refuses invalid ones.
        ends: deadline of the answer.
    """

    client: int
    pack: Callable[[], bytes]
    read: Callable[[dict[str, Any], State, str], T]
    ends: float
    tries: int = 0
    message_id: str | None = None  # while it is being answered
    answer: T | None = None
    failure: str | None = None
    trouble: str = ""  # errors so far

    @property
    def is_done(self) -> bool:
        return self.answer is not None or self.failure is not None

    def take(self, answer: bytes | Broken) -> None:
        """Read an answer, and determine whether the message has to be sent again."""
        self.message_id = None
        if isinstance(answer, Broken):
            self.trouble = escaped(answer.why)
            self.tries -= answer.away
        else:
            whose = f"The site of client {self.client}'s"
            try:
                head, tensors = unpack(answer, whose)
                if counted(head, "client", whose) != self.client:
                    raise FederationError(f"{whose} message is of client {head['client']}.")
                kind = read_field(head, "answer", str, whose)
                if kind == "refused":  # a second attempt would be refused, too
                    self.failure = escaped(read_field(head, "why", str, whose))
                    return
                if kind == "failed":
                    self.trouble = f"{escaped(read_field(head, 'why', str, whose))}, of which the site's log says more"
                else:
                    self.answer = self.read(head, tensors, whose)
                    return
            except FederationError as error:
                self.trouble = escaped(str(error))
        if self.tries >= TRIES:
            self.failure = self.trouble


class Sites(Engine):
    """Runs turns at sites, which keep their private states. The server's store only has the round of each client's private state,
    so that checkpoints refer to states at sites as they refer to local ones, and sites learn which are still needed.

    Args:
        link: transports messages.
        count: number of clients, each with its own site.
        settings: settings that must be the same at all sites.
        wait: seconds until all sites must be online and have described their data, at the start.
        deadline: seconds that the turns of a phase of a round may take; slower turns are lost.
        quorum: share of a phase's turns that must arrive; with fewer the run ends.
        poll: seconds between checks for answers.
    """

    def __init__(
        self,
        link: Link,
        count: int,
        settings: VerbSettings,
        wait: float = 600,
        deadline: float = 3600,
        quorum: float = 1.0,
        poll: float = 0.5,
    ) -> None:
        self.link, self.count, self.settings = link, count, settings
        self.wait, self.deadline, self.quorum, self.poll = wait, deadline, quorum, poll
        self._sites: list[SiteDescription] = []
        self._opened: tuple[str, ClientStore, FederatedModule] | None = None
        self._frozen = ""
        self._asked = self._lost = 0  # turns of the phase
        self._refused: Turn | None = None  # the last turn whose update the server refused

    def clients(self, data: FederatedDataModule) -> Sequence[ClientInfo]:
        """Wait until all sites are online, and ask them for the descriptions of their data.

        Raises:
            FederationError: names the sites that are not online, or the first one that refuses and why.
        """
        if not isinstance(data, DataAtSites):
            raise FederationError(f"The engine Sites got {type(data).__name__}, but data are at the sites: give DataAtSites(data).")
        ends = time.monotonic() + self.wait
        self._wait_for_all(ends)
        question = {"ask": "describe", **self.settings.head}
        asked = [_Message(k, partial(pack, question | {"client": k}), SiteDescription.unpacked, ends) for k in range(self.count)]
        self._sites = []
        for message in asked:
            self._finish(message, asked)
            if message.answer is None:
                why = str(message.failure).removesuffix(".")
                raise FederationError(f"The site of client {message.client} cannot take part: {why}.")
            self._sites.append(message.answer)
        lengths = sorted({len(site.info.label_counts) for site in self._sites})
        if len(lengths) > 1:
            raise FederationError(
                f"Some sites count {lengths[0]} labels and others {lengths[-1]}: the data must have the same classes at all sites. "
                "If they are determined from files, list them (data.init_args.classes)."
            )
        data.described(self._sites)
        return data.clients

    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        """Create an id for the run, or find that of the continued run."""
        named = states.find(SERVER)
        if named is None:
            named = {"run": torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8)}
            states.put(SERVER, named, 0)
        template = spec.worker().template
        self._opened = bytes(named["run"].tolist()).hex(), states, template
        self._frozen = frozen_checksum(template)

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        """Yield an update, or a failure, per turn. All turns are sent at once, and answers are collected here. That a site has a
        new private state is recorded once its update is accepted: if the server refuses it, the turn never happened.

        Raises:
            FederationError: if fewer than the quorum arrive.
        """
        assert self._opened is not None, "open() comes first"
        _, states, _ = self._opened
        asked, ends = list(turns), time.monotonic() + self.deadline
        waiting = deque(
            _Message(turn.client.id, partial(self._packed, turn), partial(self._read_update, turn), ends) for turn in asked
        )
        self._asked, self._lost = len(asked), 0
        for turn in asked:
            message = waiting[0]
            self._finish(message, waiting)
            waiting.popleft()  # releases the merged update, too
            if message.answer is None:
                yield self._lose(turn, str(message.failure))
                continue
            update, keeps = message.answer
            yield update
            if turn.verb == "fit" and keeps and self._refused is not turn:
                states.put(turn.client.id, {"round": torch.tensor(turn.round)}, turn.round)

    def refused(self, turn: Turn, error: FederationError) -> TurnFailure:
        """Treat the turn as lost, as if its site had not answered. Raises :class:`FederationError` below the quorum."""
        self._refused = turn
        return self._lose(turn, escaped(str(error)))

    def _lose(self, turn: Turn, why: str) -> TurnFailure:
        self._lost += 1
        if self._asked - self._lost < least_of(self.quorum, self._asked):
            raise FederationError(
                f"Round {turn.round}: the turn of client {turn.client.id} was lost ({why}), and {self._asked - self._lost} of "
                f"{self._asked} turns are fewer than the quorum of {self.quorum:g}. When its site is back, continue with "
                "--ckpt_path last; or go on without it, with a smaller --quorum."
            )
        return TurnFailure(turn.client.id, why)

    def close(self) -> None:
        """Nothing to do: the sites wait for the next message."""
        self._opened = None

    # ------------------------------------------------------------------------------------------------------ what is exchanged

    def _packed(self, turn: Turn) -> bytes:
        assert self._opened is not None
        run, states, _ = self._opened
        client = turn.client.id
        turn = replace(
            turn, last_round=turn.last_round if client in states else 0
        )  # without a private state, the client starts from the initial one
        held, data = tuple(sorted(states.rounds(client))), self._sites[client].data
        return TurnRequest(run, turn, held, data, self._frozen).pack(self.settings)

    def _read_update(self, turn: Turn, head: dict[str, Any], tensors: State, whose: str) -> tuple[ClientUpdate, bool]:
        """The update, after checks that the run does not make."""
        assert self._opened is not None
        update, keeps = unpack_update(head, tensors, whose)
        info, template = self._sites[turn.client.id].info, self._opened[2]
        if update.num_examples != info.num_train:
            raise FederationError(
                f"{whose} message counts {update.num_examples} training examples, {info.num_train} were described."
            )
        monitor = (f"test/{template.monitor}",) if info.num_test else ()
        check_form(update, *(monitor if turn.verb == "evaluate" else REQUIRED.get(turn.verb, ())))
        for metrics in (template.val_metrics, template.test_metrics):
            for name, metric in metrics.items(copy_state=False):
                if name in update.metrics and is_too_good(metric, update.metrics[name]):
                    raise FederationError(f"{whose} message has {name} = {update.metrics[name]:g}, which no model reaches.")
        if turn.verb == "evaluate" and update.state:
            raise FederationError(f"{whose} message has tensors, and a measurement has none.")
        return update, keeps

    # ---------------------------------------------------------------------------------------------------------------- waiting

    def _wait_for_all(self, ends: float) -> None:
        reported: list[int] = []
        while missing := sorted(set(range(self.count)) - set(self.link.online())):
            if missing != reported:
                log.info(f"Waiting for the sites of clients {', '.join(map(str, missing))}.")
                reported = missing
            if time.monotonic() > ends:
                raise FederationError(
                    f"The sites of clients {', '.join(map(str, missing))} were not online within {self.wait:g} seconds: is "
                    "lightning-fed join running there, and does it reach the server? --wait says how long to wait."
                )
            time.sleep(self.poll)

    def _finish(self, message: _Message[Any], waiting: Collection[_Message[Any]]) -> None:
        """Wait for an answer, and handle the other messages meanwhile."""
        while True:
            self._see_to(waiting)
            if message.is_done:
                return
            time.sleep(self.poll)

    def _see_to(self, messages: Collection[_Message[Any]]) -> None:
        """Send messages that are due, read answers, and give up messages whose deadline has passed."""
        undone = [message for message in messages if not message.is_done]
        online = self.link.online() if any(message.message_id is None for message in undone) else ()
        for message in undone:
            if (left := message.ends - time.monotonic()) <= 0:
                message.failure = message.trouble or "no answer in time"
            elif message.message_id is None:
                if message.client in online:
                    message.tries += 1
                    sent = self.link.send(message.client, message.pack(), left)
                    if isinstance(sent, Broken):
                        message.take(sent)
                    else:
                        message.message_id = sent
                else:
                    message.trouble = message.trouble or "its site was not online"
            elif (answer := self.link.poll(message.message_id)) is not None:
                message.take(answer)


def is_too_good(metric: Metric, value: float) -> bool:
    """Whether a metric is better than its best possible value, by torchmetrics. The bound of the worst value is not checked,
    because it is not always correct: a coefficient of determination may be less than 0.
    """
    lower_is_better = metric.higher_is_better is False
    best = metric.plot_lower_bound if lower_is_better else metric.plot_upper_bound
    tolerance = 1e-6  # for a mean in float32
    return best is not None and (value < best - tolerance if lower_is_better else value > best + tolerance)
