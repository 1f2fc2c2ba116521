"""The table at the end of a run: on a screen of 80 columns, without colours where none are wanted."""

import re

import pytest
import rich
from rich.console import Console
from tiny import data_for, new_federation, new_method

from lightning_fed.callbacks.base import RunView
from lightning_fed.callbacks.progress import ProgressBar, summary_table
from lightning_fed.core.messages import ClientUpdate

AMOUNTS = ("traffic/total_parameters", "traffic/total_bytes", "compute/total_flops", "target/bytes", "target/flops")


@pytest.mark.often(1)
@pytest.mark.parametrize("method", ["FedAvgFT", "SplitMix"])
def test_no_line_is_broken_at_80_columns(method: str) -> None:
    """Whatever the numbers."""
    federation = new_federation(1, evaluate_every=1, target=0.0, unseen=[0])
    federation.fit(new_method(method), data_for(method))
    run = federation.run
    run.evaluate_every, run.rounds = 100, 1000
    run.history[-1] |= dict.fromkeys(AMOUNTS, 8.76e14) | {"selected/round": 1000.0, "target/round": 1000.0, "seconds/fit": 9e6}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(summary_table(run))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "" not in rows
    assert len(rows) == summary_table(run).row_count
    (unseen,) = [line.split("│")[2].strip() for line in lines if "unseen: personalized" in line]
    assert unseen == f"{100 * run.history[-1]['unseen/personalized/test_accuracy/mean']:.2f} %"
    assert any("after aggregation, seen clients" in row for row in rows)


def test_each_accuracy_is_a_percentage() -> None:
    """Also that of a model which a client adapts before it is measured."""
    federation = new_federation(1)
    federation.fit(new_method("PerFedAvg"), data_for("PerFedAvg"))
    rows = list(summary_table(federation.run).columns[1].cells)
    assert federation.run.metric == "adapted_accuracy"
    assert rows[0].endswith(" %")


@pytest.mark.parametrize("no_color", [True, False])
def test_colours_are_those_that_are_wanted(
    no_color: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rich, "_console", None)  # the one that bars are drawn on, as of now
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    federation = new_federation(1, callbacks=[ProgressBar()])
    federation.fit(new_method("FedAvg"), data_for("FedAvg"))
    said = capsys.readouterr().out
    colours = re.findall(r"\x1b\[(?:\d+;)*3[0-9](?:;\d+)*m|\x1b\[38;", said)
    assert bool(colours) != no_color


def test_the_bar_advances_within_a_round() -> None:
    """A federation has long rounds: a bar that only moves at their end looks stuck."""
    seen: list[float] = []

    class Watched(ProgressBar):
        def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
            super().on_turn_end(run, update)
            assert self._progress is not None
            seen.append(self._progress.tasks[0].completed)

    federation = new_federation(2, callbacks=[Watched()])
    federation.fit(new_method("FedAvg"), data_for("FedAvg"))
    clients = len(federation.run.clients)
    assert seen == pytest.approx([before + (turn + 1) / (clients + 1) for before in range(2) for turn in range(clients)])
