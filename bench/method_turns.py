"""The overhead of a turn over bare loops with the same computation, method by method.

    python bench/method_turns.py                    # all of them
    python bench/method_turns.py --methods FML FedKD

A turn of one client loads its state and the broadcast, trains its epochs, and collects its update and its private state. Between
turns the server aggregates the update as if another client had sent it. The bare loop trains the same networks on batches of the
same sizes, from the same kind of images, with the same optimizers, and does the method's further computations as one would write
them by hand; nothing else. Turn and loop alternate in one process; the result is the ratio of each pair.
"""

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, kl_div, mse_loss, one_hot

from lightning_fed.core.messages import Turn
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import IID, InMemory
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.worker import Worker
from lightning_fed.methods.fd import FD
from lightning_fed.methods.fedamp import FedAMP
from lightning_fed.methods.fedcac import FedCAC
from lightning_fed.methods.fedkd import FedKD
from lightning_fed.methods.fedproto import FedProto
from lightning_fed.methods.fml import FML
from lightning_fed.methods.pfedgate import PFedGate
from lightning_fed.methods.pfedsd import PFedSD
from lightning_fed.models import CNN1, CNN5, ResNet8
from lightning_fed.nn.energy import compressed
from lightning_fed.storage.client_store import ClientStore, RoundStore
from lightning_fed.tensors import pack_bits

GOAL = 1.15
SAMPLES, BATCH, EPOCHS = 500, 50, 2

sgd = partial(torch.optim.SGD, lr=0.01)

Batch = tuple[Tensor, Tensor]


def new_data() -> InMemory:
    """Random images of one client."""
    total = SAMPLES * 10 // 8
    images, labels = torch.randint(0, 256, (total, 3, 32, 32), dtype=torch.uint8), torch.arange(total) % 10
    return InMemory(images, labels, num_classes=10, num_clients=1, partition=IID(), batch_size=BATCH)


def batches(epochs: int = EPOCHS) -> Iterator[Batch]:
    """What a bare loop sees, normalized as the data are."""
    images, labels = IMAGES
    for _ in range(epochs):
        for rows in torch.randperm(SAMPLES).split(BATCH):
            yield (images[rows].float().div_(255) - 0.5) / 0.5, labels[rows]


IMAGES = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8), torch.arange(SAMPLES) % 10


def train(loss: Callable[[Batch], Tensor], *networks: nn.Module, after: Callable[[], None] = lambda: None) -> None:
    """Epochs on a loss, with an optimizer for each network, and something after each step."""
    optimizers = [sgd(network.parameters()) for network in networks]
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
        after()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL of two softmaxes, the mean over a batch."""
    return kl_div(student.log_softmax(dim=1), teacher.detach().log_softmax(dim=1), log_target=True, reduction="batchmean")


# ---------------------------------------------------------------------------------------------------------- the bare loops


class Mutual:
    """FML: two networks."""

    def __init__(self) -> None:
        self.personal, self.meme = CNN1(10), CNN5(10)

    def __call__(self) -> None:
        """A turn."""
        train(self.loss, self.personal, self.meme)

    def loss(self, batch: Batch) -> Tensor:
        """Of both networks."""
        x, y = batch
        p, q = self.personal(x), self.meme(x)
        return (cross_entropy(p, y) + cross_entropy(q, y) + divergence(q, p) + divergence(p, q)) / 2


class Distilling:
    """FedKD: two networks, and the factors of what has changed in one of them."""

    def __init__(self) -> None:
        self.mentor, self.mentee = CNN1(10), CNN5(10)
        self.projection = nn.Linear(500, 500, bias=False)

    def __call__(self) -> None:
        """A turn."""
        before = copy.deepcopy(self.mentee.state_dict())
        train(self.loss, self.mentor, self.mentee, self.projection)
        compressed({name: tensor - before[name] for name, tensor in self.mentee.state_dict().items()}, 0.95)

    def loss(self, batch: Batch) -> Tensor:
        """Of both networks."""
        x, y = batch
        h_t, h_s = self.mentor.encode(x), self.mentee.encode(x)
        t, s = self.mentor.head(h_t), self.mentee.head(h_s)
        own = cross_entropy(t, y) + cross_entropy(s, y)
        return own + (divergence(t, s) + divergence(s, t) + mse_loss(self.projection(h_s), h_t)) / own.detach()


class Gated:
    """pFedGate: one network and a gate."""

    def __init__(self) -> None:
        made = PFedGate(ResNet8, 10)
        made.configure_model()
        self.network, self.gate, self.blocks = made.backbone, made.gate, made.blocks

    def __call__(self) -> None:
        """A turn."""
        train(self.loss, self.network, self.gate)

    def loss(self, batch: Batch) -> Tensor:
        """Of the sparse network."""
        x, y = batch
        importance, scale = self.gate(x)
        by = scale * self.blocks.keep(importance, 0.5) * (1 + (importance - importance.detach()))
        return cross_entropy(functional_call(self.network, self.blocks.scaled(dict(self.network.named_parameters()), by), (x,)), y)


class Drawn:
    """FedAMP: one network, drawn to another one."""

    def __init__(self) -> None:
        self.network, self.cloud = CNN1(10), CNN1(10)

    def __call__(self) -> None:
        """A turn."""
        train(self.loss, self.network, after=self.approach)

    def loss(self, batch: Batch) -> Tensor:
        """Of the network."""
        x, y = batch
        return cross_entropy(self.network(x), y)

    @torch.no_grad()
    def approach(self) -> None:
        """The proximal step."""
        for own, anchor in zip(self.network.parameters(), self.cloud.parameters(), strict=True):
            own.lerp_(anchor, 1e-6)


class Cautious:
    """FedCAC: one network, and what half of its entries are critical."""

    def __init__(self) -> None:
        self.network = CNN1(10)

    def __call__(self) -> None:
        """A turn."""
        before = [p.detach().clone() for p in self.network.parameters()]
        train(self.loss, self.network)
        masks = []
        for own, start in zip(self.network.parameters(), before, strict=True):
            effect = ((own.detach() - start) * own.detach()).abs().flatten()
            masks.append(effect >= effect.kthvalue(effect.numel() - effect.numel() // 2 + 1).values)
        pack_bits(torch.cat(masks))

    def loss(self, batch: Batch) -> Tensor:
        """Of the network."""
        x, y = batch
        return cross_entropy(self.network(x), y)


class Taught:
    """FD: one network, and its mean outputs by label."""

    def __init__(self) -> None:
        self.network, self.teachers = CNN1(10), torch.rand(10, 10).softmax(dim=1)
        self.outputs = torch.zeros(10, 10)

    def __call__(self) -> None:
        """A turn."""
        train(self.loss, self.network)

    def loss(self, batch: Batch) -> Tensor:
        """Of labels and teachers."""
        x, y = batch
        logits = self.network(x)
        self.outputs += one_hot(y, 10).T.float() @ logits.detach().softmax(dim=1)
        return cross_entropy(logits, y) + cross_entropy(logits, self.teachers[y])


class Near:
    """FedProto: one network near prototypes, and a pass that finds its own."""

    def __init__(self) -> None:
        self.network, self.prototypes = CNN1(10), torch.rand(10, 500)

    def __call__(self) -> None:
        """A turn."""
        train(self.loss, self.network)
        sums = torch.zeros(10, 500)
        with torch.no_grad():
            for x, y in batches(epochs=1):
                sums += one_hot(y, 10).T.float() @ self.network.encode(x)

    def loss(self, batch: Batch) -> Tensor:
        """Of labels and prototypes."""
        x, y = batch
        features = self.network.encode(x)
        return cross_entropy(self.network.head(features), y) + mse_loss(features, self.prototypes[y])


class SelfTaught:
    """pFedSD: one network, and a pass of what it was."""

    def __init__(self) -> None:
        self.network, self.teacher = CNN1(10), CNN1(10).eval()

    def __call__(self) -> None:
        """A turn."""
        train(self.loss, self.network)
        self.teacher.load_state_dict(self.network.state_dict())

    def loss(self, batch: Batch) -> Tensor:
        """Of labels and the teacher."""
        x, y = batch
        logits = self.network(x)
        with torch.no_grad():
            taught = self.teacher(x)
        return cross_entropy(logits, y) + divergence(taught, logits)


@dataclass(frozen=True)
class Case:
    """A method, the bare loop of what it computes, and what that is."""

    method: Callable[[], FederatedModule]
    bare: Callable[[], Callable[[], None]]
    networks: str


CASES = {
    "FML": Case(lambda: FML(CNN1, 10, meme=CNN5, epochs=EPOCHS), Mutual, "CNN-1 and CNN-5"),
    "FedKD": Case(lambda: FedKD(CNN1, 10, mentee=CNN5, epochs=EPOCHS), Distilling, "CNN-1 and CNN-5, and factors"),
    "PFedGate": Case(lambda: PFedGate(ResNet8, 10, epochs=EPOCHS), Gated, "ResNet-8 and a gate"),
    "FedAMP": Case(lambda: FedAMP(CNN1, 10, epochs=EPOCHS), Drawn, "CNN-1, drawn to another one"),
    "FedCAC": Case(lambda: FedCAC(CNN1, 10, epochs=EPOCHS), Cautious, "CNN-1 and a mask"),
    "FD": Case(lambda: FD(CNN1, 10, epochs=EPOCHS), Taught, "CNN-1 and its mean outputs"),
    "FedProto": Case(lambda: FedProto(CNN1, 10, epochs=EPOCHS), Near, "CNN-1, near prototypes"),
    "PFedSD": Case(lambda: PFedSD(CNN1, 10, epochs=EPOCHS), SelfTaught, "CNN-1 and its former self"),
}


def compare(name: str, case: Case, pairs: int, folder: Path) -> None:
    """Print the paired ratio of one method, whose server may keep something in a folder."""
    data, template, bare = new_data(), case.method(), case.bare()
    data.setup()
    template.configure_model()
    server = template.configure_server(data.clients)
    server.attach_storage(ClientStore(folder, 2**30), RoundStore(folder / "scratch", 2**30))
    worker = Worker(template, data, partial(L.Trainer, accelerator="cpu", devices=1), seed=0)
    ratios, seconds, private = [], [], None
    for number in range(pairs + 1):
        server.on_round_start(number + 1, data.clients)
        turn = Turn("fit", data.clients[0], number + 1, server.broadcast(data.clients[0]))
        start = perf_counter()
        result = worker.run_turn(turn, private)
        federated = perf_counter() - start
        private = result.private
        server.aggregate([replace(result.update, client=1)])
        start = perf_counter()
        bare()
        by_hand = perf_counter() - start
        if number:  # the first pair warms up
            ratios.append(federated / by_hand)
            seconds.append((federated, by_hand))
    of_turn, of_loop = (statistics.median(times) for times in zip(*seconds, strict=True))
    print(
        f"{name} ({case.networks}): turn {of_turn:.2f} s, bare loop {of_loop:.2f} s (medians); ratio: median "
        f"{statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}; at most {GOAL}",
        flush=True,
    )


def main() -> None:
    """Print a line per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.pairs} pairs")
    with quiet_lightning():
        for name in options.methods:
            with tempfile.TemporaryDirectory() as folder:
                compare(name, CASES[name], options.pairs, Path(folder))


if __name__ == "__main__":
    main()
