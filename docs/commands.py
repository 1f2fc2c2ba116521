#!/usr/bin/env python3
"""What ``lightning-fed`` is in the notebooks when the site is built: it asks one process, which has imported torch and Lightning,
for a fork, which runs the command. A sweep starts its runs in the same way.

conf.py starts that process, ``commands.py FILE_DESCRIPTOR``, and sets ``LIGHTNING_FED_COMMANDS`` to its socket.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

LONGEST = 1 << 17
"""Maximum number of bytes of a request: arguments, folder and environment."""


def ask(path: str) -> int:
    """Have this command run. Returns its exit code."""
    request = json.dumps([sys.argv[1:], str(Path.cwd()), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [request], [0, 1, 2])
        return connection.recv(1)[0]


def serve(listener: socket.socket) -> None:
    """Fork for each request, twice: one process waits for the other, which runs the command."""
    from lightning_fed.cli.fork_server import FastExit, run_program, warm_up

    at_exit = FastExit()
    warm_up()
    connection, _ = listener.accept()
    while os.fork():
        connection.close()
        with contextlib.suppress(ChildProcessError):  # all have ended
            os.waitpid(-1, os.WNOHANG)
        connection, _ = listener.accept()
    request, files, _, _ = socket.recv_fds(connection, LONGEST, 3)
    if runs := os.fork():
        connection.send(bytes([os.waitstatus_to_exitcode(os.waitpid(runs, 0)[1]) % 256]))
        os._exit(0)
    args, folder, variables = json.loads(request)
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    sys.path[:0] = variables.get("PYTHONPATH", "").split(os.pathsep)
    run_program(args, variables, at_exit)


if __name__ == "__main__":
    if Path(sys.argv[0]).name == "lightning-fed":
        sys.exit(ask(os.environ["LIGHTNING_FED_COMMANDS"]))
    serve(socket.socket(fileno=int(sys.argv[1])))
