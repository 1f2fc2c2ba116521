"""Sites in this process, and a link to them that loses, delays and repeats what it is told to."""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiny import data_for, new_federation, new_method, quick_trainer

from lightning_fed.core.module import FederatedModule
from lightning_fed.deployment.data import DataAtSites
from lightning_fed.deployment.engine import Sites
from lightning_fed.deployment.link import Broken, Link
from lightning_fed.deployment.site import OneClient, Site
from lightning_fed.deployment.wire import VerbSettings, unpack
from lightning_fed.engines.compression import NONE, Compression
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.tensors import State

STUDY = VerbSettings.of({"model.class_path": "Tiny", "seed_everything": 0})
NAMES = ("FedAvg", "PFedLoRA", "FedHM", "PF2LoRA")
"""A whole network; private ones; statistics; private adapters with the moments of their optimizer."""


def data_of(name: str, num_clients: int = 3) -> Any:
    return data_for(name, num_clients=num_clients, size=100)


def new_site(
    name: str,
    client: int,
    folder: Path | str = "sites",
    settings: VerbSettings = STUDY,
    seed: int = 0,
    compression: Compression = NONE,
    **options: Any,
) -> Site:
    """The site of one of three clients, as if it had been started now."""
    spec = WorkerSpec(
        new_method(name, **options), OneClient(data_of(name), client, client), quick_trainer, seed, compression=compression
    )
    with quiet_lightning():
        return Site(spec, client, settings, Path(folder) / str(client))


Fault = Callable[[int, dict[str, Any], Callable[[], bytes]], "bytes | Broken | None"]
"""What becomes of a message: of the client, the message's head, and what has the site answer it."""


def undisturbed(client: int, head: dict[str, Any], answer: Callable[[], bytes]) -> bytes:
    return answer()


class Memory(Link):
    """Carries messages to sites in this process.

    Args:
        sites: by client.
        fault: what becomes of messages.
    """

    def __init__(self, sites: dict[int, Site], fault: Fault = undisturbed) -> None:
        self.sites = sites
        self.fault = fault
        self.away: set[int] = set()
        self.sent: list[tuple[int, dict[str, Any], State]] = []
        self.answers: dict[str, bytes | Broken | None] = {}
        self.answered: list[tuple[dict[str, Any], State]] = []

    def online(self) -> Collection[int]:
        return self.sites.keys() - self.away

    def send(self, client: int, message: bytes, seconds: float) -> str:
        head, tensors = unpack(message, "The test's")
        self.sent.append((client, head, tensors))
        message_id = str(len(self.sent))
        self.answers[message_id] = self.fault(client, head, partial(self.sites[client].answer, message))
        return message_id

    def poll(self, message_id: str) -> bytes | Broken | None:
        answer = self.answers[message_id]
        if isinstance(answer, bytes):
            with suppress(FederationError):  # which the server has to see itself
                self.answered.append(unpack(answer, "The test's"))
        return answer


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def linked(name: str, fault: Fault = undisturbed, **options: Any) -> Memory:
    return Memory({client: new_site(name, client, **options) for client in range(3)}, fault)


def fit(
    name: str | FederatedModule,
    link: Link,
    rounds: int = 3,
    patience: dict[str, float] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Federation:
    """Two of three clients in a round, everybody measured at the end."""
    settings: dict[str, Any] = {"participation": 0.7, "evaluate_every": 0} | options
    waits: dict[str, Any] = {"wait": 5.0, "deadline": 5.0, "poll": 0.1} | (patience or {})
    engine = Sites(link, 3, STUDY, **waits)
    federation = new_federation(rounds, engine=engine, **settings)
    model = new_method(name) if isinstance(name, str) else name
    data = data_of(name) if isinstance(name, str) else data_of("FedAvg")
    federation.fit(model, DataAtSites(data), ckpt_path)
    return federation


def kept_at(site: Site) -> dict[int, State]:
    """The private states that a site has, of the only run that it knows, by round."""
    runs = list(site.store.folder.glob("*"))
    assert len(runs) <= 1
    return {round: site.store.get(run.name, round) for run in runs for round in site.store._files(run.name)}


def flat(state: State) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in state.values()])
