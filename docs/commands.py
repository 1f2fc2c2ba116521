#!/usr/bin/env python3
"""What ``lightning-fed`` is in the notebooks when the site is built, and what their kernel is: it asks one process, which has
imported torch and Lightning, for a fork, which runs the command. A sweep starts its runs in the same way.

conf.py starts that process, ``commands.py FILE_DESCRIPTOR``, and sets ``LIGHTNING_FED_COMMANDS`` to its socket. The kernel is
``commands.py -m ipykernel_launcher …``.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

LONGEST = 1 << 17
"""Maximum number of bytes of a request: arguments, folder and environment."""


def ask(module: str, args: list[str]) -> int:
    """Have ``python -m`` this module run. Returns its exit code."""
    request, path = json.dumps([module, args, str(Path.cwd()), dict(os.environ)]).encode(), os.environ["LIGHTNING_FED_COMMANDS"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [request], [0, 1, 2])
        return connection.recv(1)[0]


def serve(listener: socket.socket) -> None:
    """Fork for each request, twice: one process waits for the other, which runs the command."""
    import lightning_fed.cli.fork_server  # noqa: F401 - which imports what commands need
    from lightning_fed.experiments.sweep.forks import run_program

    connection, _ = listener.accept()
    while os.fork():
        connection.close()
        with contextlib.suppress(ChildProcessError):  # all have ended
            os.waitpid(-1, os.WNOHANG)
        connection, _ = listener.accept()
    request, files, _, _ = socket.recv_fds(connection, LONGEST, 3)
    if runs := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(runs, 0)[1]) % 256
        with contextlib.suppress(BrokenPipeError):  # who asked for a kernel may not wait for its end
            connection.send(bytes([code]))
        os._exit(0)
    module, args, folder, variables = json.loads(request)
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))  # the old ones were files, perhaps
    os.chdir(folder)
    os.environ.clear()
    sys.path[:0] = variables.get("PYTHONPATH", "").split(os.pathsep)
    run_program(args, variables, module)


if __name__ == "__main__":
    if Path(sys.argv[0]).name == "lightning-fed":
        sys.exit(ask("lightning_fed", sys.argv[1:]))
    if sys.argv[1] == "-m":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a kernel gets that is asked to end
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    serve(socket.socket(fileno=int(sys.argv[1])))
