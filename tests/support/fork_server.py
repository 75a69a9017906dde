"""A process that has modules in memory and is forked where a Python that imports them would be started.

Its forks are what tests/support/forked_python.py stands for: they get its files, folder, environment and arguments, and
a session of their own where it has one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tests.support.paths import ROOT

CLIENT = Path(__file__).with_name("forked_python.py")


def forked_python(server: Path) -> list[str]:
    """The command that is Python, forked from the process that listens at `server`."""
    return [sys.executable, "-SE", str(CLIENT), str(server)]


def start_at(address: Path, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a module that serves at `address`, with the descriptor and the owner that `serve` takes as its first
    arguments: it ends with this process.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        command = [sys.executable, "-m", module, str(listener.fileno()), str(os.getpid()), *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])


@contextlib.contextmanager
def python_with(address: Path, *modules: str) -> Iterator[list[str]]:
    """The command of a Python that has these modules in memory."""
    with start_at(address, "tests.support.fork_server", *modules) as process:
        yield forked_python(address)
        process.kill()


def serve(listener: socket.socket, owner: int) -> None:
    """Answer each connection with a fork, until the process `owner` ends."""
    gc.collect()
    gc.freeze()  # what forks share stays shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the forks and their starters
    ended = os.pidfd_open(owner)
    forks: dict[int, tuple[socket.socket, int]] = {}  # by the descriptor that becomes readable at a fork's end
    try:
        while True:
            poll = select.poll()
            for file in (listener.fileno(), ended, *forks):
                poll.register(file, select.POLLIN)
            for connection, _ in forks.values():
                poll.register(connection, select.POLLRDHUP)  # not what is sent on it: the fork reads that
            ready = {file for file, _ in poll.poll()}
            if ended in ready:
                return
            for end, (connection, pid) in list(forks.items()):
                if ready & {end, connection.fileno()}:
                    del forks[end]
                    _finish(connection, pid, gone=end not in ready)
                    os.close(end)
            if listener.fileno() in ready:
                connection, _ = listener.accept()
                if not (pid := os.fork()):
                    for other in (listener, *(other for other, _ in forks.values())):
                        other.close()
                    _become(connection)
                forks[os.pidfd_open(pid)] = (connection, pid)
    finally:
        Path(listener.getsockname()).unlink(missing_ok=True)


def _finish(connection: socket.socket, pid: int, *, gone: bool) -> None:
    """Tell the other side how the fork has ended; kill the fork when the other side is `gone`."""
    if gone:
        own_session = os.getsid(pid) == pid
        (os.killpg if own_session else os.kill)(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    connection.close()


def _become(connection: socket.socket) -> NoReturn:
    """Be the Python that the other side asks for, in a child process."""
    code = 1
    try:
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(connection.makefile("rb").readline())
        if own_session := request["session"] != os.getsid(0):
            os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.sendall(f"fork {os.getpid()} {own_session:d}\n".encode())
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if numpy := sys.modules.get("numpy"):  # Python's own random numbers differ in each fork
            numpy.random.seed()
        _run(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _end_as_python_does()
        os._exit(code)


def _end_as_python_does() -> None:
    """Wait for threads, call what is to be called at exit, and write what is buffered."""
    for step in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            step()


def _run(arguments: list[str]) -> None:
    """Run `-c CODE` or `-m MODULE ARGUMENTS`. All output is written line by line, with and without -u."""
    sys.orig_argv = [sys.executable, *arguments]
    kind, what, *rest = arguments[1:] if arguments[0] == "-u" else arguments
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", f"a forked Python takes -c and -m, not {kind}"
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(what, vars(main))


if __name__ == "__main__":
    for name in sys.argv[3:]:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
