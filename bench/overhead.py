"""How much a federation costs over a bare PyTorch loop that trains on the same batches.

    python bench/overhead.py

FedAvg, CNN-1, 400 training images per client, batch 64, one local epoch, on the CPU. The bare loop gathers batches of the same
sizes by tensor indexing, scales them, steps plain SGD and averages the weights. Neither side measures accuracy or writes
checkpoints. After each federated round the bare loop plays one too, in the same process, so that a drift of the machine's speed
cancels: the ratio of each pair is what counts.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter

import lightning as L
import torch
from torch.nn.functional import cross_entropy

from lightning_fed import Federation
from lightning_fed.aggregation import WeightedMean, check_update
from lightning_fed.callbacks import FederationCallback
from lightning_fed.data import IID, FederatedDataModule, InMemory
from lightning_fed.engines.worker import QUIET
from lightning_fed.exchange import ClientUpdate
from lightning_fed.methods import FedAvg
from lightning_fed.models import CNN1
from lightning_fed.quiet import plugins_searched_once, quiet_lightning

CLIENTS, SAMPLES, BATCH = 10, 400, 64


class PlayBareRound(FederationCallback):
    """Times each federated round and, after it, a bare one on the same data."""

    def __init__(self, data: FederatedDataModule) -> None:
        self.images = torch.randint(0, 256, (CLIENTS * SAMPLES, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.arange(CLIENTS * SAMPLES) % 10
        self.model = CNN1()
        self.pairs: list[tuple[float, float]] = []

    def on_fit_start(self, federation: Federation) -> None:
        """Start the clock."""
        self.start = perf_counter()

    def on_round_end(self, federation: Federation) -> None:
        """Stop the clock, play the bare round, start the clock."""
        federated = perf_counter() - self.start
        start = perf_counter()
        self.bare_round()
        self.pairs.append((federated, perf_counter() - start))
        self.start = perf_counter()

    def bare_round(self) -> None:
        """One round of federated averaging as one would write it by hand."""
        model, global_state = self.model, {name: t.clone() for name, t in self.model.state_dict().items()}
        mean = {name: torch.zeros_like(t) for name, t in global_state.items()}
        for client in range(CLIENTS):
            model.load_state_dict(global_state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            order = client * SAMPLES + torch.randperm(SAMPLES)
            for batch in order.split(BATCH):
                loss = cross_entropy(model(self.images[batch].float().div_(255)), self.labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                mean[name].add_(tensor, alpha=1 / CLIENTS)
        model.load_state_dict(mean)


def make_data() -> FederatedDataModule:
    """Random images: the time of a step does not depend on what is in them."""
    total = CLIENTS * SAMPLES * 10 // 8
    images = torch.randint(0, 256, (total, 3, 32, 32), dtype=torch.uint8)
    return InMemory(images, torch.arange(total) % 10, num_classes=10, num_clients=CLIENTS, partition=IID(), batch_size=BATCH)


def milliseconds(action: Callable[[], object]) -> float:
    """Median time of nine calls, after one to warm up."""
    times = []
    for _ in range(10):
        start = perf_counter()
        action()
        times.append(1000 * (perf_counter() - start))
    return statistics.median(times[1:])


def parts_of_a_turn(data: FederatedDataModule, new_trainer: Callable[..., L.Trainer]) -> dict[str, float]:
    """What a turn does besides training, in milliseconds."""
    module = FedAvg(CNN1).for_client(data.clients[0])
    state, update = module.shared_state(), ClientUpdate(0, SAMPLES, module.shared_state())
    mean = WeightedMean()
    mean.add(state, 1)
    no_steps = {**QUIET, "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}

    def one_step() -> None:
        images, labels = next(iter(data.client(0).train_dataloader()))
        module.zero_grad()
        cross_entropy(module(images / 255), labels).backward()
        torch.optim.SGD(module.parameters(), lr=0.01).step()

    fit = milliseconds(lambda: new_trainer(**no_steps).fit(module, datamodule=data.client(0)))
    return {
        "load the broadcast": milliseconds(lambda: module.load_shared_state(state)),
        "Trainer and fit, less one step": fit - milliseconds(one_step),
        "harvest": milliseconds(module.shared_state),
        "check and merge the update": milliseconds(lambda: (check_update(update, state), mean.add(state, 1))),
    }


def main() -> None:
    """Print paired times, their ratio, and where the federation's extra time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = make_data()
    new_trainer = partial(L.Trainer, accelerator="cpu")
    clock = PlayBareRound(data)
    federation = Federation(
        options.rounds + 2, evaluate_every=0, run_dir=None, progress=False, callbacks=[clock], trainer=new_trainer
    )
    federation.fit(FedAvg(CNN1), data)
    pairs = clock.pairs[1:-1]  # the first round builds the network and counts FLOPs, the last one measures accuracy
    ratios = sorted(federated / bare for federated, bare in pairs)
    federated, bare = (1000 * statistics.median(times) / CLIENTS for times in zip(*pairs, strict=True))
    print(f"torch {torch.__version__}, {options.threads} thread(s), {len(pairs)} pairs of rounds with {CLIENTS} turns each")
    print(f"a turn: federated {federated:.1f} ms, bare loop {bare:.1f} ms (medians)")
    print(f"ratio federated / bare: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}; at most 1.15")
    print("where the rest goes, ms per turn:")
    with quiet_lightning(), plugins_searched_once():
        parts = parts_of_a_turn(data, new_trainer)
    for name, value in parts.items():
        print(f"  {name:32s} {value:6.1f}")
    print(f"  {'per-step overhead and noise':32s} {federated - bare - sum(parts.values()):6.1f}")


if __name__ == "__main__":
    main()
