"""From which size on a training step gains from a second torch thread; the default number of threads of a run follows from this.

    python bench/threads.py

Each network trains on batches of random examples, alternately one step with one thread and one with as many as there are cores, so
that a drift of the machine's speed cancels. A row has the number of trained parameters times the examples of a batch, and the
median of the paired ratios: above 1, more threads are faster.
"""

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_fed.models import CNN1, MLP, LeNet5, ResNet18

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 64-64": (lambda: MLP(10, 64, [64]), (64,)),
    "MLP 784-200": (lambda: MLP(10, 784, [200]), (784,)),
    "MLP 784-512-256": (lambda: MLP(10, 784, [512, 256]), (784,)),
    "MLP 784-2048-2048": (lambda: MLP(10, 784, [2048, 2048]), (784,)),
    "LeNet5": (lambda: LeNet5(10), (3, 32, 32)),
    "CNN1": (lambda: CNN1(10), (3, 32, 32)),
    "ResNet18": (lambda: ResNet18(10), (3, 32, 32)),
}
STEPS, WARMUP = 15, 3


def ratio(network: nn.Module, shape: tuple[int, ...], batch: int) -> float:
    """Seconds of a step with one thread by those with all."""
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    ratios = []
    for step in range(WARMUP + STEPS):
        seconds = {}
        for threads in (1, CORES) if step % 2 else (CORES, 1):
            torch.set_num_threads(threads)
            start = perf_counter()
            optimizer.zero_grad()
            cross_entropy(network(x), y).backward()
            optimizer.step()
            seconds[threads] = perf_counter() - start
        if step >= WARMUP:
            ratios.append(seconds[1] / seconds[CORES])
    return statistics.median(ratios)


if __name__ == "__main__":
    CORES = torch.get_num_threads()
    rows = []
    for name, (make, shape) in CASES.items():
        for batch in (10, 64):
            network = make()
            size = sum(p.numel() for p in network.parameters()) * batch
            rows.append((size, f"{name}, batches of {batch}", ratio(network, shape, batch)))
    for size, name, gain in sorted(rows):
        print(f"{size:>14,}  {gain:5.2f}  {name}")
