"""Networks, data and federations small enough that a round takes a fraction of a second: those that come with
:mod:`lightning_fed.testing`, and those that the package's own methods need besides.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lightning_fed.methods
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core import PublicDistillation
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import IID, InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.methods.families.model_sizes import SizedModule
from lightning_fed.models import VisionTransformer
from lightning_fed.models.transformer import TransformerClassifier
from lightning_fed.storage.checkpoint import Checkpoints
from lightning_fed.storage.client_store import read_state
from lightning_fed.storage.manifest import Metrics
from lightning_fed.tensors import State
from lightning_fed.testing.compare import assert_same, private_states, same, server_client_states, without_seconds
from lightning_fed.testing.toys import (
    CLASSES,
    PIXELS,
    Growing,
    Net,
    NoisyNet,
    WideNet,
    momentum,
    new_data,
    new_trainer,
    quick_trainer,
    sgd,
)
from lightning_fed.testing.toys import new_federation as measured_federation
from lightning_fed.testing.watch import Recording, Shuffled

__all__ = [
    "CLASSES",
    "PIXELS",
    "Growing",
    "Net",
    "NoisyNet",
    "Recording",
    "Shuffled",
    "WideNet",
    "assert_same",
    "momentum",
    "new_data",
    "new_federation",
    "new_trainer",
    "private_states",
    "quick_trainer",
    "same",
    "server_client_states",
    "sgd",
    "without_seconds",
]

METHODS = lightning_fed.methods.__all__

INFO = new_data().clients[1]
"""A client, which a method is tried as without a run."""

X, Y = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(4)), torch.arange(8) % CLASSES
"""A batch."""

still = partial(torch.optim.SGD, lr=0.0)
"""An optimizer that moves nothing."""

new_federation = partial(measured_federation, evaluate_every=0)
"""A silent federation that measures its clients after the last round, which takes as long as a round; on validation data, too, with
:func:`new_trainer`.
"""

TINY_TRANSFORMER = {
    "model_type": "roberta",
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 32,
}
TINY_BERT = TINY_TRANSFORMER | {"model_type": "bert", "initializer_range": 0.5}
"""In which it makes a difference what numbers are drawn."""

TINY_VIT = {
    "model_type": "vit",
    "image_size": 4,
    "patch_size": 2,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
tiny_vit = partial(VisionTransformer, config=TINY_VIT)
"""An image classifier with random weights for the images of :func:`new_data`; builds for a number of classes."""

ON_IMAGES = {"FedHMLoRA", "FedHMLoRADelta", "AdapterTuning", "PromptTuning", "PrefixTuning", "SLoRA"}
"""Methods of fine-tuning that are tested on a vision transformer."""

ON_TINY_DATA: dict[str, dict[str, Any]] = {
    "DSFL": {"open_size": 10, "distill_epochs": 1, "distill_batch_size": 8},
    "FedDF": {"distill_steps": 3, "distill_batch_size": 8},
    "FedET": {"distill_steps": 3, "distill_batch_size": 8},
    "Floco": {"corners": 2, "tau": 2},
    "PFedGate": {"input_shape": (3, 4, 4)},
    "PerFedAvg": {"steps": 3},
}
"""What methods are told whose defaults are for larger data."""

tiny_transformer = partial(TransformerClassifier, config=TINY_TRANSFORMER)
"""A text classifier with random weights and dropout; builds for a number of classes."""

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
still_transformer = partial(TransformerClassifier, config=TINY_TRANSFORMER | NO_DROPOUT)
"""The same without dropout."""


class StillNet(NoisyNet):
    """Batch norm, but no dropout."""

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return self.norm(Net.encode(self, x))


class Tempered(nn.CrossEntropyLoss):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input * self.log_scale.exp(), target)


def infos(*sizes: int) -> list[ClientInfo]:
    """Clients with so many training examples, of all classes."""
    return [ClientInfo(client, size, 2, 2, (3,) * CLASSES) for client, size in enumerate(sizes)]


def photos(classes: int, num_clients: int, copies: int = 2, **options: Any) -> InMemory:
    """Noise in the size of CIFAR's images, of which each client has so many of each class."""
    labels = torch.arange(classes).repeat(copies * num_clients)
    images = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8)
    return InMemory(images, labels, classes, num_clients=num_clients, **{"partition": IID()} | options)


def new_texts(num_clients: int = 4, size: int = 200, **options: Any) -> InMemory:
    """Token ids of which the second says the class; every third text is shorter."""
    stream = torch.Generator().manual_seed(1)
    labels = torch.arange(size) % CLASSES
    ids = torch.randint(10, 30, (size, 6), generator=stream)
    ids[:, 0], ids[:, 1] = 0, labels + 3
    mask = torch.ones_like(ids)
    ids[::3, 4:], mask[::3, 4:] = 1, 0
    options = {"partition": Growing(), "batch_size": 4} | options
    return InMemory({"input_ids": ids, "attention_mask": mask}, labels, CLASSES, num_clients=num_clients, **options)


def text_batches(count: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """The first training batches of a client that has 60 texts."""
    loader = iter(new_texts(1, 60).client(0).train_dataloader())
    return [next(loader) for _ in range(count)]


def made_precise(module: FederatedModule) -> None:
    """Build a module in double precision and in its first phase. Its numbers are of noticeable size, and always the same."""
    module.configure_model()
    module.double()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "LayerNorm" not in name:
                parameter.normal_(std=0.5)
    module.phase = module.phases()[0]


def data_for(name: str, **options: Any) -> InMemory:
    """Data that a method can train on."""
    method = getattr(lightning_fed.methods, name)
    on_texts = issubclass(method, AdapterModule) and name not in ON_IMAGES
    new = new_texts if on_texts else new_data
    public = {"public": new(1, 24)} if issubclass(method, PublicDistillation) else {}
    return new(**public | options)


def new_method(name: str, **options: Any) -> FederatedModule:
    """A method by name, with two different networks if it can take them."""
    method = getattr(lightning_fed.methods, name)
    if issubclass(method, AdapterModule):
        adam, network = partial(torch.optim.AdamW, lr=0.02), tiny_vit if name in ON_IMAGES else tiny_transformer
        return method(**{"num_classes": CLASSES, "backbone": network, "optimizer": adam, "steps": 2} | options)
    plain = name == "SCAFFOLD"  # which is for plain SGD
    options = {"num_classes": CLASSES, "optimizer": sgd if plain else momentum} | options
    options = ON_TINY_DATA.get(name, {}) | options
    if "backbone" not in options:
        # Batch norm where there is something special about it.
        options["backbone"] = [Net, WideNet] if method.heterogeneous else NoisyNet if issubclass(method, SizedModule) else Net
    return method(**options)


def final_checkpoint(run_folder: Path) -> tuple[int, dict[str, Any], list[Metrics], State, dict[int, State]]:
    """All that the newest checkpoint of a run holds, in comparable form."""
    checkpoints = Checkpoints(run_folder)
    checkpoint, problems = checkpoints.latest()
    assert not problems
    manifest = checkpoint.manifest
    clients = {client: read_state(checkpoints.clients_folder, record) for client, record in checkpoint.clients.items()}
    return manifest.round, manifest.identity, without_seconds(checkpoint.history), checkpoint.server, clients


def final_kept(run_folder: Path) -> dict[int, State]:
    """What the server keeps for each client in the newest checkpoint of a run."""
    checkpoints = Checkpoints(run_folder)
    kept = checkpoints.latest()[0].client_state
    return {client: read_state(checkpoints.clients_folder, record) for client, record in kept.items()}


def same_states(one: dict[int, State], other: dict[int, State]) -> bool:
    """Of the same clients, bit for bit."""
    return one.keys() == other.keys() and all(same(state, other[client]) for client, state in one.items())


def assert_same_end(one: Path, other: Path) -> None:
    """Two runs ended in the same checkpoint, bit for bit."""
    round_1, identity_1, history_1, server_1, clients_1 = final_checkpoint(one)
    round_2, identity_2, history_2, server_2, clients_2 = final_checkpoint(other)
    assert (round_1, identity_1, history_1) == (round_2, identity_2, history_2)
    assert same(server_1, server_2)
    assert same_states(clients_1, clients_2)
    assert same_states(final_kept(one), final_kept(other))


def distance(one: State, other: State) -> float:
    """Relative, over all tensors."""
    assert one.keys() == other.keys()
    norm = torch.stack([t.square().sum() for t in other.values()]).sum().sqrt()
    return (torch.stack([(one[name] - t).square().sum() for name, t in other.items()]).sum().sqrt() / norm).item()


class Stop(FederationCallback):
    """Ends a run after a round was reported and before it is checkpointed."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, run: RunView) -> None:
        if run.round == self.round:
            raise KeyboardInterrupt
