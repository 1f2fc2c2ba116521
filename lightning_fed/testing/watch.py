"""Engines that record or shuffle turns, and a callback that interrupts a run."""

import random
from collections.abc import Iterable, Iterator

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.engines import InProcess
from lightning_fed.engines.worker import Worker
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.storage.client_store import ClientStore


class Recording(InProcess):
    """Records turns, their updates, and its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []
        self.updates: list[ClientUpdate] = []
        self._worker: Worker | None = None

    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        super().open(spec, states)
        assert self._opened is not None
        self._worker, _ = self._opened

    @property
    def worker(self) -> Worker:
        """The worker that ran the turns, also after the run."""
        assert self._worker is not None, "open() comes first"
        return self._worker

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
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
        """Fit turns and their updates, of all rounds or of one."""
        pairs = zip(self.turns, self.updates, strict=True)
        return [(turn, update) for turn, update in pairs if turn.verb == "fit" and round in (None, turn.round)]


class Counting(InProcess):
    """Counts the FLOPs of networks with more parameters than ``small`` without values, and those of others with values."""

    def __init__(self, small: float) -> None:
        super().__init__()
        self.small = small

    def open(self, spec: WorkerSpec, states: ClientStore) -> None:
        super().open(spec, states)
        assert self._opened is not None
        self._opened[0].flops = FlopMeter(self.small)


class Shuffled(InProcess):
    """Runs turns in a random order."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        waiting = list(turns)
        order = list(range(len(waiting)))
        random.Random(4).shuffle(order)  # this seed also swaps two turns, unlike some others
        done = {place: next(iter(super(Shuffled, self).run([waiting[place]]))) for place in order}
        yield from (done[place] for place in range(len(waiting)))


class InterruptInRound(FederationCallback):
    """Simulates Ctrl-C after the round's first turn."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        if run.round == self.round:
            raise KeyboardInterrupt
