"""The cost of low rank for FedHM's server, and its savings for the clients.

    python bench/factorize.py

Once per round, the server factorizes the model for all ratios, and recovers and aggregates the updates of ten participants (here
the versions as they were sent), always on the CPU. This is compared with only the training steps of these participants: forward,
backward and SGD on random images, without Lightning, data and measuring, so that the server's share is an upper bound. A step of
each low-rank network is compared with one of the full network.

The server's part and one step of every network alternate in one process, so that a drift of the machine's speed cancels: ratios and
shares are medians of those within a repetition.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import lightning as L
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_fed import models
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Server
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods.fedhm import FedHM

RATIOS, PARTICIPANTS = (1, 1 / 2, 1 / 4, 1 / 8), 10


class Client:
    """A network as a participant trains it, and one batch."""

    def __init__(self, template: FedHM, info: ClientInfo, server: Server, fabric: L.Fabric, batch_size: int) -> None:
        broadcast = server.broadcast(info)
        self.fabric = fabric
        self.module = template.for_client(replace(info, model_size=broadcast.model_size))
        self.module.load_shared_state(broadcast.state)
        self.module.to(fabric.device)
        self.parameters = sum(p.numel() for p in self.module.parameters())
        (self.phase,) = self.module.phases()
        self.optimizer = self.phase.optimizer(self.phase.parameters)
        labels = torch.arange(batch_size) % template.num_classes
        self.batch = torch.rand(batch_size, 3, 32, 32, device=fabric.device), labels.to(fabric.device)
        with FlopCounterMode(display=False) as counter:
            self.step()
        self.flops = counter.get_total_flops()

    def step(self) -> None:
        """One training step, to its end."""
        with self.fabric.autocast():
            loss = self.phase.loss(self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize()


def seconds(action: Callable[[], object]) -> float:
    """How long a call takes."""
    start = perf_counter()
    action()
    return perf_counter() - start


def main() -> None:
    """Print the server's share of a round and a table of the networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="ResNet34", choices=["ResNet8", "ResNet10", "ResNet18", "ResNet34"])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--samples", type=int, default=500, help="training images of a client: CIFAR-100 over 100 clients")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="repetitions")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fabric = L.Fabric(accelerator=options.device, devices=1, precision=options.precision)

    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
    template = FedHM(getattr(models, options.network), options.classes, RATIOS, decay=1e-4, optimizer=optimizer)
    template.configure_model()
    participants = [ClientInfo(k, options.samples, 0, 0, (1,) * options.classes) for k in range(PARTICIPANTS)]
    server = template.configure_server(participants)
    clients = [Client(template, info, server, fabric, options.batch) for info in participants[: len(RATIOS)]]
    steps_of_a_turn = options.epochs * options.samples / options.batch

    def merge() -> None:
        server.aggregate([ClientUpdate(info.id, info.num_train, server.broadcast(info).state) for info in participants])

    def factorize() -> None:
        for info in participants:
            server.broadcast(info)

    merge()  # so that the first repetition finds a new model to factorize; the networks' first steps have warmed them up
    server_times, step_times = [], []
    for _ in range(options.steps):
        server_times.append((seconds(factorize), seconds(merge)))
        step_times.append([seconds(client.step) for client in clients])
    rounds = [steps_of_a_turn * sum(times[k % len(RATIOS)] for k in range(PARTICIPANTS)) for times in step_times]
    shares = [100 * sum(times) / training for times, training in zip(server_times, rounds, strict=True)]

    device = torch.cuda.get_device_name() if fabric.device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.steps} repetitions, medians")
    print(f"{options.network} with {options.classes} classes, batch {options.batch}, {options.precision} on {device}")
    factorizing, merging = (statistics.median(times) for times in zip(*server_times, strict=True))
    print(f"server: {factorizing:.2f} s to factorize for all ratios, {merging:.2f} s to recover and merge {PARTICIPANTS} updates")
    print(f"round: {statistics.median(rounds):.0f} s of training steps, {options.epochs} epochs of {options.samples} images each")
    print(f"server / round: {statistics.median(shares):.2f} %, from {min(shares):.2f} to {max(shares):.2f}; at most 5 on a CPU")
    print("rank ratio   parameters       of full   GFLOPs/step   of full   s/step   of full (from - to)")
    full = clients[0]
    for which, (ratio, client) in enumerate(zip(RATIOS, clients, strict=True)):
        relative = [times[which] / times[0] for times in step_times]
        print(
            f"{ratio:10g} {client.parameters:12,d} {client.parameters / full.parameters:13.3f} "
            f"{client.flops / 1e9:13.1f} {client.flops / full.flops:9.3f} {statistics.median(t[which] for t in step_times):8.4f} "
            f"{statistics.median(relative):9.3f} ({min(relative):.3f} - {max(relative):.3f})"
        )


if __name__ == "__main__":
    main()
