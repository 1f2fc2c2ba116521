"""A run that is asked to make room stops at its next checkpoint."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from tiny import CLASSES, Net, new_data, new_federation, same
from tiny_rounds import AfterRounds

from lightning_fed.callbacks import FederationCallback
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg
from lightning_fed.system.signals import Preempted, first_signal

asking = AfterRounds(lambda run: signal.raise_signal(signal.SIGUSR1) if run.round == 1 else None)
"""Asks it to."""


def federation(callbacks: list[FederationCallback], **options: Any) -> Federation:
    """Of five rounds. The last one is measured alone, so that no earlier one is the best so far."""
    return new_federation(5, evaluate_every=0, callbacks=callbacks, **{"run_dir": "runs", "checkpoint_every": 2} | options)


def fit(federation: Federation) -> Federation:
    federation.fit(FedAvg(Net, CLASSES), new_data(2, 60), ckpt_path="last" if federation.run_dir else None)
    return federation


def test_it_stops_at_its_next_checkpoint_and_goes_on_as_if_it_had_not() -> None:
    whole = fit(federation([], run_dir=None))
    stopped = federation([asking])
    with pytest.raises(Preempted) as ended:
        fit(stopped)
    assert (ended.value.code, stopped.run.round) == (75, 2)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    continued = fit(federation([asking]))
    assert continued.run.folder == stopped.run.folder
    assert len(continued.run.history) == 5
    assert same(continued.run.server.state_dict(), whole.run.server.state_dict())


def test_without_checkpoints_it_plays_all_its_rounds() -> None:
    assert fit(federation([asking], checkpoint_every=0)).run.round == 5


def test_a_signal_that_somebody_else_handles_is_theirs() -> None:
    caught: list[int] = []
    handle: Callable[..., None] = lambda number, frame: caught.append(number)  # noqa: E731
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        fit(federation([asking]))
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught == [signal.SIGUSR1]


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """``nohup``."""
    before, heard = signal.signal(signal.SIGHUP, signal.SIG_IGN), list[int]()
    try:
        with first_signal(heard.append):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == []
