"""Whether the cost of a round is independent of the length of the run and of the number of inactive clients.

    python bench/long_run.py                     # 1,000 rounds; 10 to 10,000 clients: some minutes

FedPer (the head stays with the client) on a network of two small layers, ten clients a round, on the CPU, with all files that are
written by default: tables, TensorBoard events, a checkpoint after each round. Each run is in a process of its own. The program
prints medians of the seconds of a round, of its CPU seconds, which do not depend on other work of the machine, and of the bytes
written (``/proc/self/io``; 0 where there is none), and the peak memory at the end:

- one run of 1,000 rounds with 100 clients, at rounds 10, 100 and 1,000;
- runs of 60 rounds with 10, 100, 1,000 and 10,000 clients, of which ten take part.

All clients are measured in every fiftieth round; medians are of the rounds without measurements, whose cost is printed separately.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

COHORT = 10
WINDOW = 20


def run(clients: int, rounds: int) -> None:
    """Play, and print a line of JSON per round: seconds, bytes, peak memory in MiB, whether all were measured, CPU seconds."""
    import lightning as L
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import relu

    from lightning_fed import Federation
    from lightning_fed.callbacks import FederationCallback, RunView
    from lightning_fed.data import DirichletPerClient, InMemory
    from lightning_fed.methods import FedPer
    from lightning_fed.models import Backbone

    torch.set_num_threads(1)

    class Net(Backbone):
        def __init__(self, num_classes: int = 10) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(16, 32), nn.Linear(32, num_classes)

        def encode(self, x: Tensor, cut: str = "features") -> Tensor:
            return relu(self.fc(x.flatten(1)))

        def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
            return self.head(representation)

    class Meter(FederationCallback):
        def __init__(self) -> None:
            self.start, self.cpu, self.written = 0.0, 0.0, 0

        def on_fit_start(self, run: RunView) -> None:
            self.start, self.cpu, self.written = perf_counter(), process_time(), written()

        def on_round_end(self, run: RunView) -> None:
            now, cpu, total = perf_counter(), process_time(), written()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            measured = run.monitored("test") in run.history[-1]
            row = [run.round, now - self.start, total - self.written, peak, measured, cpu - self.cpu]
            print(json.dumps(row), flush=True)
            self.start, self.cpu, self.written = perf_counter(), process_time(), written()

    half = max(1000, clients)
    images, labels = torch.randn(2 * half, 1, 4, 4), torch.arange(2 * half) % 10
    partition = DirichletPerClient(alpha=10.0, samples=40, test_samples=10)
    data = InMemory(
        images[:half], labels[:half], 10, images[half:], labels[half:], num_clients=clients, partition=partition, split="official"
    )
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            rounds,
            participation=COHORT / clients,
            evaluate_every=50,
            run_dir=folder,
            progress=False,
            callbacks=[Meter()],
            trainer=partial(L.Trainer, accelerator="cpu", devices=1),
        )
        federation.fit(FedPer(Net), data)


def written() -> int:
    """Bytes that this process has had written so far."""
    path = Path("/proc/self/io")
    return int(next(line for line in path.read_text().splitlines() if line.startswith("wchar")).split()[1]) if path.exists() else 0


def play(clients: int, rounds: int) -> list[list[float]]:
    """What :func:`run` prints in a process of its own."""
    command = [sys.executable, __file__, "--run", str(clients), str(rounds)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("[")]


def show(label: str, rows: list[list[float]]) -> None:
    """One line: medians of the rounds that measured nobody, unless all did."""
    quiet = [row for row in rows if not row[4]] or rows
    seconds, size, cpu = (statistics.median(row[column] for row in quiet) for column in (1, 2, 5))
    line = f"  {label:24s} {1000 * seconds:8.1f} ms a round  {1000 * cpu:8.1f} ms CPU"
    line += f"  {size / 1024:8.1f} KiB written  {rows[-1][3]:7.0f} MiB peak"
    measured = [row[1] for row in rows if row[4]]
    print(line + (f"   with everybody measured {statistics.median(measured):.2f} s" if measured else ""), flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=2, type=int, metavar=("CLIENTS", "ROUNDS"), help="play one run in this process")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000, 10000])
    options = parser.parse_args()
    if options.run:
        run(*options.run)
        return
    print(f"one run, 100 clients, {COHORT} a round")
    rows = play(100, options.rounds)
    for last in (10, 100, 1000, 10000):
        if last <= options.rounds:
            show(f"up to round {last}", rows[max(1, last - WINDOW) : last])
    print(f"{3 * WINDOW} rounds, {COHORT} clients a round")
    for clients in options.clients:
        show(f"of {clients} clients", play(clients, 3 * WINDOW)[-2 * WINDOW :])


if __name__ == "__main__":
    main()
