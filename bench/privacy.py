"""The cost of privacy of clients: clipping and noise, relative to a round's turns, and ε.

    python bench/privacy.py [--cohort 50] [--turns 3] [--repeats 5]

A turn of CNN-1 (2.6 million values) on 400 images of 32x32 pixels, batches of 64, one epoch, is timed without a federation; then a
server aggregates that many updates of its size, alternately with and without privacy. The difference of the medians is the cost
of clipping and noise. The noise is drawn from the seed and from a key. At most 5 % of a round of 50 turns is accepted.
Seconds are CPU time.
"""

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from time import process_time

import lightning as L
import torch

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Server
from lightning_fed.data import IID, InMemory
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.methods.fedavg import FedAvg
from lightning_fed.models import CNN1
from lightning_fed.privacy.accounting import epsilon
from lightning_fed.privacy.client_dp import GaussianMechanism
from lightning_fed.privacy.noise import Noise, SecretNoise, SeededNoise
from lightning_fed.tensors import State, count_floats


def turn_seconds(module: FedAvg, data: InMemory, repeats: int) -> float:
    """A client's training."""
    seconds = []
    for _ in range(repeats):
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        start = process_time()
        trainer.fit(module, datamodule=data.client(0))
        seconds.append(process_time() - start)
    return statistics.median(seconds)


def merge_seconds(state: State, cohort: int, noise: Noise | None, repeats: int) -> float:
    """A server's merge of a cohort, whose updates are there."""
    seconds = []
    other = {name: tensor + 0.001 * torch.randn_like(tensor) for name, tensor in state.items()}

    def updates() -> Iterator[ClientUpdate]:
        return (ClientUpdate(client, 1, other) for client in range(cohort))

    for _ in range(repeats):
        server = Server(dict(state))
        if noise is not None:
            mechanism = GaussianMechanism(0.5, 1.0, cohort, 1.0, 1e-4, noise)
            mechanism.metrics = dict  # type: ignore[method-assign]  # ε has a line of its own
            server = Server(dict(state), "uniform", combine=mechanism.combine, privacy=mechanism)
        start = process_time()
        server.aggregate(updates())
        seconds.append(process_time() - start)
    return statistics.median(seconds)


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = torch.randint(256, (500, 3, 32, 32), dtype=torch.uint8), torch.arange(500) % 10
    data = InMemory(images, labels, 10, num_clients=1, partition=IID(), batch_size=64)
    module = FedAvg(CNN1, 10, partial(torch.optim.SGD, lr=0.01))
    with quiet_lightning():
        turn = turn_seconds(module, data, given.turns)
    state = {name: tensor.detach().clone() for name, tensor in module.shared_state().items()}
    print(f"a turn of CNN-1, {count_floats(state)} values: {turn:.2f} s; a round of {given.cohort}: {given.cohort * turn:.1f} s")
    plain = merge_seconds(state, given.cohort, None, given.repeats)
    print(f"merging {given.cohort} updates: {plain:.2f} s")
    for kind, noise in (("seeded", SeededNoise(0)), ("secret", SecretNoise(bytes(32), "bench"))):
        more = merge_seconds(state, given.cohort, noise, given.repeats) - plain
        print(f"clipping, and {kind} noise: {more:.2f} s more, {more / (given.cohort * turn):.1%} of the round")
    for rate in (0.05, 1.0):
        start = process_time()
        spent = epsilon(rate, 1.0, 100, 1e-4)
        print(f"ε of 100 rounds, q = {rate:g}, z = 1: {spent:.3f}, {process_time() - start:.2f} s")


if __name__ == "__main__":
    main()
