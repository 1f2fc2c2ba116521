"""Methods that draw something and freeze it: a projection of the images, and an adapter's A."""

from typing import Any

import torch
from tiny import CLASSES, PIXELS, Net, WideNet, new_data, new_texts, sgd, tiny_transformer
from torch import Tensor, nn

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import InMemory
from lightning_fed.methods.families.lora import COMMON, LoRAModule
from lightning_fed.tensors import State


class Projected(FederatedModule):
    """A head is averaged, the body stays; images are projected by what nobody learns, and shifted by what is in no state dict."""

    heterogeneous = True
    shift: Tensor

    def build(self) -> None:
        super().build()
        self.projection = nn.Linear(PIXELS, PIXELS).requires_grad_(False)
        self.register_buffer("shift", torch.randn(PIXELS), persistent=False)

    def shared_names(self) -> set[str]:
        return {"backbone.head.bias"}

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone((self.projection(x.flatten(1)) + self.shift).view_as(x))


class FrozenA(LoRAModule):
    """An adapter of which A is drawn and B is trained."""

    def build(self) -> None:
        super().build()
        for name, parameter in self.adapter(COMMON).items():
            parameter.requires_grad_(".lora_B." in name)


def projected(**options: Any) -> Projected:
    return Projected([Net, WideNet], CLASSES, sgd, **options)


def new_case(name: str) -> tuple[FederatedModule, InMemory]:
    """A method and its data."""
    if name == "projection":
        return projected(), new_data(4, 120)
    return FrozenA(tiny_transformer, CLASSES, steps=2), new_texts(4, 100)


def frozen(module: FederatedModule) -> State:
    """What neither travels nor stays."""
    state = module.state_dict(keep_vars=True)
    return {name: state[name] for name in module.frozen_names}
