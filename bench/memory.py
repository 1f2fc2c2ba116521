"""Peak memory for few and for many clients that all take part.

    python bench/memory.py

Each run has two rounds, in a process of its own.

FedAvg and pFedLoRA (h = 20) on CNN-5, with 10, 100 and 1,000 clients. FedAvg's clients have no private state: its peak should not
depend on their number. A pFedLoRA client keeps a network of 2.56 MiB: their sum grows with the clients, but the store holds at most
its limit in memory and the rest on disk. FedAMP's server also keeps such a network for each client, in a store of the same
limit, and mixes all of them a block at a time.

FedDF, with 10 and 200 clients that are all teachers: their networks are in a store of the same limit, they predict the public
data one at a time, and all predictions are one table. The sum of their networks grows with their number, the peak by little more
than the limit.

PF2LoRA (r = 8 and private adapters of rank 16) on one transformer, with 2 and 200 clients and a limit that is never reached. The
network is in memory once. Each client adds its private adapter and its optimizer state, with overhead: if this is more than 1.3
times their bytes, the program fails.
"""

import argparse
import resource
import subprocess
import sys
from functools import partial
from typing import Any

STORE_LIMIT_MB = 128
CLIENTS = (10, 100, 1000)
METHODS = ("FedAvg", "PFedLoRA", "FedAMP")
TEACHERS = (10, 200)
ADAPTED_CLIENTS = (2, 200)
NUMBERS = {"FedDF": TEACHERS, "PF2LoRA": ADAPTED_CLIENTS}
"""How many clients there are where the command line does not say it."""
ALLOWED = 1.3
"""Bytes of memory per byte of private state."""


def images_for(method: str, clients: int) -> tuple[Any, Any]:
    """A model on CNN-5 and random images."""
    import torch

    from lightning_fed.data import DirichletPerClient, InMemory
    from lightning_fed.methods import FedAMP, FedAvg, FedDF, PFedLoRA
    from lightning_fed.models import CNN5

    images, labels = torch.randint(0, 256, (6000, 3, 32, 32), dtype=torch.uint8), torch.arange(6000) % 10
    data = InMemory(
        images[:4000],
        labels[:4000],
        num_classes=10,
        test_images=images[4000:],
        test_labels=labels[4000:],
        num_clients=clients,
        partition=DirichletPerClient(alpha=1.0, samples=20, test_samples=10),
        split="official",
        public=InMemory(images[4000:4500], labels[4000:4500], num_classes=10) if method == "FedDF" else None,
    )
    models: dict[str, Any] = {"FedAvg": FedAvg, "PFedLoRA": partial(PFedLoRA, hidden_dim=20), "FedAMP": FedAMP}
    models["FedDF"] = partial(FedDF, distill_steps=4)
    return models[method](CNN5), data


def texts_for(clients: int) -> tuple[Any, Any]:
    """PF2LoRA on a transformer of 27 MiB, and ten random texts for each client."""
    import torch

    from lightning_fed.data import IID, InMemory
    from lightning_fed.methods import PF2LoRA
    from lightning_fed.models import TransformerClassifier

    network = {"model_type": "roberta", "vocab_size": 1000, "hidden_size": 384, "num_hidden_layers": 4}
    network |= {"num_attention_heads": 6, "intermediate_size": 1536, "max_position_embeddings": 64}
    ids = torch.randint(10, 1000, (10 * clients, 16))
    data = InMemory(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        torch.arange(len(ids)) % 2,
        num_classes=2,
        num_clients=clients,
        partition=IID(),
        batch_size=4,
    )
    options: dict[str, Any] = {"r": 8, "client_r": 16, "steps": 1}
    return PF2LoRA(partial(TransformerClassifier, config=network), **options), data


def run(method: str, clients: int) -> None:
    """Train and print the peak memory of this process and the size of all clients' states, private and kept, or of all teachers'
    networks, in MiB.
    """
    import lightning as L
    import torch

    from lightning_fed import Federation
    from lightning_fed.tensors import count_bytes

    torch.set_num_threads(1)
    model, data = texts_for(clients) if method == "PF2LoRA" else images_for(method, clients)
    data.setup()
    federation = Federation(
        rounds=2,
        evaluate_every=0,
        run_dir=None,
        progress=False,
        store_limit_mb=1e5 if method == "PF2LoRA" else STORE_LIMIT_MB,
        trainer=partial(L.Trainer, accelerator="cpu"),
    )
    federation.fit(model, data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kibibytes on Linux
    private = count_bytes(federation.client_module(0).private_state()) * clients / 2**20
    kept = sum(count_bytes(federation.run.client_state.get(client)) for client in federation.run.client_state) / 2**20
    teachers = count_bytes(federation.run.server.state) * clients / 2**20 if method == "FedDF" else 0.0
    print(f"{peak:.1f} {private + kept + teachers:.1f}")


def measure(method: str, clients: int) -> tuple[float, float]:
    """Peak memory and clients' states of a run, in MiB."""
    command = [sys.executable, __file__, "--run", method, str(clients)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, private = map(float, output.split()[-2:])
    return peak, private


def main() -> None:
    """Print a table of peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=2, metavar=("METHOD", "CLIENTS"), help="measure one case in this process")
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS, help="how many, but for FedDF and PF2LoRA")
    every = [*METHODS, *NUMBERS]
    parser.add_argument("--methods", nargs="+", default=every, choices=every, help="which")
    options = parser.parse_args()
    if options.run:
        run(options.run[0], int(options.run[1]))
        return
    print(f"peak resident memory in MiB; but for PF2LoRA a store may hold {STORE_LIMIT_MB} MiB")
    print(f"{'method':10s} {'clients':>8s} {'peak':>8s} {'over fewest':>12s} {'states of all, or teachers':>28s}")
    for method in options.methods:
        counts = NUMBERS.get(method, options.clients)
        measured = [measure(method, clients) for clients in counts]
        first = measured[0][0]
        for clients, (peak, private) in zip(counts, measured, strict=True):
            print(f"{method:10s} {clients:8d} {peak:8.0f} {peak - first:+12.0f} {private:28.0f}", flush=True)
        if method == "PF2LoRA":
            (fewest, few), (most, many) = measured
            ratio = (most - fewest) / (many - few)
            print(f"{'':10s} {ratio:.2f} bytes of memory per byte of private state; allowed: {ALLOWED}")
            if ratio > ALLOWED:
                sys.exit(1)


if __name__ == "__main__":
    main()
