"""The cost of a FedDecomp turn: compared with bare loops of its two phases, and with sums of weights instead of sums of layers.

    python bench/feddecomp_turn.py

First: ResNet-8, 500 training images, batch 100, two epochs on the low-rank part and three on the full-rank part, on the CPU. The
bare loops train the same decomposed network on batches of the same sizes, with one SGD per phase and the other part frozen, and
nothing else. Turn and loops alternate in one process; the result is the ratio of each pair.

Second: FLOPs and seconds of a turn with CNN-5 and ResNet-8 in small and large batches, where σ + τ is always composed while τ
is trained ("composed"), and with the package's choice of the cheaper computation per layer ("chosen"), compared with one epoch of
the plain network.
"""

import argparse
import statistics
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from unittest.mock import patch

import lightning as L
import torch
from torch.nn.functional import cross_entropy

from lightning_fed.core.messages import Broadcast, Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import IID, InMemory
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.worker import Worker
from lightning_fed.methods.fedavg import FedAvg
from lightning_fed.methods.feddecomp import FedDecomp
from lightning_fed.models import CNN5, BackboneFactory, ResNet8
from lightning_fed.nn.low_rank import decompose, factors

SAMPLES, BATCH, LORA_EPOCHS, GLOBAL_EPOCHS = 500, 100, 2, 3


def new_data(batch: int) -> InMemory:
    """Random images of one client."""
    total = SAMPLES * 10 // 8
    images, labels = torch.randint(0, 256, (total, 3, 32, 32), dtype=torch.uint8), torch.arange(total) % 10
    return InMemory(images, labels, num_classes=10, num_clients=1, partition=IID(), batch_size=batch)


def bare_turn(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Both phases as one would write them by hand."""
    low_rank = factors(network)
    own = {id(p) for p in low_rank}
    full_rank = [p for p in network.parameters() if id(p) not in own]
    for learning, frozen, epochs in ((low_rank, full_rank, LORA_EPOCHS), (full_rank, low_rank, GLOBAL_EPOCHS)):
        for parameter in learning:
            parameter.requires_grad_(True)
        for parameter in frozen:
            parameter.requires_grad_(False)
        optimizer = torch.optim.SGD(learning, lr=0.01)
        for _ in range(epochs):
            for batch in torch.randperm(SAMPLES).split(BATCH):
                loss = cross_entropy(network(images[batch].float().div_(255)), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def against_bare_loops(pairs: int) -> None:
    """Print the paired ratio."""
    data = new_data(BATCH)
    images, labels = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8), torch.arange(SAMPLES) % 10
    network = ResNet8(10)
    decompose(network, 0.6, 0.6)
    template = FedDecomp(ResNet8, 10, lora_epochs=LORA_EPOCHS, global_epochs=GLOBAL_EPOCHS)
    template.configure_model()
    ratios, seconds = [], []
    worker = Worker(template, data, partial(L.Trainer, accelerator="cpu", devices=1), seed=0)
    private = None
    for number in range(pairs + 1):
        turn = Turn("fit", data.clients[0], number + 1, Broadcast(template.shared_state()))
        start = perf_counter()
        private = worker.run_turn(turn, private).private
        federated = perf_counter() - start
        start = perf_counter()
        bare_turn(network, images, labels)
        bare = perf_counter() - start
        if number:  # the first pair warms up
            ratios.append(federated / bare)
            seconds.append((federated, bare))
    federated, bare = (statistics.median(times) for times in zip(*seconds, strict=True))
    print(f"a turn: FedDecomp {federated:.2f} s, bare loops {bare:.2f} s (medians)")
    print(f"ratio: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}; at most 1.2")


def cost(template: FederatedModule, data: InMemory, composed: bool = False) -> tuple[float, float]:
    """FLOPs and seconds of a turn, the faster of two."""
    template.configure_model()
    worker = Worker(template, data, partial(L.Trainer, accelerator="cpu", devices=1), seed=0)
    seconds = []
    with patch("lightning_fed.nn.low_rank._apart_is_cheaper", return_value=False) if composed else nullcontext():
        for number in (1, 2):
            turn = Turn("fit", data.clients[0], number, Broadcast(template.shared_state()))
            start = perf_counter()
            update = worker.run_turn(turn, None).update
            seconds.append(perf_counter() - start)
    return update.metrics["flops"], min(seconds)


def composed_or_chosen() -> None:
    """Print what a turn takes, and what an epoch of each of its phases does in units of a plain one."""
    cases: list[tuple[str, BackboneFactory, int]] = [("CNN-5", CNN5, 16), ("CNN-5", CNN5, 100), ("ResNet-8", ResNet8, 16)]
    print("network, batch: plain epoch; turn of 2 + 3 epochs, composed; chosen; an epoch of τ in plain epochs, composed; chosen")
    for name, network, batch in cases:
        data = new_data(batch)
        plain, plain_seconds = cost(FedAvg(network, 10, epochs=1), data)
        turns = []
        epochs = []
        for composed in (True, False):
            turns.append(cost(FedDecomp(network, 10, lora_epochs=LORA_EPOCHS, global_epochs=GLOBAL_EPOCHS), data, composed))
            epochs.append(cost(FedDecomp(network, 10, lora_epochs=1, global_epochs=0), data, composed)[0] / plain)
        print(
            f"{name}, {batch}: {plain:.2e} FLOPs, {plain_seconds:.2f} s; {turns[0][0]:.2e}, {turns[0][1]:.2f} s; "
            f"{turns[1][0]:.2e}, {turns[1][1]:.2f} s; {epochs[0]:.2f}; {epochs[1]:.2f}"
        )


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.pairs} pairs")
    with quiet_lightning():
        against_bare_loops(options.pairs)
        composed_or_chosen()


if __name__ == "__main__":
    main()
