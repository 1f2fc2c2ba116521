"""The cost of a step of each LoRA method, relative to HOMLoRA.

FLOPs are counted on the meta device, for a transformer of RoBERTa-base's shape (12 layers of width 768), so that no weights are
needed; the ratio per round is the same, since all methods make the same number of steps. Seconds are measured on the same shape
with fewer layers, one step of each method in turn, and the median of the ratios is printed. PF2LoRA's paper charges 4.65 times
HOMLoRA for its method and 3.51 times for Per-FedAvg (Table 18).

    python bench/lora_cost.py [--length 128] [--batch 16] [--layers 2] [--steps 5]
"""

import argparse
import statistics
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods import HOMLoRA, PerFedAvgLoRA, PF2LoRA
from lightning_fed.methods.families.lora import LoRAModule
from lightning_fed.models import TransformerClassifier

ROBERTA = {
    "model_type": "roberta",
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
METHODS: dict[str, tuple[type[LoRAModule], dict[str, Any]]] = {
    "HOMLoRA": (HOMLoRA, {}),
    "PF2LoRA, exact, two batches": (PF2LoRA, {}),
    "PF2LoRA, exact, four batches": (PF2LoRA, {"batches": 4}),
    "PF2LoRA, finite differences": (PF2LoRA, {"hypergradient": "finite_difference"}),
    "PF2LoRA, first order": (PF2LoRA, {"hypergradient": "first_order"}),
    "PF2LoRA, none": (PF2LoRA, {"hypergradient": "none"}),
    "Per-FedAvg-LoRA, exact": (PerFedAvgLoRA, {}),
    "Per-FedAvg-LoRA, finite differences": (PerFedAvgLoRA, {"hessian": "finite_difference"}),
    "Per-FedAvg-LoRA, first order": (PerFedAvgLoRA, {"hessian": "first_order"}),
}


def new_module(name: str, layers: int, device: str) -> LoRAModule:
    """A client's module, ready to step."""
    method, options = METHODS[name]
    with torch.device(device):
        network = partial(TransformerClassifier, config=ROBERTA | {"num_hidden_layers": layers}, attention="eager")
        module = method(network, 2, **options).for_client(ClientInfo(0, 1, 0, 1, (1, 0)))
    module.phase = module.phases()[0]
    for parameter in module.parameters():
        parameter.requires_grad_(any(parameter is mine for mine in module.phase.parameters))
    module.manual_backward = Tensor.backward  # type: ignore[method-assign,assignment]
    return module


def new_step(module: LoRAModule, batch: int, length: int, device: str) -> Any:
    """The batches of a step."""
    batches = [
        ({"input_ids": torch.full((batch, length), 5, device=device)}, torch.zeros(batch, dtype=torch.long, device=device))
        for _ in range(module.batches_per_step)
    ]
    return batches if len(batches) > 1 else batches[0]


def flops(name: str, batch: int, length: int) -> int:
    """Of a step, on the meta device."""
    module = new_module(name, 12, "meta")
    with FlopCounterMode(display=False) as counter:
        module.compute_gradients(new_step(module, batch, length, "meta"))
    return counter.get_total_flops()


def main() -> None:
    """Count, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2, help="of the networks that are timed")
    parser.add_argument("--steps", type=int, default=5, help="timed per method; 0: count only")
    args = parser.parse_args()

    counted = {name: flops(name, args.batch, args.length) for name in METHODS}
    modules = {name: new_module(name, args.layers, "cpu") for name in METHODS} if args.steps else {}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(args.steps + 1):
        for name, module in modules.items():
            step = new_step(module, args.batch, args.length, "cpu")
            start = perf_counter()
            module.compute_gradients(step)
            seconds[name].append(perf_counter() - start)
    base = seconds["HOMLoRA"][1:]
    print(f"batch {args.batch}, {args.length} tokens; seconds with {args.layers} layers, {torch.get_num_threads()} thread(s)")
    print(f"{'method':38s}{'GFLOPs/step':>13s}{'of HOMLoRA':>12s}{'seconds, of HOMLoRA':>22s}")
    for name, count in counted.items():
        ratios = [mine / its for mine, its in zip(seconds[name][1:], base, strict=True)]
        timed = f"{statistics.median(ratios):22.2f}" if ratios else ""
        print(f"{name:38s}{count / 1e9:13.1f}{count / counted['HOMLoRA']:12.2f}{timed}")


if __name__ == "__main__":
    main()
