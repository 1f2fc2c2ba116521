"""Rich's console, for output whose reader may leave."""

import sys

from rich.console import Console

from lightning_fed.system.streams import discard_rest


class UnreadConsole(Console):
    """A console that prints to nowhere once nobody reads any more; Rich's would end the process."""

    def on_broken_pipe(self) -> None:
        discard_rest(sys.stdout)
