"""Networks, data and federations small enough that a round takes a fraction of a second."""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

import lightning_fed.methods
from lightning_fed.data import InMemory, Partitioner
from lightning_fed.data.partition.pools import Indices, cut
from lightning_fed.engines import InProcess
from lightning_fed.engines.recipe import Recipe
from lightning_fed.exchange import ClientUpdate, Lost, State, Turn
from lightning_fed.families.capacity import CapacityModule
from lightning_fed.families.fine_tuning import FineTuning
from lightning_fed.federation import Federation
from lightning_fed.measure.meters import Metrics
from lightning_fed.models import Backbone, VisionTransformer
from lightning_fed.models.backbone import scaled
from lightning_fed.models.transformer import TransformerClassifier
from lightning_fed.module import FederatedModule
from lightning_fed.storage.checkpoint import Checkpoints
from lightning_fed.storage.client_store import ClientStore, read_state

CLASSES = 4
PIXELS = 3 * 4 * 4
METHODS = lightning_fed.methods.__all__

sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
new_trainer = partial(L.Trainer, accelerator="cpu", devices=1)


class Net(Backbone):
    """Two linear layers and a head, for images of 3×4×4 pixels; it can be made narrower and factorised."""

    def __init__(self, num_classes: int = CLASSES, hidden: int = 5, width: float = 1.0) -> None:
        super().__init__()
        hidden, features = scaled(hidden, width), scaled(6, width)
        self.fc1 = nn.Linear(PIXELS, hidden)
        self.fc2 = nn.Linear(hidden, features)
        self.head = nn.Linear(features, num_classes)

    @property
    def factorisable(self) -> list[str]:
        return ["fc1", "fc2"]

    @property
    def cuts(self) -> Mapping[str, int]:
        return {"fc1": self.fc1.out_features, **super().cuts}

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        x = relu(self.fc1(x.flatten(1)))
        return x if cut == "fc1" else relu(self.fc2(x))

    def classify(self, representation: Tensor, cut: str = "features") -> Tensor:
        return self.head(relu(self.fc2(representation)) if cut == "fc1" else representation)


class WideNet(Net):
    """Another architecture with as many features."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=7)


class NoisyNet(Net):
    """With everything that differs between train and eval mode: batch norm, its integer counter, and dropout."""

    def __init__(self, num_classes: int = CLASSES, width: float = 1.0) -> None:
        super().__init__(num_classes, width=width)
        self.norm = nn.BatchNorm1d(self.head.in_features)

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return dropout(self.norm(super().encode(x, "features")), 0.5, self.training)


@dataclass(frozen=True)
class Growing(Partitioner):
    """Client k holds a share proportional to k + 1, so that weighted and unweighted means differ."""

    def split(self, members: list[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        shares = np.arange(1, num_clients + 1) / np.arange(1, num_clients + 1).sum()
        return cut(rng.permutation(np.concatenate(members)), shares)


def new_data(num_clients: int = 4, size: int = 200, dtype: torch.dtype = torch.float32, **options: Any) -> InMemory:
    """Noisy copies of one pattern per class, as floats: what the network sees is what is stored."""
    stream = torch.Generator().manual_seed(1)
    labels = torch.arange(size) % CLASSES
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=stream)
    images = patterns[labels] + torch.randn(size, 3, 4, 4, generator=stream)
    options = {"partition": Growing(), "batch_size": 16} | options
    return InMemory(images.to(dtype), labels, CLASSES, num_clients=num_clients, **options)


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

ON_IMAGES = {"FedHMLoRA", "AdapterTuning", "PromptTuning", "PrefixTuning", "SLoRA"}
"""Methods of fine-tuning that are tested on a vision transformer."""

tiny_transformer = partial(TransformerClassifier, config=TINY_TRANSFORMER)
"""A text classifier with random weights and dropout; builds for a number of classes."""

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
still_transformer = partial(TransformerClassifier, config=TINY_TRANSFORMER | NO_DROPOUT)
"""The same without dropout."""


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
    on_texts = issubclass(getattr(lightning_fed.methods, name), FineTuning) and name not in ON_IMAGES
    return (new_texts if on_texts else new_data)(**options)


def new_federation(rounds: int = 2, run_dir: Path | str | None = None, **options: Any) -> Federation:
    """A silent federation on the CPU, which writes nothing unless it is told where."""
    options = {"logger": False, "progress": False, "trainer": new_trainer} | options
    return Federation(rounds=rounds, run_dir=run_dir, **options)


def new_method(name: str, **options: Any) -> FederatedModule:
    """A method by name, with two different networks if it can take them."""
    method = getattr(lightning_fed.methods, name)
    if issubclass(method, FineTuning):
        adam, network = partial(torch.optim.AdamW, lr=0.02), tiny_vit if name in ON_IMAGES else tiny_transformer
        return method(**{"num_classes": CLASSES, "backbone": network, "optimizer": adam, "local_steps": 2} | options)
    options = {"num_classes": CLASSES, "optimizer": momentum} | options
    if "backbone" not in options:
        # Batch norm where there is something special about it.
        options["backbone"] = [Net, WideNet] if method.heterogeneous else NoisyNet if issubclass(method, CapacityModule) else Net
    return method(**options)


def same(one: State, other: State) -> bool:
    """Equal names and equal bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def private_states(federation: Federation) -> dict[int, State]:
    """The private state of every client that has one."""
    return {
        client.id: dict(federation.run.store.get(client.id))
        for client in federation.run.clients
        if client.id in federation.run.store
    }


def assert_same(one: Federation, other: Federation) -> None:
    """Two runs found the same, bit for bit."""
    assert without_seconds(one.run.history) == without_seconds(other.run.history)
    assert one.run.results == other.run.results
    assert same(one.run.server.state_dict(), other.run.server.state_dict())
    ours, theirs = private_states(one), private_states(other)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[client], theirs[client]) for client in ours)


def without_seconds(history: list[Metrics]) -> list[Metrics]:
    """The part of the metrics that two runs have in common."""
    return [{name: value for name, value in row.items() if not name.startswith("seconds/")} for row in history]


def final_checkpoint(run_folder: Path) -> tuple[int, dict[str, Any], list[Metrics], State, dict[int, State]]:
    """All that the newest checkpoint of a run holds, in comparable form."""
    checkpoints = Checkpoints(run_folder)
    checkpoint, problems = checkpoints.latest()
    assert not problems
    manifest = checkpoint.manifest
    clients = {client: read_state(checkpoints.clients_folder, record) for client, record in checkpoint.clients.items()}
    return manifest.round, manifest.identity, without_seconds(checkpoint.history), checkpoint.server, clients


def assert_same_end(one: Path, other: Path) -> None:
    """Two runs ended in the same checkpoint, bit for bit."""
    round_1, identity_1, history_1, server_1, clients_1 = final_checkpoint(one)
    round_2, identity_2, history_2, server_2, clients_2 = final_checkpoint(other)
    assert (round_1, identity_1, history_1) == (round_2, identity_2, history_2)
    assert same(server_1, server_2)
    assert clients_1.keys() == clients_2.keys()
    assert all(same(clients_1[client], clients_2[client]) for client in clients_1)


class Recording(InProcess):
    """Keeps what goes down and up, and its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []
        self.updates: list[ClientUpdate] = []

    def open(self, recipe: Recipe, states: ClientStore) -> None:
        super().open(recipe, states)
        assert self._opened is not None
        self.worker, _ = self._opened

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | Lost]:
        for update in super().run(self._noted(turns)):
            assert isinstance(update, ClientUpdate)
            self.updates.append(update)
            yield update

    def _noted(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        for turn in turns:
            self.turns.append(turn)
            yield turn

    @property
    def trained(self) -> list[ClientUpdate]:
        """The updates of fit turns."""
        return [update for _, update in self.fits()]

    def fits(self, round: int | None = None) -> list[tuple[Turn, ClientUpdate]]:
        """Fit turns and what came of them, of all rounds or of one."""
        pairs = zip(self.turns, self.updates, strict=True)
        return [(turn, update) for turn, update in pairs if turn.verb == "fit" and round in (None, turn.round)]


class Shuffled(InProcess):
    """Carries turns out in a random order."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | Lost]:
        waiting = list(turns)
        order = list(range(len(waiting)))
        random.Random(7).shuffle(order)
        done = {place: next(iter(super(Shuffled, self).run([waiting[place]]))) for place in order}
        yield from (done[place] for place in range(len(waiting)))


def distance(one: State, other: State) -> float:
    """Relative, over all tensors."""
    assert one.keys() == other.keys()
    norm = torch.stack([t.square().sum() for t in other.values()]).sum().sqrt()
    return (torch.stack([(one[name] - t).square().sum() for name, t in other.items()]).sum().sqrt() / norm).item()
