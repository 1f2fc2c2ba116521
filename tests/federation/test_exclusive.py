"""One run at a time in a process, and nothing of it left behind."""

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, new_data, new_federation, same
from tiny_rounds import AfterRounds

from lightning_fed import FederationError
from lightning_fed.methods import FedAvg


def play(act: Callable[[], Any] = lambda: None, rounds: int = 1) -> Any:
    federation = new_federation(rounds, callbacks=[AfterRounds(lambda run: act())])
    federation.fit(FedAvg(Net, CLASSES), new_data(2, 60))
    return federation.run.server.state_dict()


def process() -> tuple[Any, ...]:
    """What a run changes in its process while it lasts."""
    levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric", "lightning_fed")]
    handlers = list(logging.getLogger("lightning_fed").handlers)
    return (
        levels,
        handlers,
        list(warnings.filters),
        threading.excepthook,
        torch.get_num_threads(),
        torch.random.get_rng_state().tolist(),
    )


def test_a_second_thread_is_refused_while_a_run_lasts() -> None:
    said: list[str] = []

    def try_another() -> None:
        def other() -> None:
            try:
                play()
            except FederationError as error:
                said.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    play(try_another)
    [message] = said
    assert message.startswith("Another thread of this process has a run in progress")
    assert "\n" not in message


def test_a_run_within_a_run_changes_neither() -> None:
    inner: list[Any] = []
    alone = play(rounds=2)
    within = play(lambda: inner.append(play(rounds=2)), rounds=2)
    assert same(within, alone)
    assert all(same(state, alone) for state in inner)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    def fail() -> None:
        if fails:
            play(lambda: (_ for _ in ()).throw(RuntimeError("inner")))

    before = process()
    for _ in range(2):  # one after the other
        try:
            play(fail)
        except RuntimeError:
            assert fails
    assert process() == before
