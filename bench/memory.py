"""Peak memory for 10, 100 and 1,000 clients that all take part.

    python bench/memory.py

FedAvg and pFedLoRA (h = 20) on CNN-5, two rounds, each run in a process of its own. FedAvg's clients have no private state: its
peak should not depend on their number. A pFedLoRA client keeps a network of 2.56 MiB: their sum grows with the clients, but the
store holds at most its limit in memory and the rest on disk.
"""

import argparse
import resource
import subprocess
import sys
from functools import partial

STORE_LIMIT_MB = 128
CLIENTS = (10, 100, 1000)
METHODS = ("FedAvg", "PFedLoRA")


def run(method: str, clients: int) -> None:
    """Train and print the peak memory of this process and what the store holds, in MiB."""
    import lightning as L
    import torch

    from lightning_fed import Federation
    from lightning_fed.data import DirichletPerClient, InMemory
    from lightning_fed.methods import FedAvg, PFedLoRA
    from lightning_fed.models import CNN5

    torch.set_num_threads(1)
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
    )
    data.setup()
    model = FedAvg(CNN5) if method == "FedAvg" else PFedLoRA(CNN5, hidden_dim=20)
    federation = Federation(
        rounds=2,
        evaluate_every=0,
        run_dir=None,
        progress=False,
        store_limit_mb=STORE_LIMIT_MB,
        trainer=partial(L.Trainer, accelerator="cpu"),
    )
    federation.fit(model, data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kibibytes on Linux
    private = sum(t.numel() * 4 for t in federation.client_module(0).private_state().values()) * clients / 2**20
    print(f"{peak:.0f} {private:.0f}")


def main() -> None:
    """Print a table of peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=2, metavar=("METHOD", "CLIENTS"), help="measure one case in this process")
    options = parser.parse_args()
    if options.run:
        run(options.run[0], int(options.run[1]))
        return
    print(f"peak resident memory in MiB; the store may hold {STORE_LIMIT_MB} MiB of private states")
    print(f"{'method':10s} {'clients':>8s} {'peak':>8s} {'over 10':>8s} {'private states, all clients':>28s}")
    for method in METHODS:
        first = 0.0
        for clients in CLIENTS:
            command = [sys.executable, __file__, "--run", method, str(clients)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peak, private = map(float, output.split()[-2:])
            first = first or peak
            print(f"{method:10s} {clients:8d} {peak:8.0f} {peak - first:+8.0f} {private:28.0f}")


if __name__ == "__main__":
    main()
