"""What public code computes instead of a paper, beside the paper's: the same data, the same seeds, one line of difference.

    python bench/differences.py                              # 20 minutes on an idle core; docs/differences.csv
    python bench/differences.py --only FedDyn --rounds 5

scikit-learn's handwritten digits, 10 clients by Dirichlet 0.3, half of whom take part in each of 15 rounds of 2 epochs, an MLP with
two hidden layers, SGD with a rate of 0.1, batches of 16. A deviation is a subclass that has the difference alone, with the same
hyperparameters; it is not the code that it was read in, whose numbers depend on all else, too. Each names a test that it fails.
"""

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fed import FederatedModule, Federation, FederationError
from lightning_fed.core import FineTuning, ServerUpdate
from lightning_fed.data import Digits, DirichletPerClass
from lightning_fed.methods import APFL, MOON, FedALA, FedBABU, FedDyn, FedNova, Floco, PerFedAvg, PFedMe
from lightning_fed.models import MLP
from lightning_fed.nn.proximal import half_squared_distance

RESULTS = Path(__file__).parents[1] / "docs" / "differences.csv"


class LinearTermAlone(FedDyn):
    """Without what holds a client near w."""

    def dynamic_penalty(self) -> Any:
        own = self.learning()
        distance = half_squared_distance(own.values(), self.global_parameters.values())
        return super().dynamic_penalty() - self.alpha * distance


class DistanceNotSquared(FedDyn):
    """Held by a force of the same size at any distance."""

    def dynamic_penalty(self) -> Any:
        own = self.learning()
        distance = half_squared_distance(own.values(), self.global_parameters.values())
        return super().dynamic_penalty() + self.alpha * ((2 * distance + 1e-12).sqrt() / 2 - distance)


class WithoutComplement(FedNova):
    """Nothing of w is left where weights add up to less or more than 1."""

    def configure_server(self, clients: Any) -> Any:
        server = super().configure_server(clients)
        ours = server.combine

        def theirs(updates: Any, state: Any) -> Any:
            nothing = {name: torch.zeros_like(t) if t.is_floating_point() else t for name, t in state.items()}
            return ours(updates, nothing)

        server.combine = theirs
        return server


class Stays(ServerUpdate):
    """The server's model is never another one."""

    def __call__(self, state: Any, combined: Any, clients: int) -> Any:
        return state


class GlobalModelStays(PFedMe):
    """The server moves by 0."""

    def new_server(self, clients: Any) -> Any:
        server = self.configure_server(clients)
        server.update = Stays()
        return server


class WithoutAnchor(PFedMe):
    """Plain gradient steps, of which the last one is sent."""

    def envelope_loss(self, batch: Any) -> Any:
        self.lam = 0.0  # so that w has no gradient
        loss = super().envelope_loss(batch)
        self._copy(self.learning_parameters(self.backbone), self.learning_parameters(self.personal))
        return loss


class OwnGradient(APFL):
    """The personal network learns outside the mixture, and is replaced by it."""

    def forward(self, x: Any) -> Any:
        if self._outputs is None and self.training:
            return self.personal(x)
        return super().forward(x)

    def after_training(self, reviewed: Any) -> None:
        self.personal.load_state_dict({n: t.detach().clone() for n, t in self.mixture(self.alpha).items()}, strict=False)


class AdaptsOnTestData(PerFedAvg):
    """Adapts to a batch of what it is tested on."""

    def _adapt(self) -> None:
        data = self.trainer.datamodule
        train, data.train_dataloader = data.train_dataloader, data.test_dataloader
        try:
            super()._adapt()
        finally:
            data.train_dataloader = train


class LastModelOfAnybody(FedALA):
    """A client's last model is that of whoever was played before it."""

    def load_private_state(self, state: Any) -> None:
        if not self.turns:
            super().load_private_state(state)

    def load_initial(self, shared: Any) -> None:
        if not self.turns:
            super().load_initial(shared)


class TrainsAtTheCenter(Floco):
    """All corners learn alike until there are points."""

    def draw(self) -> torch.Tensor:
        return super().draw() if self.has_point else self.mixture.point.clone()


@dataclass(frozen=True)
class Deviation:
    """A deviation.

    Args:
        ours: the method, and its name in tables.
        code: where it was read.
        what: it does.
        theirs: it.
        test: which tells them apart.
        options: of both.
    """

    ours: type[FederatedModule]
    code: str
    what: str
    theirs: Callable[..., FederatedModule]
    test: str
    options: dict[str, Any]


DEVIATIONS = [
    Deviation(
        APFL,
        "TsingZ0/PFLlib@d832e76",
        "$v_k$ follows its own gradient, and is overwritten by the mixture",
        OwnGradient,
        "test_apfl.py::test_gradients_are_those_of_the_formulas",
        {},
    ),
    Deviation(
        PFedMe,
        "TsingZ0/PFLlib@d832e76",
        "the global model stays ($\\beta$ 0)",
        GlobalModelStays,
        "test_pfedme.py::test_the_server_moves_by_beta",
        {},
    ),
    Deviation(
        PFedMe,
        "makgyver/fluke@a0bd26a",
        "no anchor, and $w$ is overwritten by $\\theta$",
        WithoutAnchor,
        "test_pfedme.py::test_rounds_and_personal_models_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        PerFedAvg,
        "CharlieDinh/pFedMe@caf24b1",
        "adapts to test data, with their labels",
        AdaptsOnTestData,
        "test_per_fedavg.py::test_what_is_monitored_is_adapted_on_training_data_and_leaves_nothing_behind",
        {"steps": 20},
    ),
    Deviation(
        FedBABU,
        "TsingZ0/PFLlib@d832e76",
        "reports what is there before fine-tuning",
        partial(FedBABU, fine_tuning=FineTuning(epochs=0)),
        "test_fedbabu.py::test_rounds_and_fine_tuning_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        FedALA,
        "KarhouTam/FL-bench@06e658b",
        "a client is mixed with whoever trained before it",
        LastModelOfAnybody,
        "test_fedala.py::test_rounds_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        MOON,
        "TsingZ0/PFLlib@d832e76",
        "$\\mu$ is 0",
        partial(MOON, mu=0.0),
        "test_moon.py::test_the_gradient_is_that_of_the_papers_loss",
        {},
    ),
    Deviation(
        FedDyn,
        "KarhouTam/FL-bench@06e658b",
        "the linear term alone",
        LinearTermAlone,
        "test_feddyn.py::test_it_finds_the_optimum_of_the_mean_and_a_known_mistake_does_not",
        {},
    ),
    Deviation(
        FedDyn,
        "TsingZ0/PFLlib@d832e76",
        "the distance is not squared",
        DistanceNotSquared,
        "test_feddyn.py::test_the_gradient_is_the_losss_minus_g_plus_alpha_times_the_drift",
        {},
    ),
    Deviation(
        FedNova,
        "makgyver/fluke@a0bd26a",
        "weights of models do not add up to 1",
        WithoutComplement,
        "test_fednova.py::test_the_step_is_the_papers_and_its_coefficients_add_up_to_one",
        {},
    ),
    Deviation(
        Floco,
        "dennis-grinwald/floco@34d8fd0",
        "trains at the center until clients have places",
        TrainsAtTheCenter,
        "test_floco.py::test_a_corner_has_its_share_of_the_gradient_at_a_point_of_the_simplex",
        {"corners": 5, "tau": 5},
    ),
]


def accuracy(make: Callable[..., FederatedModule], seed: int, rounds: int, options: dict[str, Any]) -> float:
    """The monitored accuracy after the last round, the mean over clients; 0 where the training diverged."""
    data = Digits(8, num_clients=10, partition=DirichletPerClass(0.3), val_share=0.1, batch_size=16)
    length = {} if "steps" in options else {"epochs": 2}
    model = make(backbone=partial(MLP, inputs=3 * 8 * 8), optimizer=partial(torch.optim.SGD, lr=0.1), **length, **options)
    federation = Federation(rounds, 0.5, seed=seed, evaluate_every=0, run_dir=None, logger=False, progress=False)
    try:
        federation.fit(model, data)
    except FederationError as error:
        if "diverged" not in str(error):
            raise
        return 0.0
    return federation.run.history[-1][f"after/test_{federation.run.metric}/mean"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a method")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    given = parser.parse_args()
    chosen = [deviation for deviation in DEVIATIONS if given.only in (None, deviation.ours.__name__)]
    with given.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "code", "what", "test", "seed", "ours", "theirs"])
        for deviation in chosen:
            for seed in range(given.seeds):
                pair = [accuracy(make, seed, given.rounds, deviation.options) for make in (deviation.ours, deviation.theirs)]
                name = deviation.ours.__name__
                writer.writerow([name, deviation.code, deviation.what, deviation.test, seed, *(f"{value:.4f}" for value in pair)])
                file.flush()
                print(f"{name:10} {deviation.what:70} {seed} {pair[0]:.3f} {pair[1]:.3f}", flush=True)
