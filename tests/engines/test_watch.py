"""When something is said of a turn, and when it is given up, in seconds that only the test passes."""

from typing import Any

from lightning_fed.core.messages import Broadcast, Turn
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.watch import FIRST, LEAST, START, TIMES, Watch


def turn(verb: Any = "fit") -> Turn:
    return Turn(verb, ClientInfo(0, 1, 0, 1, (1,)), 1, Broadcast({}))


def test_what_is_too_long_follows_from_the_turns_of_its_kind() -> None:
    watch = Watch(None)
    watch.look({0: turn(), 1: turn("evaluate")})
    assert watch.pause() == FIRST
    watch.waited(9)
    watch.ended(0, True)
    watch.ended(1, True)
    assert watch.pause() is None  # nobody is at anything
    for verb, seconds in (("fit", 1), ("fit", 20), ("evaluate", 1)):
        watch.look({0: (first := turn(verb))})
        assert watch.pause() == 9 * TIMES  # until the longer turn has ended
        watch.waited(seconds)
        watch.look({0: first})
        assert watch.pause() == 9 * TIMES - seconds
        watch.ended(0, seconds < 20)  # a death says nothing of how long turns take
    watch = Watch(None)
    watch.look({0: turn()})
    watch.waited(0.1)
    watch.ended(0, True)
    watch.look({0: turn()})
    assert watch.pause() == LEAST


def test_it_is_said_again_when_it_has_taken_twice_as_long() -> None:
    watch, mine = Watch(None), turn()
    watch.look({0: mine})
    said = []
    for _ in range(3):
        pause = watch.pause()
        assert pause is not None
        watch.waited(pause)
        (late,) = watch.overdue()
        said.append((late.turn is mine, late.seconds, late.longest, late.dead))
        assert watch.overdue() == []
    assert said == [(True, FIRST, None, False), (True, 2 * FIRST, None, False), (True, 4 * FIRST, None, False)]


def test_the_timeout_is_for_turns_and_counts_from_the_start_of_each() -> None:
    watch = Watch(5)
    watch.look({0: None, 1: turn()})
    watch.waited(4)
    watch.look({0: None, 1: (second := turn())})
    assert watch.pause() == 5
    watch.waited(5)
    (late,) = watch.overdue()
    assert (late.worker, late.turn, late.seconds, late.dead) == (1, second, 5, True)
    watch.look({0: None})
    assert watch.pause() == START - 9
