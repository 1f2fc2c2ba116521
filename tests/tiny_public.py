"""Public data for tiny federations, and what is trained on them."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from tiny import CLASSES, Recording, new_data, new_federation
from tiny_rounds import Losing
from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import OUTPUTS
from lightning_fed.data import InMemory
from lightning_fed.data.client_info import SERVER
from lightning_fed.federation.federation import Federation
from lightning_fed.seeding import derive_seed

PROXY = torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(9))


def public(labels: Tensor | None = None) -> InMemory:
    """These, with labels that nobody looks at."""
    return InMemory(PROXY, torch.zeros(50, dtype=torch.int64) if labels is None else labels, CLASSES)


def with_public(clients: int = 4, size: int = 160, **options: Any) -> InMemory:
    return new_data(clients, size, **{"public": public()} | options)


def fit(model: FederatedModule, data: InMemory | None = None, **options: Any) -> Federation:
    """Two rounds, measured at the end."""
    federation = new_federation(**{"rounds": 2, "evaluate_every": 0} | options)
    federation.fit(model, data or with_public())
    return federation


def public_epochs(
    data: InMemory, batch_size: int, *stream: int, examples: Tensor | None = None
) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """The public batches of a training, epoch by epoch."""
    module, epoch = data.public_set(batch_size, examples), 0
    module.order_seed = derive_seed(0, *stream)
    while True:
        loader = module.train_dataloader()
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield iter(loader)
        epoch += 1


def public_batches(data: InMemory, batch_size: int, steps: int, *stream: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many of them."""
    for epoch in public_epochs(data, batch_size, *stream):
        for batch in epoch:
            if not steps:
                return
            yield batch
            steps -= 1


def losing(servers: bool, place: int = 0) -> Losing:
    """Of the turns on public data, the server's or the clients', the one at ``place`` is lost."""
    left = count(place, -1)
    return Losing(lambda turn: turn.verb == "train_on_public" and (turn.client.id == SERVER) is servers and next(left) == 0)


def said_in(engine: Recording) -> list[Tensor]:
    """What each teacher said of the public data."""
    return [
        update.state[OUTPUTS] for turn, update in zip(engine.turns, engine.updates, strict=True) if turn.verb == "predict_public"
    ]
