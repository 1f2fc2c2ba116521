"""Flower's part: its simulation with as many actors as there are cores for, its FedAvg, and the training loop of work.py."""

import sys
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import CNN1, Contestant, loaded, train


class Line(FedAvg):
    """FedAvg that waits for its turn before each round, and says when one is over."""

    def __init__(self, contestant: Contestant, **options: Any) -> None:
        super().__init__(**options)
        self.contestant = contestant

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Before a round."""
        self.contestant.begin()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """After it."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            raise RuntimeError("No client came back.")
        self.contestant.end(arrays.to_torch_state_dict())
        return arrays, metrics


app = ClientApp()


@app.train()
def turn(message: Message, context: Context) -> Message:
    """A client's, in an actor."""
    told = message.content["config"]
    settings, images, labels = loaded(str(told["work"]), int(told["cores"]))
    client = int(context.node_config["partition-id"])
    own = slice(client * settings.images, (client + 1) * settings.images)
    model = CNN1(settings)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, images[own].float() / 255, labels[own], settings)
    metrics = MetricRecord({"num-examples": settings.images})
    return Message(content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def main() -> None:
    """Play."""
    contestant = Contestant()
    settings = contestant.settings
    server = ServerApp()

    @server.main()
    def rounds(grid: Grid, context: Context) -> None:
        strategy = Line(
            contestant,
            fraction_train=settings.cohort / settings.clients,
            fraction_evaluate=0.0,
            min_train_nodes=settings.cohort,
            min_available_nodes=settings.clients,
        )
        told = ConfigRecord({"work": str(contestant.options.work / "work.pt"), "cores": contestant.options.cores})
        strategy.start(grid, ArrayRecord(contestant.initial), contestant.rounds + 1, timeout=86400, train_config=told)

    backend = {"client_resources": {"num_cpus": contestant.options.cores}, "init_args": {"num_cpus": settings.workers}}
    run_simulation(server, app, settings.clients, backend_config=backend)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
