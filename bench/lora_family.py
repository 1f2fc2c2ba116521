"""What the server's step costs in the LoRA family: seconds on one core, and memory beside the updates.

Updates are random, of the shapes of a model with 7 billion parameters: query and value of 32 layers, 4096 x 4096, rank 16, 20
participants. Each aggregation runs in a process of its own. Seconds are CPU time, the minimum of the repetitions, since other
programs may use the machine. Memory is the peak resident set minus the resident set before the step. The dense variants form the
full matrices, which the package never does; they are timed on one matrix, and multiplied.

    python bench/lora_family.py [--repetitions 3] [--dense] [--layers 32] [--width 4096] [--rank 16] [--participants 20]
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable
from time import process_time

import torch

from lightning_fed.core import State, mean_of_updates
from lightning_fed.methods.families.exact_lora import Matrices
from lightning_fed.methods.fedex_lora import MeanAndError
from lightning_fed.methods.flexlora import Decompose
from lightning_fed.methods.flora import START, Stack, draw_adapters

Updates = list[tuple[State, float]]


def mean_of_products(updates: Updates, a: str, b: str) -> torch.Tensor:
    """Of one matrix, formed."""
    total = torch.zeros(updates[0][0][b].shape[0], updates[0][0][a].shape[1])
    for update, weight in updates:
        total.addmm_(update[b], update[a], alpha=weight / len(updates))
    return total


def dense_error(updates: Updates, a: str, b: str) -> None:
    """What the means lack, formed."""
    mean_b, mean_a = (torch.stack([update[name] for update, _ in updates]).mean(dim=0) for name in (b, a))
    mean_of_products(updates, a, b).addmm_(mean_b, mean_a, alpha=-1)


def dense_decomposition(updates: Updates, a: str, b: str) -> None:
    """The singular value decomposition of the mean, formed."""
    torch.linalg.svd(mean_of_products(updates, a, b), full_matrices=False)


def ways(matrices: Matrices, start: State) -> dict[str, Callable[[Updates], object]]:
    """What is compared, by name."""
    state = start | {START: torch.tensor(0)}
    first, *_ = matrices.shapes
    names = matrices.names(first)
    return {
        "mean of the factors (HOMLoRA)": lambda updates: mean_of_updates(iter(updates), state),
        "FLoRA": lambda updates: Stack(matrices)(iter(updates), state),
        "FedEx-LoRA": lambda updates: MeanAndError(matrices)(iter(updates), state),
        "FlexLoRA": lambda updates: Decompose(matrices, {matrices.rank}, start, "none")(iter(updates), state),
        "FedEx-LoRA, dense": lambda updates: dense_error(updates, *names),
        "FlexLoRA, dense": lambda updates: dense_decomposition(updates, *names),
    }


def main() -> None:
    """One process for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dense", action="store_true", help="the dense ways, too: many minutes, were they played to the end")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--participants", type=int, default=20)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()

    shapes = {f"{layer}.{which}": (args.width, args.width) for layer in range(args.layers) for which in ("query", "value")}
    matrices = Matrices(shapes, args.rank)
    if args.way is None:
        print(
            f"{len(shapes)} matrices of {args.width} x {args.width}, rank {args.rank}, {args.participants} participants, one thread"
        )
        for name in ways(matrices, {}):
            if args.dense or not name.endswith("dense"):
                subprocess.run([sys.executable, *sys.argv, "--way", name], check=True)
        return

    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = draw_adapters(matrices, 0)
    updates: Updates = [({k: torch.randn_like(t) for k, t in start.items()}, 1.0) for _ in range(args.participants)]
    merge, one_matrix = ways(matrices, start)[args.way], args.way.endswith("dense")
    before, seconds = peak(), []
    for _ in range(1 if one_matrix else args.repetitions):
        begin = process_time()
        merge(updates)
        seconds.append(process_time() - begin)
    total = min(seconds) * (len(shapes) if one_matrix else 1)
    note = "   (of one matrix, times all)" if one_matrix else ""
    print(f"{args.way:32s}{total:10.2f} s{(peak() - before) / 2**20:10.0f} MiB{note}", flush=True)


def peak() -> int:
    """The largest resident set so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
