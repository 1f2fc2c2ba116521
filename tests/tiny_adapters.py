"""What tests of LoRA methods have in common: a network without dropout, all of whose parts learn, and data in one batch."""

from functools import partial
from typing import Any

import torch
from tiny import CLASSES, NO_DROPOUT, TINY_TRANSFORMER, new_federation, new_texts, new_trainer
from torch import Tensor

from lightning_fed.data import InMemory
from lightning_fed.federation.federation import Federation
from lightning_fed.methods.families.lora import COMMON, LoRAModule
from lightning_fed.models.transformer import TransformerClassifier
from lightning_fed.tensors import State

network = partial(TransformerClassifier, config=TINY_TRANSFORMER | NO_DROPOUT | {"initializer_range": 0.5})
adam = partial(torch.optim.AdamW, lr=0.02)
sgd = partial(torch.optim.SGD, lr=0.1)
double = partial(new_trainer, precision="64-true")
SELF = "backbone.network.roberta.encoder.layer.0.attention.self"
LAYERS = f"{SELF}.query", f"{SELF}.value"
LAYER = LAYERS[0]
A, B = f"{LAYER}.lora_A.{COMMON}.weight", f"{LAYER}.lora_B.{COMMON}.weight"
WIDTH = 8
HEAD = (WIDTH * WIDTH + WIDTH) + (WIDTH * CLASSES + CLASSES)
"""Numbers of the classifier's two layers."""


def method_of(method: type[LoRAModule], **options: Any) -> Any:
    return method(**{"backbone": network, "num_classes": CLASSES, "r": 3, "optimizer": adam, "steps": 3} | options)


def fit(method: LoRAModule, data: InMemory | None = None, rounds: int = 2, **options: Any) -> Federation:
    federation = new_federation(rounds, **{"evaluate_every": 0} | options)
    federation.fit(method, data or new_texts(3, 90))
    return federation


def one_batch(num_clients: int, size: int = 60) -> InMemory:
    """All texts of a client in one batch; clients have different numbers of them."""
    return new_texts(num_clients, size, batch_size=1000, val_share=0.0, test_share=0.2)


def of_factor(state: State, factor: str) -> State:
    return {name: tensor for name, tensor in state.items() if f".lora_{factor}." in name}


def products(state: State) -> State:
    """BA of each adapted matrix, in float64."""
    a = of_factor(state, "A")
    return {name: state[name.replace("lora_A", "lora_B")].double() @ tensor.double() for name, tensor in a.items()}


def mean_of(states: list[State], weights: list[float]) -> State:
    total = sum(weights)
    return {n: sum(((w / total) * s[n].double() for s, w in zip(states, weights, strict=True)), torch.zeros(())) for n in states[0]}


def assert_close(one: State, other: State, atol: float) -> None:
    assert one.keys() == other.keys()
    torch.testing.assert_close(one, other, rtol=0, atol=atol, check_dtype=False)


def of_size(values: list[list[float]], rows: int, columns: int) -> Tensor:
    """Numbers in the upper left corner of zeros."""
    whole = torch.zeros(rows, columns)
    part = torch.tensor(values)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole
