"""Progress of a sweep: a bar on a terminal, lines elsewhere."""

from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from lightning_fed.experiments.sweep.folder import OVER, CellRecord


class SweepProgress:
    """A bar over all rounds of all runs, with the remaining time."""

    def __init__(self, runs: int, rounds: int, console: Console) -> None:
        self.left: float | None = None
        self._console, self._runs = console, runs
        self._over = 0  # number of ended runs
        self._rounds = 0  # number of their rounds
        self._bar = Bar(
            TextColumn("Runs {task.fields[runs]}"),
            BarColumn(),
            TextColumn("rounds"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=rounds, runs=f"0/{runs}", now="", left="–")

    def __enter__(self) -> "SweepProgress":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def began(self, name: str) -> None:
        self._say(f"{name}: started")

    def passed_over(self, name: str, status: str, rounds: int) -> None:
        """A run has ended already, or is running in another process."""
        self._say(f"{name}: {'is being run by another sweep' if status not in OVER else f'{status} before'}")
        if status in OVER:
            self._count(rounds)

    def ended(self, name: str, result: CellRecord, rounds: int) -> None:
        self._count(rounds)
        left = f", about {clock(self.left)} left" if self.left and self._over < self._runs else ""
        error = f": {result.error}" if result.error else ""
        self._say(f"{name}: {result.status} after {clock(result.seconds)}{error}, {self._over} of {self._runs} runs{left}")

    def at(self, playing: Mapping[str, tuple[int, int]]) -> None:
        """Progress of the running cells: finished rounds, and their number."""
        now = ", ".join(f"{name} {done}/{rounds}" for name, (done, rounds) in playing.items())
        completed = self._rounds + sum(done for done, _ in playing.values())
        left = clock(self.left) if self.left is not None else "–"
        self._bar.update(self._task, completed=completed, runs=f"{self._over}/{self._runs}", now=now, left=left)

    def _count(self, rounds: int) -> None:
        self._over += 1
        self._rounds += rounds

    def _say(self, line: str) -> None:
        """Print a line; on a terminal only errors, because it has the bar."""
        if not self._console.is_terminal or ": failed" in line or "another sweep" in line:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
