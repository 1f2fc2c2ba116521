"""How good the models are after a round: every client's, and the server's."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from lightning_fed.core.aggregation import WeightedMean, check_form, check_payload
from lightning_fed.core.messages import STAGES, Broadcast, ClientUpdate, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.server import Server
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.engines.worker import Worker
from lightning_fed.errors import FederationError
from lightning_fed.federation.meters import private_shares, spread_all
from lightning_fed.seeding import UNSEEN, seeded
from lightning_fed.storage.manifest import Metrics
from lightning_fed.tensors import State

CarryOut = Callable[[Iterable[Turn]], Iterator[tuple[Turn, ClientUpdate]]]
"""Turns and what comes of them, without those that were lost."""


class Evaluation:
    """Measures the models of one run, and gathers first what measuring takes.

    Args:
        model: the method.
        server: what has the models.
        data: the clients' data.
        clients: whose models are measured; statistics are of the data of those that take part.
        unseen: ids of those that are never trained with, who are measured apart.
        local: a worker in this process.
        carry_out: has turns carried out.
        seed: the run's.

    Attributes:
        results: the last measured metrics by client.
    """

    def __init__(
        self,
        model: FederatedModule,
        server: Server,
        data: FederatedDataModule,
        clients: Sequence[ClientInfo],
        unseen: Collection[int],
        local: Worker,
        carry_out: CarryOut,
        seed: int,
    ) -> None:
        self.results: dict[int, Metrics] = {}
        self._model, self._server, self._data = model, server, data
        self._clients = [client for client in clients if client.id not in unseen]
        self._unseen = [client for client in clients if client.id in unseen]
        self._eligible_clients = [client for client in clients if client.takes_part]
        self._local, self._carry_out, self._seed = local, carry_out, seed
        self._gathered: int | None = None  # the round of which the statistics are

    def measure(self, round_number: int, last_rounds: Mapping[int, int], final: bool) -> Metrics:
        """Every client's model with the new broadcast loaded, on the client's own data; the server's models on everybody's.

        Args:
            round_number: the round that has been played.
            last_rounds: of which round a client's private state is, by id; 0 for whom it does not name.
            final: whether it was the last one, in which clients that are fine-tuned ``last`` are measured a second time.

        Returns:
            The round's columns.
        """
        self.refresh_statistics(round_number, last_rounds)
        models = self._server.global_models() if self._data.at_hand else {}
        everybody = self._data.pooled().info if models else None
        always = self._model.fine_tuning.when == "always"

        def turns() -> Iterator[Turn]:
            for model in models.values():  # which take longest, and so come first
                assert everybody is not None
                yield Turn("evaluate", everybody, round_number, model)
            for fine_tune in [always] if always or not final else [False, True]:
                for client in self._clients:
                    broadcast = self._server.evaluation_broadcast(client)
                    yield Turn(
                        "evaluate", client, round_number, broadcast, last_round=last_rounds.get(client.id, 0), fine_tune=fine_tune
                    )

        self.results = {}
        tuned: dict[int, Metrics] = {}  # where clients are measured as they are, too
        of_server: Metrics = {}
        for turn, update in self._carry_out(turns()):
            check_form(update)
            if update.client == SERVER:
                name = next(name for name, model in models.items() if model is turn.broadcast)
                of_data = {column: value for column, value in update.metrics.items() if column.startswith(("val/", "test/"))}
                of_server |= {f"{name}/{column.replace('/', '_')}": value for column, value in of_data.items()}
            else:
                (tuned if turn.fine_tune and not always else self.results)[update.client] = update.metrics
        spent = [result["fine_tune/flops"] for result in (*self.results.values(), *tuned.values()) if "fine_tune/flops" in result]
        costs = {"fine_tune/flops": sum(spent)} if spent else {}
        of_clients = spread_all("after", self.results.values()) | spread_all("fine_tuned", tuned.values())
        row = of_clients | private_shares(self.results.values()) | of_server | costs
        return row | self._measure_unseen(round_number, row) if self._unseen else row

    def _measure_unseen(self, round_number: int, row: Metrics) -> Metrics:
        """What clients get that are never trained with: ``unseen/<stage>/…`` of each of :data:`.STAGES`, and how much more those
        have that are (``unseen/gap``). Who has no training examples has the first stage alone.
        """
        server = copy.copy(self._server)  # on which a round of theirs leaves no trace
        with seeded(self._seed, UNSEEN, round_number):
            server.on_round_start(round_number, self._unseen)

        def turns() -> Iterator[Turn]:
            for client in self._unseen:
                measured = server.evaluation_broadcast(client)
                if self._data.at_hand and client.num_train:
                    yield Turn("personalize", client, round_number, server.broadcast(client), measured_with=measured)
                else:
                    yield Turn("evaluate", client, round_number, measured, fine_tune=False)

        flops = 0.0
        for turn, update in self._carry_out(turns()):
            check_form(update)
            stages = "" if turn.verb == "personalize" else f"{STAGES[0]}/"
            flops += update.metrics.get("flops", 0.0)
            self.results[update.client] = {f"{stages}{name}": value for name, value in update.metrics.items()}
        found: Metrics = {}
        for stage in STAGES:
            of_stage = [
                {name.removeprefix(f"{stage}/"): value for name, value in self.results[client.id].items() if name.startswith(stage)}
                for client in self._unseen
                if client.id in self.results
            ]
            found |= spread_all(f"unseen/{stage}", of_stage)
        seen, new = (f"{stage}/test_{self._model.monitor}/mean" for stage in ("after", f"unseen/{STAGES[1]}"))
        if seen in row and new in found:
            found["unseen/gap"] = row[seen] - found[new]
        return found | ({"unseen/flops": flops} if flops else {})

    def refresh_statistics(self, round_number: int, last_rounds: Mapping[int, int]) -> None:
        """Statistics of the models as they are after a round, once, where the method's models have any."""
        if self._model.has_statistics and self._gathered != round_number:
            self._server.refresh_statistics(lambda model: self._statistics_of(model, round_number, last_rounds))
            self._gathered = round_number

    def _statistics_of(self, model: Broadcast, round_number: int, last_rounds: Mapping[int, int]) -> State:
        """Mean of all participants' statistics of a model, each batch counting the same."""
        turns = (
            Turn("compute_statistics", client, round_number, model, last_round=last_rounds.get(client.id, 0))
            for client in self._eligible_clients
        )
        expected = self._local.load(self._eligible_clients[0], model, None).statistics()
        mean = WeightedMean()
        for _, update in self._carry_out(turns):
            check_form(update, "batches")
            check_payload(update, expected)
            mean.add(update.state, update.metrics["batches"])
        if not (statistics := mean.result()):
            raise FederationError(f"Nobody gathered statistics in round {round_number}: without them no model can be measured.")
        return statistics
