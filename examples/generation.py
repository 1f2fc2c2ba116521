"""Data-to-text without a pretrained model: a small GPT-2 is pre-trained, then fine-tuned by clients with different restaurants.

    python examples/generation.py --root data/e2e

It needs no pretrained model and no connection. A tokenizer and a network are trained on the E2E texts about restaurants not in the
test set; the other restaurants are divided among the clients. HOMLoRA and PF2LoRA fine-tune the same network on them. The texts
are far from those of a real GPT-2, but every step is the real one: see docs/generation.md.
"""

import argparse
from collections import Counter
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from lightning_fed.data import E2E
from lightning_fed.data.batches import EXAMPLE
from lightning_fed.data.text.generation import Example
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import HOMLoRA, PF2LoRA
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.models import TransformerLM

END = "<|endoftext|>"
trainer = partial(L.Trainer, accelerator="cpu", devices=1)


class SomeRestaurants(E2E):
    """E2E without the restaurants that its test set has, or with these alone.

    Args:
        root: see :class:`lightning_fed.data.E2E`.
        tested: which of the two.
        num_tests: size of the test set, as many of each restaurant as possible; None: all.
        **kwargs: see :class:`lightning_fed.data.E2E`.
    """

    def __init__(self, root: str, tested: bool, num_tests: int | None = None, **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.tested = tested
        self.num_tests = num_tests

    def examples(self) -> tuple[list[Example], list[Example]]:
        """Training and test set; the latter is empty where there is none."""
        train, test = super().examples()
        names = {example.label for example in test}
        place: Counter[str] = Counter()
        ranked = []
        for example in test:
            ranked.append((place[example.label], example))
            place[example.label] += 1
        chosen = [example for _, example in sorted(ranked)][: self.num_tests]
        return [example for example in train if (example.label in names) == self.tested], chosen if self.tested else []


class Pretraining(L.LightningModule):
    """Trains all of a language model, as one does before there is anything to fine-tune.

    Args:
        network: what to train.
        steps: of the learning rate's cycle.
    """

    def __init__(self, network: TransformerLM, steps: int) -> None:
        super().__init__()
        self.network = network
        self.steps = steps

    def training_step(self, batch: tuple[dict[str, Tensor], Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the references."""
        inputs, targets = batch
        return cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> Any:
        """AdamW whose learning rate rises to 2e-3 and falls."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_tokenizer(data: SomeRestaurants, folder: Path) -> str:
    """A byte-level tokenizer like GPT-2's, of the texts that the network is pre-trained on."""
    train, _ = data.examples()
    texts = [f" {text}" for example in train for text in (example.source, *example.references)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=1000, special_tokens=[END], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token=END, eos_token=END)
    fast.save_pretrained(folder)
    return str(folder)


def pretrain(data: SomeRestaurants, tokenizer: str, options: argparse.Namespace) -> str:
    """A small GPT-2, trained centrally and saved as transformers does."""
    size = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    config = {"model_type": "gpt2", "vocab_size": len(size), "n_positions": 384, "n_head": 4}
    config |= {
        "n_embd": options.width,
        "n_layer": options.layers,
        "bos_token_id": size.bos_token_id,
        "eos_token_id": size.eos_token_id,
    }
    network = TransformerLM(config=config)
    new = trainer(max_steps=options.pretrain_steps, logger=False, enable_checkpointing=False, enable_model_summary=False)
    new.fit(Pretraining(network, options.pretrain_steps), data.pooled().train_dataloader())
    folder = Path(options.folder) / "model"
    network.network.save_pretrained(folder)
    return str(folder)


def new_method(name: str, backbone: Any) -> AdapterModule:
    """HOMLoRA or PF2LoRA with the ranks of PF2LoRA's paper; learning rates are for this small network."""
    adam = partial(torch.optim.AdamW, lr=5e-3)
    if name == "HOMLoRA":
        return HOMLoRA(backbone, 1, r=4, optimizer=adam, steps=10)
    return PF2LoRA(backbone, 1, r=4, client_r=2, client_lr=0.1, optimizer=adam, steps=10)


def scores_of(federation: Federation) -> dict[str, float]:
    """The mean over clients of what was measured last."""
    start, end = "after/test_", "/mean"
    last = federation.run.history[-1]
    return {name[len(start) : -len(end)]: value for name, value in last.items() if name.startswith(start) and name.endswith(end)}


def scores_before(module: AdapterModule, data: SomeRestaurants) -> dict[str, float]:
    """The same of the network as it was pre-trained: adapters begin with no effect."""
    new = trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    rows = [new.test(module, datamodule=data.client(client.id), verbose=False)[0] for client in data.clients]
    return {name.removeprefix("test/"): sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def answers_of(module: AdapterModule, data: SomeRestaurants, client: int) -> dict[int, str]:
    """What a client's model says to the first batch of its test set, by number of the source."""
    inputs, targets = next(iter(data.client(client).test_dataloader()))
    ids = module.eval().backbone.predict(inputs, targets)
    assert ids is not None
    texts = PreTrainedTokenizerFast.from_pretrained(data.tokenizer).batch_decode(ids.tolist(), skip_special_tokens=True)
    return dict(zip(inputs[EXAMPLE].tolist(), (text.strip() for text in texts), strict=True))


def show(scores: dict[str, dict[str, float]], console: Console) -> None:
    """A row for each method."""
    table = Table("mean over clients", *next(iter(scores.values())))
    for name, row in scores.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    console.print(table)


def main() -> None:
    """Pre-train, fine-tune, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data/e2e", help="folder of E2E's files")
    parser.add_argument("--folder", default="runs/generation", help="where tokenizer and model are written")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pretrain_steps", type=int, default=400)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--num_tests", type=int, default=60, help="size of the test set; E2E's: 630")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--num_beams", type=int, default=4, help="the paper: 10")
    parser.add_argument("--metrics", nargs="+", help="default: all, of which METEOR needs Java")
    options = parser.parse_args()
    console = Console(width=120, highlight=False)
    torch.manual_seed(0)
    disable_progress_bar()

    start = perf_counter()
    half = partial(SomeRestaurants, options.root, val_share=0)
    tokenizer = make_tokenizer(half(tested=False, tokenizer=""), Path(options.folder) / "tokenizer")
    general = half(tested=False, tokenizer=tokenizer, num_clients=1, batch_size=16, split="pooled", metrics=["bleu"])
    with quiet_lightning():
        model = pretrain(general, tokenizer, options)
    console.print(f"pre-trained for {options.pretrain_steps} steps: {perf_counter() - start:.0f} s")

    data = half(
        tested=True,
        num_tests=options.num_tests,
        tokenizer=tokenizer,
        num_clients=options.clients,
        batch_size=4,
        eval_batch_size=8,
        metrics=options.metrics,
    )
    backbone = partial(TransformerLM, name=model, num_beams=options.num_beams, length_penalty=0.9)
    methods = {name: new_method(name, backbone) for name in ("HOMLoRA", "PF2LoRA")}
    with quiet_lightning():
        scores = {"pre-trained": scores_before(new_method("HOMLoRA", backbone), data)}
    answers = {}
    for name, method in methods.items():
        start = perf_counter()
        federation = Federation(
            rounds=options.rounds, evaluate_every=0, run_dir=None, logger=False, progress=False, trainer=trainer
        )
        federation.fit(method, data)
        scores[name] = scores_of(federation)
        answers[name] = answers_of(federation.client_module(0), data, client=0)
        console.print(f"{name}, {options.rounds} rounds: {perf_counter() - start:.0f} s")
    show(scores, console)
    train, test = data.examples()
    for number in list(answers["HOMLoRA"])[:3]:
        example = (train + test)[number]
        console.print(f"\n{example.source}\n  reference: {example.references[0]}", soft_wrap=True)
        for name, texts in answers.items():
            console.print(f"  {name}: {texts[number]}", soft_wrap=True)


if __name__ == "__main__":
    main()
