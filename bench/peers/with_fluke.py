"""fluke's part: its FedAVG, which trains one client after the other."""

from typing import Any

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver
from work import CNN1, Contestant


class Line(FederationObserver):
    """Waits for its turn before each round, and says when one is over."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.model: Any = None

    def start_round(self, round: int, global_model: Any) -> None:
        """Before a round."""
        self.model = global_model
        self.contestant.begin()

    def end_round(self, round: int) -> None:
        """After it."""
        self.contestant.end(self.model.state_dict())


def main() -> None:
    """Play."""
    contestant = Contestant()
    settings = contestant.settings
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_evaluator(ClassificationEval(eval_every=10**6, n_classes=10))
    environment.set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    images, labels = contestant.images.float() / 255, contestant.labels
    data = DataContainer(images, labels, images[:10], labels[:10], num_classes=10)
    network = CNN1(settings)
    network.load_state_dict(contestant.initial)
    client = DDict(
        batch_size=settings.batch,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=settings.lr),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1),
    )
    parameters = DDict(client=client, server=DDict(weighted=True), model=network)
    federation = FedAVG(settings.clients, DataSplitter(data, "iid"), parameters)
    line = Line(contestant)
    federation.set_callbacks(line)
    federation.run(contestant.rounds + 1, settings.cohort / settings.clients)


if __name__ == "__main__":
    main()
