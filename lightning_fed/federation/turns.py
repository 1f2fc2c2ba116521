"""The turns of a round: what the server sends, and the updates that come back."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from lightning_fed.core.aggregation import REQUIRED, check_form
from lightning_fed.core.client_modules import one_per_architecture
from lightning_fed.core.messages import Broadcast, ClientUpdate, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import RunOnServer, Server, ServerVerb
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.engines import Engine
from lightning_fed.engines.compression import NONE
from lightning_fed.engines.order import Receive, run_turns
from lightning_fed.federation.meters import Stopwatch, TrafficMeter
from lightning_fed.federation.settings import RunSettings
from lightning_fed.seeding import COMPRESSION, seeded
from lightning_fed.tensors import State

KEPT = 8
"""Number of broadcasts that are kept in compressed form: a server with one per client must not hold all of them."""


class RoundTurns:
    """Has an engine run the turns of each round, and counts traffic and time.

    Args:
        engine: runs the turns.
        server: makes broadcasts and checks updates.
        data: the clients' data.
        stopwatch: counts seconds.
        settings: the federation's settings: its seed, and how messages are compressed.
        model: the method.
        clients: all clients.

    Attributes:
        last_rounds: round of each client's last fit turn that was merged, and so of its private state, by id.
        merged_turns: number of each client's fit turns that were merged, by id.
        updates: the current round's updates, without payloads.
        traffic: counts what was sent.
    """

    def __init__(
        self,
        engine: Engine,
        server: Server,
        data: FederatedDataModule,
        stopwatch: Stopwatch,
        settings: RunSettings,
        model: FederatedModule,
        clients: Sequence[ClientInfo],
    ) -> None:
        self.engine = engine
        self.last_rounds: dict[int, int] = {}
        self.merged_turns: dict[int, int] = {}
        self.traffic = TrafficMeter()
        self.updates: list[ClientUpdate] = []
        self._server, self._data, self._stopwatch = server, data, stopwatch
        self._seed, self._compression = settings.seed, settings.compression
        self._model, self._clients = model, clients
        self._compressed: dict[int, tuple[State, State]] = {}  # the last broadcasts by id: uncompressed and compressed
        self._arrived: tuple[State, State] = ({}, {})  # the last broadcast: compressed and decompressed
        self._exact: dict[int, State] = {}  # the participants' broadcasts before compression, by id, until their updates arrive

    @cached_property
    def _modules(self) -> list[FederatedModule]:
        """One per architecture."""
        return [self._model, *(module for _, module in one_per_architecture(self._model, self._clients))]

    @cached_property
    def _buffers(self) -> set[str]:
        """Names of the buffers of all architectures."""
        return {name for module in self._modules for name in module.buffer_names()}

    @cached_property
    def _computed_anew(self) -> set[str]:
        """Names of what clients of any architecture do not change from the received values on: payloads, unless they continue."""
        return {name for module in self._modules for name in module.payload().keys() - module.continued_names()}

    def run(
        self, turns: Iterable[Turn], receive: Receive | None = None, failure: str | None = None
    ) -> Iterator[tuple[Turn, ClientUpdate]]:
        """Turns with their updates, whose form has been checked; see :func:`.run_turns`."""

        def checked(turn: Turn, update: ClientUpdate) -> ClientUpdate:
            check_form(update, *REQUIRED.get(turn.verb, ()))
            return update if receive is None else receive(turn, update)

        return run_turns(self.engine, turns, checked, failure)

    def train(self, round: int, cohort: Iterable[ClientInfo], measure: bool, away: Collection[int] = ()) -> Iterator[ClientUpdate]:
        """The cohort's updates in client order, checked and counted.

        Args:
            round: number of the round.
            cohort: the participants.
            measure: whether each trained model is evaluated.
            away: ids of clients that receive the model and drop out.
        """
        self.updates = []
        self._compressed.clear()  # compressed with the last round's random stream
        self._exact.clear()

        def turns() -> Iterator[Turn]:
            for client in cohort:
                exact = self._server.broadcast(client)
                broadcast = self.sent(client, exact, round)
                self.traffic.down(client.id, broadcast)
                if client.id in away:
                    continue
                if broadcast is not exact:
                    self._exact[client.id] = exact.state
                last, merged = self.last_rounds.get(client.id, 0), self.merged_turns.get(client.id, 0)
                yield Turn("fit", client, round, broadcast, measure, last, turns=merged)

        for _, update in self._stopwatch.each("fit", self.run(turns(), self._receive)):
            self.updates.append(ClientUpdate(update.client, update.num_examples, {}, update.metrics))
            yield update

    def run_on_server(self, round: int) -> RunOnServer:
        """The function that a server uses to train; see :meth:`.Server.train_on_public`."""

        def each(verb: ServerVerb, models: Iterable[Broadcast]) -> Iterator[ClientUpdate]:
            info = self._data.pooled().info if verb == "evaluate" else self._data.public_set().info
            lost = f"The server's own turns of round {round} were lost, without which it cannot train"
            return (update for _, update in self.run((Turn(verb, info, round, model) for model in models), failure=lost))

        return each

    def train_on_public(self, round: int, clients: Iterable[ClientInfo]) -> None:
        """Train clients whose update arrived on public data, as the server says; the costs are added to their updates' metrics."""

        def turns() -> Iterator[Turn]:
            for client in clients:
                if (broadcast := self._server.public_training(client)) is not None:
                    broadcast = self.sent(client, broadcast, round)
                    self.traffic.down(client.id, broadcast)
                    yield Turn("train_on_public", client, round, broadcast, last_round=round)

        metrics = {update.client: update.metrics for update in self.updates}
        for _, update in self._stopwatch.each("fit", self.run(turns())):
            trained = metrics[update.client]
            metrics[update.client] = trained | update.metrics | {"flops": trained["flops"] + update.metrics["flops"]}
        self.updates = [replace(update, metrics=metrics[update.client]) for update in self.updates]

    def sent(self, client: ClientInfo, broadcast: Broadcast, round: int) -> Broadcast:
        """A compressed broadcast, which the :class:`.Worker` expands. The last :data:`KEPT` are reused: one for many clients is
        compressed once.
        """
        if client.id == SERVER or self._compression.down == "none":  # the server's own turns are not sent
            return broadcast
        if (found := self._compressed.get(id(broadcast.state))) is None:
            buffers = self._buffers
            with seeded(self._seed, COMPRESSION, round, SERVER):
                sent = self._compression.compress_broadcast(broadcast.state, buffers)
            self._compressed[id(broadcast.state)] = found = broadcast.state, sent
            while len(self._compressed) > KEPT:
                del self._compressed[next(iter(self._compressed))]
        return replace(broadcast, state=found[1])

    def _receive(self, turn: Turn, update: ClientUpdate) -> ClientUpdate:
        """An update that the :class:`.Worker` compressed, decompressed and checked; counts what was sent."""
        expanded, sent = update, turn.broadcast
        if turn.client.id != SERVER and self._compression != NONE:
            if self._arrived[0] is not sent.state:
                self._arrived = sent.state, self._compression.expand_broadcast(sent.state)
            sent = replace(sent, state=self._arrived[1])
            state = self._compression.expand_update(update.state, sent.state)
            if (exact := self._exact.pop(turn.client.id, None)) is not None:
                names = state.keys() - self._computed_anew - self._buffers
                state = self._compression.unrounded(state, sent.state, exact, names)
            expanded = replace(update, state=state)
        self._server.check(expanded, sent, turn.client)
        self.traffic.up(update)
        return expanded
