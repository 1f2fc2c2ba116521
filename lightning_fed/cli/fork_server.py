"""The process from which a sweep's runs are forked: ``python -m lightning_fed.cli.fork_server FILE_DESCRIPTOR``.

It imports what runs need, forks, and does nothing else: no tensor, no thread, no GPU, which forks could not share. A fork runs
``python -m lightning_fed`` to its end, like a process that was started for it.
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
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

    from lightning_fed.experiments.sweep.forks import CellRequest

OF_LOGGERS = ("matplotlib.backends.backend_agg", "tensorboard.plugins.hparams.summary_v2", "torch.utils.tensorboard")
"""Modules that a run with loggers imports later."""

PAUSE = 0.02
"""Seconds between checks whether a fork has ended."""


class FastExit:
    """Ends the process after all exit handlers, without deallocating objects: a fork would copy all of their memory to decrease
    reference counts.

    Attributes:
        code: exit code of the process.
    """

    def __init__(self) -> None:
        self.code = 0
        atexit.register(self)  # handlers that are registered first run last

    def __call__(self) -> None:
        """End the process."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


def warm_up() -> None:
    """Import what a run needs, and let the parser read signatures and docstrings of the common options, which takes half a second.
    Options in environment variables are left to the runs.
    """
    from lightning_fed.cli.checks import PREFIX
    from lightning_fed.cli.dry_run import ParseOnly

    for module in OF_LOGGERS:
        import_module(module)
    given = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIX)}
    ParseOnly(["fit", "--data", "Digits", "--model", "FedAvg", "--model.backbone", "MLP"])
    os.environ.update(given)
    keep()


def keep() -> None:
    """Exclude existing objects from garbage collection: a collection in a fork would write to all memory, and so copy it."""
    gc.collect()
    gc.freeze()


def serve(connection: "Connection") -> "CellRequest | None":
    """Handle requests. Returns in each fork, with the fork's request; in the server itself when the sweep has ended."""
    from multiprocessing.reduction import recv_handle

    from lightning_fed.experiments.sweep.forks import CellRequest, Ended, ImportRequest, SignalRequest

    playing: dict[int, int] = {}  # process ids by number
    while True:
        try:
            request = connection.recv() if connection.poll(PAUSE) else None
            if isinstance(request, CellRequest):
                lock = recv_handle(connection)  # the fork keeps holding it
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
                    with contextlib.suppress(ImportError):  # reported by the code that needs it
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
    """Run as the process of a cell."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # blocked in the server; it may have arrived already
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a sweep in the background of a shell ignores SIGINT
    log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    run_program(request.args, request.variables, at_exit)


def run_program(args: "Sequence[str]", variables: "Mapping[str, str]", at_exit: FastExit, module: str = "lightning_fed") -> None:
    """Run ``python -m`` this module to its end.

    Args:
        args: its arguments.
        variables: to be set in its environment.
        at_exit: gets its exit code.
        module: the module.
    """
    os.environ.update(variables)
    sys.argv[1:] = args
    at_exit.code = 1  # for uncaught errors
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        at_exit.code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    at_exit.code = 0


def main() -> None:
    """Serve until the sweep has ended."""
    at_exit = FastExit()
    from multiprocessing.connection import Connection

    connection = Connection(int(sys.argv[1]))
    warm_up()
    connection.send("ready")
    request = serve(connection)
    if request is not None:
        play(request, at_exit)


if __name__ == "__main__":
    main()
