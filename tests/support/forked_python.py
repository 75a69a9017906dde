"""A Python that starts at once: a fork of a process that has modules in memory (tests/support/fork_server.py).

A program, `forked_python.py SERVER -c CODE` or `... -m MODULE ARGUMENTS`, which runs without site-packages. The fork of
the process that listens at SERVER gets the files, the folder, the environment and the arguments of this one, which
passes signals on and ends as the fork does. When this one is killed, so is the fork.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(server: str, *arguments: str) -> None:
    """Does not return: ends with the fork's exit code, or by the signal that has ended the fork."""
    early: list[int] = []  # signals before the fork is there
    numbers = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, lambda received, _: early.append(received))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "session": os.getsid(0)}
    socket.send_fds(connection, [b"f"], [0, 1, 2])
    connection.sendall(json.dumps(request).encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1):  # whoever has their other ends sees when the fork ends
        os.dup2(nowhere, file)
    answers = connection.makefile("r")
    code = answers.readline()
    if code.startswith("fork "):
        pid, own_session = map(int, code.split()[1:])
        for number in numbers:
            from_terminal = number in (signal.SIGINT, signal.SIGHUP) and not own_session  # it reaches the fork, too
            signal.signal(number, signal.SIG_IGN if from_terminal else lambda received, _: os.kill(pid, received))
        for missed in early:
            os.kill(pid, missed)
        code = answers.readline()
    if not code:
        sys.exit(f"{server}: the process to fork from has ended")
    if int(code) < 0:
        if -int(code) in PASSED_ON:
            signal.signal(-int(code), signal.SIG_DFL)
        os.kill(os.getpid(), -int(code))
    os._exit(int(code))


if __name__ == "__main__":
    main(*sys.argv[1:])
