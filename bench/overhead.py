"""The overhead of a federation over a bare PyTorch loop that trains on the same batches.

    python bench/overhead.py                     # both cases
    python bench/overhead.py --cases cnn --rounds 30

Two cases of FedAvg with ten clients on the CPU, one local epoch:

- ``cnn``: CNN-1, 400 training images of 32x32 pixels per client, batches of 64: steps of 25 ms, where a turn's fixed cost shows;
- ``small``: a perceptron 784-512-256-256-128-10, 600 images per client, batches of 10: 60 steps of a millisecond, as in many
  published settings, where the cost of a step shows.

The bare loop gathers batches of the same sizes by tensor indexing, scales them, steps plain SGD and averages the weights. Neither
side measures accuracy or writes checkpoints. After each federated round the bare loop also runs one, in the same process, so that a
drift of the machine's speed cancels; the result is the ratio of each pair.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed import Federation
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.aggregation import WeightedMean, check_form, check_payload
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.data import IID, FederatedDataModule, InMemory
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.turn_loop import Trainers
from lightning_fed.methods import FedAvg
from lightning_fed.models import CNN1, Backbone

CLIENTS = 10


class Perceptron(Backbone):
    """784-512-256-256-128-10."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers = [layer for sizes in pairwise((784, 512, 256, 256, 128)) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head = nn.Linear(128, num_classes)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        """What the last hidden layer gives."""
        return self.body(x)

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        """Logits."""
        return self.head(representation)


@dataclass(frozen=True)
class Case:
    """A network, how many images of which size each client has, the batch size, and the ratio that is aimed at."""

    network: Callable[..., Backbone]
    samples: int
    size: tuple[int, int, int]
    batch: int
    goal: float

    def data(self) -> FederatedDataModule:
        """Random images: the time of a step does not depend on what is in them."""
        total = CLIENTS * self.samples * 10 // 8
        images, labels = torch.randint(0, 256, (total, *self.size), dtype=torch.uint8), torch.arange(total) % 10
        return InMemory(images, labels, num_classes=10, num_clients=CLIENTS, partition=IID(), batch_size=self.batch)


CASES = {"cnn": Case(CNN1, 400, (3, 32, 32), 64, 1.05), "small": Case(Perceptron, 600, (1, 28, 28), 10, 1.20)}


class BareLoop:
    """Federated averaging as one would write it by hand.

    Args:
        case: what is trained on what.
        clients: how many take part in a round.
    """

    def __init__(self, case: Case, clients: int = CLIENTS) -> None:
        self.case = case
        self.clients = clients
        self.images = torch.randint(0, 256, (clients * case.samples, *case.size), dtype=torch.uint8)
        self.labels = torch.arange(clients * case.samples) % 10
        self.model = case.network()

    def round(self) -> None:
        """Everybody trains for an epoch; the mean becomes the model."""
        model, global_state = self.model, {name: t.clone() for name, t in self.model.state_dict().items()}
        mean = {name: torch.zeros_like(t) for name, t in global_state.items()}
        for client in range(self.clients):
            model.load_state_dict(global_state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            order = client * self.case.samples + torch.randperm(self.case.samples)
            for batch in order.split(self.case.batch):
                loss = cross_entropy(model(self.images[batch].float().div_(255)), self.labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                mean[name].add_(tensor, alpha=1 / self.clients)
        model.load_state_dict(mean)


class PlayBareRound(FederationCallback):
    """Times each federated round and, after it, a bare one on the same data."""

    def __init__(self, case: Case) -> None:
        self.loop = BareLoop(case)
        self.pairs: list[tuple[float, float]] = []
        self.start = 0.0

    def on_fit_start(self, run: RunView) -> None:
        """Start the clock."""
        self.start = perf_counter()

    def on_round_end(self, run: RunView) -> None:
        """Stop the clock, play the bare round, start the clock."""
        federated = perf_counter() - self.start
        start = perf_counter()
        self.loop.round()
        self.pairs.append((federated, perf_counter() - start))
        self.start = perf_counter()


def milliseconds(action: Callable[[], object]) -> float:
    """Median time of nine calls, after one to warm up."""
    times = []
    for _ in range(10):
        start = perf_counter()
        action()
        times.append(1000 * (perf_counter() - start))
    return statistics.median(times[1:])


def parts_of_a_turn(case: Case, data: FederatedDataModule, new_trainer: Callable[..., L.Trainer]) -> dict[str, float]:
    """What a turn does besides training, in milliseconds."""
    module = FedAvg(case.network, 10).for_client(data.clients[0])
    state, update = module.shared_state(), ClientUpdate(0, case.samples, module.shared_state())
    mean = WeightedMean()
    mean.add(state, 1)
    trainers = Trainers(partial(new_trainer, limit_train_batches=1))

    def one_step() -> None:
        images, labels = next(iter(data.client(0).train_dataloader()))
        module.zero_grad()
        cross_entropy(module(images / 255), labels).backward()
        torch.optim.SGD(module.parameters(), lr=0.01).step()

    fit = milliseconds(lambda: trainers.for_fit(1, []).fit(module, datamodule=data.client(0)))
    return {
        "load the broadcast": milliseconds(lambda: module.load_shared_state(state)),
        "Trainer and fit, less one step": fit - milliseconds(one_step),
        "harvest": milliseconds(module.shared_state),
        "check and merge the update": milliseconds(lambda: (check_form(update), check_payload(update, state), mean.add(state, 1))),
    }


def measure(case: Case, rounds: int) -> None:
    """Print paired times, their ratio, and where the federation's extra time goes."""
    data, clock = case.data(), PlayBareRound(case)
    new_trainer = partial(L.Trainer, accelerator="cpu", devices=1)
    federation = Federation(rounds + 2, evaluate_every=0, run_dir=None, progress=False, callbacks=[clock], trainer=new_trainer)
    federation.fit(FedAvg(case.network), data)
    pairs = clock.pairs[1:-1]  # the first round builds the network and counts FLOPs, the last one measures accuracy
    ratios = sorted(federated / bare for federated, bare in pairs)
    federated, bare = (1000 * statistics.median(times) / CLIENTS for times in zip(*pairs, strict=True))
    steps = -(-case.samples // case.batch)
    print(f"  a turn of {steps} steps: federated {federated:.1f} ms, bare loop {bare:.1f} ms (medians of {len(pairs)} pairs)")
    print(f"  ratio: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}; goal {case.goal:.2f}")
    with quiet_lightning():
        parts = parts_of_a_turn(case, data, new_trainer)
    rest = federated - bare - sum(parts.values())
    for name, value in (parts | {f"the rest, {1000 * rest / steps:.0f} us a step": rest}).items():
        print(f"    {name:32s} {value:6.1f} ms")


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), FedAvg, rounds of {CLIENTS} turns")
    for name in options.cases:
        print(name)
        measure(CASES[name], options.rounds)


if __name__ == "__main__":
    main()
