import logging
import os
from pathlib import Path

import pytest
from tiny import Net, new_data, new_federation, new_method

from lightning_fed.__main__ import main
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core import Phase
from lightning_fed.engines import Processes
from lightning_fed.methods import FedAvg
from lightning_fed.system.logs import LOGGER, Terminal, each_line_once, lines_shown


@pytest.fixture(autouse=True)
def own_level() -> object:
    """The logger is every test's."""
    yield
    LOGGER.setLevel(logging.NOTSET)


def fit(**options: object) -> None:
    new_federation(1, progress=True, **options).fit(new_method("FedAvg"), new_data(2))


def test_lines_of_a_run_are_printed_without_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    said = capsys.readouterr()
    assert said.out.startswith("Starting a run that is not written: FedAvg with Net on ")
    assert "\nRound 1/1: accuracy " in said.out
    assert said.err == ""


def test_a_level_silences_them(capsys: pytest.CaptureFixture[str]) -> None:
    LOGGER.setLevel(logging.WARNING)
    fit()
    said = capsys.readouterr().out
    assert "Starting" not in said
    assert "Round 1/1" not in said


def test_errors_go_to_standard_error_and_warnings_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    with lines_shown():
        logging.getLogger("lightning_fed.storage").warning("50 % lost")
        logging.getLogger("lightning_fed.deployment").error("gone")
    assert capsys.readouterr() == ("50 % lost\n", "gone\n")


def test_within_a_check_of_many_runs_a_line_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("lightning_fed.data")
    with lines_shown():
        with each_line_once():
            for name in "abab":
                log.warning("%s has no end", name)
        log.warning("%s has no end", "a")
    assert capsys.readouterr().out == "a has no end\nb has no end\na has no end\n"


@pytest.mark.parametrize("within", ["the command line", "a run that fails"])
def test_nothing_is_left_behind_and_nothing_is_said_twice(within: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(FederationCallback):
        def on_fit_end(self, run: RunView) -> None:
            raise RuntimeError("no")

    before = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    if within == "the command line":
        with lines_shown():
            fit()
    else:
        with pytest.raises(RuntimeError, match="no"):
            fit(callbacks=[Failing()])
    assert capsys.readouterr().out.count("Round 1/1: ") == 1
    assert (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == before


def test_a_handler_of_the_users_gets_them_too() -> None:
    said: list[str] = []

    class ClientStates(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    LOGGER.addHandler(kept := ClientStates())
    try:
        fit()
    finally:
        LOGGER.removeHandler(kept)
    assert any(line.startswith("Round 1/1: ") for line in said)


class Noting(FedAvg):
    """A method that writes down what is logged where its clients are trained."""

    def phases(self) -> list[Phase]:
        levels = [level for level in (logging.INFO, logging.WARNING) if LOGGER.isEnabledFor(level)]
        with Path("levels").open("a") as notes:
            notes.write(f"{os.getpid()} {levels} {[type(handler).__name__ for handler in LOGGER.handlers]}\n")
        return super().phases()


@pytest.mark.often(1)
@pytest.mark.parametrize(("level", "logged"), [(logging.WARNING, "[30]"), (logging.NOTSET, "[20, 30]")])
def test_workers_log_what_this_process_does(level: int, logged: str) -> None:
    """A worker's own output goes where that of the first one in this process went."""
    LOGGER.setLevel(level)
    new_federation(1, engine=Processes(1)).fit(Noting(Net), new_data(2))
    of_workers = {
        line.partition(" ")[2] for line in Path("levels").read_text().splitlines() if not line.startswith(f"{os.getpid()} ")
    }
    assert of_workers == {f"{logged} ['Terminal']"}


@pytest.mark.parametrize(("debug", "traced"), [("1", True), ("0", False), (None, False)])
@pytest.mark.parametrize("args", [["fitt"], ["fit", "--federation.rounds", "many"]], ids=["ours", "the parser's"])
def test_tracebacks_are_shown_on_demand(
    args: list[str], debug: str | None, traced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if debug is not None:
        monkeypatch.setenv("LIGHTNING_FED_DEBUG", debug)
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert ("Traceback (most recent call last)" in said) == traced
    assert said.splitlines()[-1].startswith("lightning-fed: error: ")
    assert traced or len(said.splitlines()) == 1


def test_importing_adds_no_handler() -> None:
    assert not any(isinstance(handler, Terminal) for handler in LOGGER.handlers)
