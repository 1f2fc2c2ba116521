"""Evaluation of the clients' models and of the server's models after a round."""

import copy
from collections.abc import Collection, Iterator, Sequence

from lightning_fed.core.aggregation import WeightedMean, check_payload
from lightning_fed.core.messages import STAGES, Broadcast, ClientUpdate, Turn
from lightning_fed.core.server import Server
from lightning_fed.data.client_info import SERVER, ClientInfo
from lightning_fed.engines.worker import Worker
from lightning_fed.errors import FederationError
from lightning_fed.federation.meters import private_shares, spread_all
from lightning_fed.federation.turns import RoundTurns
from lightning_fed.seeding import UNSEEN, seeded
from lightning_fed.storage.manifest import Metrics
from lightning_fed.tensors import State


class Evaluation:
    """Evaluates the models of a run, and recomputes the statistics that they need.

    Args:
        server: the run's server.
        clients: clients whose models are evaluated; statistics are computed on the data of those that take part.
        unseen: ids of clients that never take part in training, which are evaluated separately.
        local: a worker in this process, with the method, the clients' data and the run's seed.
        turns: runs turns.

    Attributes:
        results: each client's last evaluation metrics.
    """

    def __init__(
        self, server: Server, clients: Sequence[ClientInfo], unseen: Collection[int], local: Worker, turns: RoundTurns
    ) -> None:
        self.results: dict[int, Metrics] = {}
        self._model, self._data, self._seed = local.template, local.data, local.seed
        self._server, self._local, self._turns = server, local, turns
        self._clients = [client for client in clients if client.id not in unseen]
        self._unseen = [client for client in clients if client.id in unseen]
        self._eligible_clients = [client for client in clients if client.takes_part]
        self._gathered: int | None = None  # the round of the current statistics

    def evaluate(self, round: int, final: bool) -> Metrics:
        """Evaluate each client's model, with the new broadcast, on its own data, and the server's models on the pooled data.

        Args:
            round: the round that was completed.
            final: whether it was the last round, in which clients that are fine-tuned ``last`` are evaluated twice.

        Returns:
            The round's columns.
        """
        self.refresh_statistics(round)
        models = self._server.global_models() if self._data.at_hand else {}
        everybody = self._data.pooled().info if models else None
        always = self._model.fine_tuning.when == "always"

        def turns() -> Iterator[Turn]:
            for model in models.values():  # first, because they take longest
                assert everybody is not None
                yield Turn("evaluate", everybody, round, model)
            for fine_tune in [always] if always or not final else [False, True]:
                for client in self._clients:
                    broadcast, last = self._server.evaluation_broadcast(client), self._turns.last_rounds.get(client.id, 0)
                    yield Turn("evaluate", client, round, broadcast, last_round=last, fine_tune=fine_tune)

        self.results = {}
        tuned: dict[int, Metrics] = {}  # if clients are also evaluated without fine-tuning
        of_server: Metrics = {}
        for turn, update in self._turns.run(turns()):
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
        return row | self._evaluate_unseen(round, row, always or final) if self._unseen else row

    def _evaluate_unseen(self, round: int, row: Metrics, fine_tune: bool) -> Metrics:
        """Evaluate clients that never take part in training: ``unseen/<stage>/…`` for each of :data:`.STAGES`, and the advantage of
        participating clients (``unseen/gap``). Clients without training examples only have the first stage.

        Args:
            round: the round that was completed.
            row: its columns for participating clients.
            fine_tune: whether clients are fine-tuned, if the method fine-tunes.
        """
        server = copy.copy(self._server)  # so that their round leaves no trace
        with seeded(self._seed, UNSEEN, round):
            server.on_round_start(round, self._unseen)

        def turns() -> Iterator[Turn]:
            for client in self._unseen:
                measured = server.evaluation_broadcast(client)
                if self._data.at_hand and client.num_train:
                    sent = self._turns.sent(client, server.broadcast(client), round)
                    yield Turn("personalize", client, round, sent, evaluated_with=measured, fine_tune=fine_tune)
                else:
                    yield Turn("evaluate", client, round, measured, fine_tune=False)

        flops = 0.0
        for turn, update in self._turns.run(turns()):
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
        like = "fine_tuned" if fine_tune and self._model.fine_tuning.when == "last" else "after"
        seen, new = (f"{stage}/test_{self._model.monitor}/mean" for stage in (like, f"unseen/{STAGES[1]}"))
        if seen in row and new in found:
            found["unseen/gap"] = row[seen] - found[new]
        return found | ({"unseen/flops": flops} if flops else {})

    def refresh_statistics(self, round: int) -> None:
        """Recompute the statistics of the models once after a round, for methods that have statistics."""
        if self._model.has_statistics and self._gathered != round:
            self._server.refresh_statistics(lambda model: self._statistics_of(model, round))
            self._gathered = round

    def _statistics_of(self, model: Broadcast, round: int) -> State:
        """Mean of the participants' statistics of a model, with equal weight for each batch."""
        turns = (
            Turn("compute_statistics", client, round, model, last_round=self._turns.last_rounds.get(client.id, 0))
            for client in self._eligible_clients
        )
        expected = self._local.load(self._eligible_clients[0], model, None).statistics()

        def checked(turn: Turn, update: ClientUpdate) -> ClientUpdate:
            check_payload(update, expected)
            return update

        mean = WeightedMean()
        for _, update in self._turns.run(turns, checked):
            mean.add(update.state, update.metrics["batches"])
        if not (statistics := mean.result()):
            raise FederationError(f"No client computed statistics in round {round}: without them no model can be evaluated.")
        return statistics
