"""The process that cells of a sweep are forked from: ``python -m lightning_fed.cli.fork_server FILE_DESCRIPTOR``.

It imports what runs need, forks, and does nothing else: no tensor, no thread, no GPU, which forks could not share. A fork runs
``python -m lightning_fed`` to its end, as a process that was started for it would.
"""

import atexit
import contextlib
import gc
import os
import runpy
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lightning_fed.experiments.sweep.forks import CellRequest

OF_LOGGERS = ("matplotlib.backends.backend_agg", "tensorboard.plugins.hparams.summary_v2", "torch.utils.tensorboard")
"""What a run that logs imports later."""

PAUSE = 0.02
"""Seconds between two looks at whether a fork has ended."""


class FastExit:
    """Ends the process when all that is to be done at its end is done, without taking apart what it has imported: a fork would copy
    the memory of all of it, to decrease a counter in each object.

    Attributes:
        code: exit code of the process.
    """

    def __init__(self) -> None:
        self.code = 0
        atexit.register(self)  # what is registered first comes last

    def __call__(self) -> None:
        """End."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


def warm_up() -> None:
    """Import what a run needs, and have the parser read the signatures and docstrings of the options that all runs have, which
    takes it half a second. What the environment says of them is for the runs.
    """
    from lightning_fed.cli.dry_run import ParseOnly
    from lightning_fed.cli.environment import PREFIX

    for module in OF_LOGGERS:
        import_module(module)
    given = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIX)}
    ParseOnly(["fit", "--data", "Digits", "--model", "FedAvg", "--model.backbone", "MLP"])
    os.environ.update(given)
    keep()


def keep() -> None:
    """Take what there is out of garbage collection: a collection in a fork would write to all of its memory, and so copy it."""
    gc.collect()
    gc.freeze()


def serve(connection: "Connection") -> "CellRequest | None":
    """Carry out requests. Returns in each fork, with what that is to play; in the server itself when the sweep is gone."""
    from multiprocessing.reduction import recv_handle

    from lightning_fed.experiments.sweep.forks import CellRequest, Ended, ImportRequest, SignalRequest

    playing: dict[int, int] = {}  # process ids by number
    while True:
        try:
            request = connection.recv() if connection.poll(PAUSE) else None
            if isinstance(request, CellRequest):
                lock = recv_handle(connection)  # which a fork goes on holding
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    return request
                os.close(lock)
                playing[request.number] = pid
            elif isinstance(request, SignalRequest) and request.number in playing:
                give = os.killpg if request.signal == signal.SIGKILL else os.kill
                give(playing[request.number], request.signal)
            elif isinstance(request, ImportRequest):
                for name in request.modules:
                    with contextlib.suppress(ImportError):  # whoever needs it says so
                        import_module(name)
                keep()
            for number, pid in list(playing.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del playing[number]
                    connection.send(Ended(number, os.waitstatus_to_exitcode(status)))
        except (EOFError, ConnectionError):
            return None


def play(request: "CellRequest", at_exit: FastExit) -> None:
    """Be the process of a cell."""
    os.setsid()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a sweep in the background of a shell ignores
    log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(request.variables)
    sys.argv[1:] = request.args
    at_exit.code = 1  # of what is not caught
    try:
        runpy.run_module("lightning_fed", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        at_exit.code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    at_exit.code = 0


def main() -> None:
    """Serve until the sweep is gone."""
    at_exit = FastExit()
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a queue may give it to all processes of a job; it is meant for runs
    connection = Connection(int(sys.argv[1]))
    warm_up()
    connection.send("ready")
    request = serve(connection)
    if request is not None:
        play(request, at_exit)


if __name__ == "__main__":
    main()
