"""The benefit of worker processes: rounds on each engine, and with bare PyTorch loops.

One bare loop has as many threads as there are cores. In addition, one loop per core, each with its share of the clients and one
thread, run in parallel without aggregation: about the minimum for an engine that trains a client with one thread.

    python bench/engines.py                      # 1, 2, … workers up to the cores there are
    python bench/engines.py --workers 1 2 4 --cases fedavg_10 pf2lora
    python bench/engines.py --ray                # Ray as well, on this machine, with as many workers

Cases, on the CPU: FedAvg with CNN-1 as in bench/overhead.py, with cohorts of 10 and of 100; pFedLoRA with CNN-1 to CNN-5; PF2LoRA
on a small transformer; and FedAvg with 10 of 100 clients in a round, where all 100 are measured in every round.

In each repetition every engine runs the same rounds, one engine after the other, so that a drift of the machine's speed cancels.
The program prints the median of the ratios within a repetition. A run's first round, which starts processes and counts
FLOPs, is left out. Where the time goes is counted by the federation itself (``seconds/…``), per round: waiting for turns (``fit``),
checking and merging (``aggregate``), measuring (``evaluate``).
"""

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import lightning as L
import torch
from overhead import CASES as OVERHEAD
from overhead import BareLoop
from torch import Tensor

from lightning_fed import FederatedModule, Federation
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.data import IID, FederatedDataModule, InMemory
from lightning_fed.engines import Engine, InProcess, Processes, Ray
from lightning_fed.engines.malloc import retained_memory
from lightning_fed.methods import FedAvg, PF2LoRA, PFedLoRA
from lightning_fed.models import CNN1, CNN2, CNN3, CNN4, CNN5, TransformerClassifier

SAMPLES, BATCH = 400, 64
TRANSFORMER = {"model_type": "roberta", "vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2}
TRANSFORMER |= {"num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 64}


class Clock(FederationCallback):
    """Seconds of each round."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self._start = 0.0

    def on_fit_start(self, run: RunView) -> None:
        """Begin."""
        self.rounds, self._start = [], perf_counter()

    def on_round_end(self, run: RunView) -> None:
        """Note a round."""
        now = perf_counter()
        self.rounds.append(now - self._start)
        self._start = now


def images(clients: int, samples: int = SAMPLES) -> FederatedDataModule:
    """Random images: the time of a step does not depend on what is in them."""
    total = clients * samples * 10 // 8
    pixels = torch.randint(0, 256, (total, 3, 32, 32), dtype=torch.uint8)
    return InMemory(pixels, torch.arange(total) % 10, num_classes=10, num_clients=clients, partition=IID(), batch_size=BATCH)


def texts(clients: int) -> FederatedDataModule:
    """Random texts of 32 tokens."""
    ids = torch.randint(10, 1000, (clients * 200, 32))
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return InMemory(inputs, torch.arange(len(ids)) % 2, num_classes=2, num_clients=clients, partition=IID(), batch_size=16)


CASES: dict[str, tuple[str, Callable[[], FederatedModule], Callable[[], FederatedDataModule], dict[str, Any]]] = {
    "fedavg_10": ("FedAvg, CNN-1, 10 turns", partial(FedAvg, CNN1), partial(images, 10), {}),
    "fedavg_100": ("FedAvg, CNN-1, 100 turns", partial(FedAvg, CNN1), partial(images, 100), {}),
    "pfedlora": ("pFedLoRA, CNN-1 to 5, 10 turns", partial(PFedLoRA, [CNN1, CNN2, CNN3, CNN4, CNN5]), partial(images, 10), {}),
    "pf2lora": (
        "PF2LoRA, 2 layers, 10 turns",
        partial(PF2LoRA, partial(TransformerClassifier, config=TRANSFORMER)),
        partial(texts, 10),
        {},
    ),
    "measured": (
        "FedAvg, 10 of 100, all measured",
        partial(FedAvg, CNN5),
        partial(images, 100),
        {"participation": 0.1, "evaluate_every": 1},
    ),
}


def play(
    engine: Engine, method: FederatedModule, data: FederatedDataModule, rounds: int, **options: Any
) -> tuple[float, dict[str, float]]:
    """Seconds of a round, the median over all but the first, and of its stages."""
    clock = Clock()
    new_trainer = partial(L.Trainer, accelerator="cpu", devices=1)
    options = {"evaluate_every": 0} | options
    federation = Federation(
        rounds + 2, run_dir=None, progress=False, callbacks=[clock], engine=engine, trainer=new_trainer, **options
    )
    history = federation.fit(method, data)[1:-1]  # the first round counts FLOPs, the last one measures
    stages = [name for name in history[0] if name.startswith("seconds/")]
    return statistics.median(clock.rounds[1:-1]), {name: statistics.median(row[name] for row in history) for name in stages}


def play_bare(clients: int, rounds: int, threads: int) -> float:
    """Seconds of a round of federated averaging as one would write it by hand."""
    torch.set_num_threads(threads)
    loop, seconds = BareLoop(OVERHEAD["cnn"], clients), []
    for _ in range(rounds + 1):
        start = perf_counter()
        loop.round()
        seconds.append(perf_counter() - start)
    torch.set_num_threads(1)
    return statistics.median(seconds[1:])


def play_side_by_side(clients: int, rounds: int, cores: int) -> float:
    """Seconds of a round in which each of several processes plays its share of the clients with one thread."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(cores), context.Queue()
    share = [clients // cores + (core < clients % cores) for core in range(cores)]
    processes = [context.Process(target=_play_share, args=(count, rounds, together, found)) for count in share]
    for process in processes:
        process.start()
    seconds = [max(found.get() for _ in processes) for _ in range(rounds)]
    for process in processes:
        process.join()
    return statistics.median(seconds)


def _play_share(clients: int, rounds: int, together: Any, found: Any) -> None:
    torch.set_num_threads(1)
    loop = BareLoop(OVERHEAD["cnn"], clients)
    with retained_memory():
        loop.round()
        for _ in range(rounds):
            together.wait()
            start = perf_counter()
            loop.round()
            found.put(perf_counter() - start)


def main() -> None:
    """Print paired ratios, and where the time goes."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(range(1, cores + 1)))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ray", action="store_true", help='pip install "lightning-fed[ray]"')
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engines: dict[str, Engine] = {"in process": InProcess(threads=1)}
    engines |= {f"{workers} worker{'s' if workers > 1 else ''}": Processes(workers) for workers in options.workers}
    if options.ray:
        engines |= {f"{workers} of Ray's workers": Ray(workers=workers) for workers in options.workers}
    print(
        f"torch {torch.__version__}, {cores} cores, {options.repetitions} repetitions of {options.rounds} rounds, one thread each"
    )
    for case in options.cases:
        title, new_method, new_data, settings = CASES[case]
        data = new_data()
        rounds = 1 if case == "fedavg_100" else options.rounds
        seconds: dict[str, list[float]] = {}
        stages: dict[str, dict[str, float]] = {}
        for _ in range(options.repetitions):
            for name, engine in engines.items():
                taken, stages[name] = play(engine, new_method(), data, rounds, **settings)
                seconds.setdefault(name, []).append(taken)
            if case.startswith("fedavg"):
                seconds.setdefault(f"bare loop, {cores} threads", []).append(play_bare(data.num_clients, rounds, cores))
                side_by_side = play_side_by_side(data.num_clients, rounds, cores)
                seconds.setdefault(f"{cores} bare loops, 1 thread", []).append(side_by_side)
        show(title, seconds, stages)


def show(title: str, seconds: dict[str, list[float]], stages: dict[str, dict[str, float]]) -> None:
    """Print one case."""
    print(f"\n{title}")
    reference = seconds["in process"]
    bare = next((values for name, values in seconds.items() if name.startswith("bare")), None)
    for name, values in seconds.items():
        ratio = statistics.median(mine / its for mine, its in zip(values, reference, strict=True))
        line = f"  {name:22s} {statistics.median(values):7.3f} s a round   {ratio:5.3f} x in process"
        if bare:
            line += f"   {statistics.median(mine / its for mine, its in zip(values, bare, strict=True)):5.3f} x bare loop"
        parts = {k.removeprefix("seconds/"): v for k, v in stages.get(name, {}).items() if v > 0.0005}
        print(line + ("   " + ", ".join(f"{part} {value:.3f}" for part, value in parts.items()) if parts else ""), flush=True)


if __name__ == "__main__":
    main()
