"""The cost of instruction tuning a language model, compared with a bare loop of transformers and peft.

    python bench/instructions.py [--steps 20] [--rounds 6] [--clients 100] [--width 256] [--layers 4]

A Llama with random weights, LoRA of rank 8 on all linear layers, AdamW, gradients clipped, rows of about 300 tokens, a third of
which are trained on, padded to the batch. Everything is on the CPU, with one thread.

- Tokens per second of a client's turn, and of the loop on the same batches, whose logits are of all tokens, as that library
  computes them: medians over rounds that alternate.
- Peak memory of training: of the loop, in a process of its own, and of that many clients, all of which take part. The clients share
  one frozen network, and each keeps the moments of its adapter, which is averaged: their memory in excess of the loop is compared
  with the size of network and moments.
- The time to load the data for the first time, and again, as for a second worker; and for each of two workers, the shared memory
  that it uses and how much of that is a copy of its own, with a network of about 140 MiB and with a tiny one.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_fed import Federation
from lightning_fed.callbacks import FederationCallback
from lightning_fed.data import Instructions
from lightning_fed.engines import Processes
from lightning_fed.methods import HOMLoRA
from lightning_fed.models import CausalLM

MIB = 2**20
RATE = 1e-3


def write_data(folder: Path, clients: int) -> dict[str, Any]:
    """Forty rows per client, and a tokenizer that knows all letters; returns the arguments of the data."""
    letters = {token: n for n, token in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>").save_pretrained(folder)
    rows = [
        {"instruction": f"Count from {n} on. " * (10 + n % 5), "output": f"{n}, {n + 1}, {n + 2} " * 8, "who": str(n % clients)}
        for n in range(40 * clients)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"template": "plain", "client": "who", "val_share": 0.0, "test_share": 0.1, "batch_size": 4}
    return {"path": str(folder / "rows.jsonl"), "tokenizer": str(folder)} | options


def config_of(width: int, layers: int) -> dict[str, Any]:
    """Of the Llama; its vocabulary is as large, beside its width, as those of real ones."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": 4}
    return {"model_type": "llama", "vocab_size": 16 * width, "max_position_embeddings": 512} | sizes


adam = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0)


def method_of(args: argparse.Namespace, steps: int, **sizes: int) -> HOMLoRA:
    """What clients train."""
    backbone = partial(CausalLM, config=config_of(**({"width": args.width, "layers": args.layers} | sizes)))
    adapters: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    return HOMLoRA(backbone, 1, optimizer=adam, gradient_clip=1.0, steps=steps, **adapters)


class Loop:
    """The bare loop, on a client's batches."""

    def __init__(self, args: argparse.Namespace, data: Instructions) -> None:
        network = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config_of(args.width, args.layers))
        )
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        self.network: Any = get_peft_model(network, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
        self.learning = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = adam(self.learning)
        self.data = data

    def run(self, steps: int, client: int = 0) -> int:
        """Train; returns the number of tokens."""
        tokens, data = 0, self.data.client(client)
        batches = [batch for _ in range(steps) for batch in data.train_dataloader()][:steps]
        for inputs, targets in batches:
            labels = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=-100)
            self.optimizer.zero_grad()
            outputs = self.network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.learning, 1.0)
            self.optimizer.step()
            tokens += int(inputs["attention_mask"].sum())
        return tokens


class Alternate(FederationCallback):
    """Runs the loop after each round, and notes how long both took."""

    def __init__(self, loop: Loop, steps: int) -> None:
        self.loop, self.steps = loop, steps
        self.ratios: list[float] = []
        self.speeds: list[float] = []

    def on_round_end(self, run: Any) -> None:
        """Time the loop."""
        start = perf_counter()
        tokens = self.loop.run(self.steps)
        seconds = perf_counter() - start
        if run.round > 1:  # in the first one, FLOPs are counted
            self.ratios.append(seconds / run.history[-1]["seconds/fit"])
            self.speeds.append(tokens / seconds)


def speed(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Tokens per second."""
    data = Instructions(**given)
    timed = Alternate(Loop(args, data), args.steps)
    federation = Federation(
        args.rounds + 1, eligible_clients=[0], callbacks=[timed], evaluate_every=0, logger=False, progress=False
    )
    federation.fit(method_of(args, args.steps), data)
    print(f"the loop: {statistics.median(timed.speeds):.0f} tokens/s; a turn: {statistics.median(timed.ratios):.3f} of that")


def peak(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Print the peak memory of this process, and what network and adapter have, in bytes."""
    data = Instructions(**given)
    if args.part == "loop":
        loop = Loop(args, data)
        for client in range(args.clients):  # batches of as many shapes
            loop.run(args.steps, client)
        network = sum(p.numel() * 4 for p in loop.network.parameters() if not p.requires_grad)
        sizes = [network, sum(p.numel() * 4 for p in loop.learning)]
    else:
        trained = TrainingPeak()
        Federation(1, evaluate_every=0, logger=False, progress=False, callbacks=[trained]).fit(method_of(args, args.steps), data)
        print(json.dumps([trained.bytes]))
        return
    print(json.dumps([peak_memory(), *sizes]))


def peak_memory() -> int:
    """Of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class TrainingPeak(FederationCallback):
    """Notes the peak memory up to the last turn of training: measuring has larger batches."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_turn_end(self, run: Any, update: Any) -> None:
        """Look."""
        self.bytes = peak_memory()


class SharedMappings(FederationCallback):
    """Notes how much shared memory each process that was started has mapped, and how much of that is a copy of its own."""

    def __init__(self) -> None:
        self.mib: list[tuple[float, float]] = []

    def on_round_end(self, run: Any) -> None:
        """Look at them."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            if (folder / "status").exists():
                parents[folder.name] = (folder / "status").read_text().partition("PPid:")[2].split()[0]
        for process in parents:
            ancestor = process
            while ancestor in parents and ancestor != str(os.getpid()):
                ancestor = parents[ancestor]
            if ancestor == str(os.getpid()) != process:
                self.mib.append(mapped(process))


def mapped(process: str) -> tuple[float, float]:
    """MiB of shared memory that a process has touched, and MiB of these that no other process has."""
    resident, private, is_shared = 0, 0, False
    for line in Path("/proc", process, "smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and ":" not in name:  # the first line of a mapping
            is_shared = rest[0].endswith("s")
        elif is_shared and name == "Rss:":
            resident += int(rest[0])
        elif is_shared and name.startswith("Private_"):
            private += int(rest[0])
    return resident / 1024, private / 1024


def workers(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Second workers."""
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for _ in range(2):
            start = perf_counter()
            Instructions(**given).setup()
            seconds.append(perf_counter() - start)
        print(f"data loaded: {seconds[0]:.2f} s, again: {seconds[1]:.2f} s")
        for width, layers in ((512, 8), (16, 1)):
            seen, method = SharedMappings(), method_of(args, 1, width=width, layers=layers)
            engine = Processes(workers=2)
            federation = Federation(1, evaluate_every=0, logger=False, progress=False, engine=engine, callbacks=[seen])
            federation.fit(method, Instructions(**given))
            frozen = sum(p.numel() * p.element_size() for p in federation.run.model.parameters() if not p.requires_grad) / MIB
            said = ", ".join(f"{resident:.0f} ({private:.0f})" for resident, private in sorted(seen.mib)[-2:])
            print(f"a frozen network of {frozen:.0f} MiB: shared memory of each worker, and its own copy of it: {said} MiB")


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 20), ("rounds", 6), ("clients", 100), ("width", 256), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", choices=("speed", "workers", "loop", "federation"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        given = write_data(Path(folder), args.clients if args.part in ("loop", "federation") else 4)
        if args.part in ("loop", "federation"):
            peak(args, given)
            return
        if args.part in (None, "speed"):
            speed(args, given)
        if args.part in (None, "workers"):
            workers(args, given)
    if args.part is None:
        said = []
        for part in ("loop", "federation"):
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
            printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
            said.append(json.loads(printed.splitlines()[-1]))
        (of_loop, network, adapter), (of_clients,) = said
        stored, more = args.clients * 2 * adapter, of_clients - of_loop
        print(f"peak of the loop {of_loop / MIB:.0f} MiB; of {args.clients} clients {more / MIB:.0f} MiB more")
        print(f"network {network / MIB:.0f}, moments {stored / MIB:.0f} MiB: {more / (network + stored):.2f} of both")


if __name__ == "__main__":
    main()
