"""Ranks that start at once: forked from a process that has torch, transformers and the trainer in memory.

Importing them takes a process seconds, several times as long as a tiny run trains. A rank gets what torchrun would give
it and is a process of its own, with its own process group and its own end. What torchrun itself does is for tests that
start it: of jobs, of the launcher and of whole runs. Ranks here also share the seed of Python's hashes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

REPOSITORY = ROOT
MODULES = (
    "pyarrow.dataset", "torch._dynamo",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch.nn.parallel", "torch.profiler", "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.siglip.modeling_siglip",
    "vlmpipe.trainer.evaluation.evaluate", "vlmpipe.trainer.feature_cache.encode",
    "vlmpipe.trainer.models.llava.family", "vlmpipe.trainer.strategies.registry", "vlmpipe.trainer.train",
)  # fmt: skip
SINGLE_THREADED = {"OMP_NUM_THREADS": "1"}  # also: a fork keeps no threads
GRACE_S = 5.0  # for the other ranks, once one has failed


class RankFailedError(Exception):
    """A rank ended with this exit code."""


class Preloaded:
    """The process that ranks are forked from. Safe to use from several threads, one request at a time."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        paths = (str(REPOSITORY), os.environ.get("PYTHONPATH"))
        command = [sys.executable, "-m", "tests.support.trainer.preloaded", str(there.fileno())]
        environment = {**os.environ, **SINGLE_THREADED, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[there.fileno()])
        there.close()
        self._lock = threading.Lock()
        self._answers = self._here.makefile("r")

    def run(self, module: str, arguments: list[str], ranks: list[dict[str, Any]], *, timeout_s: float) -> list[int]:
        """Run `module` once for each of `ranks`: its `environment`, and `output`, a file for all that it prints.

        Returns exit codes, negative for signals. Raises TimeoutError; no rank is left then.
        """
        request = {"module": module, "arguments": arguments, "ranks": ranks, "timeout_s": timeout_s}
        with self._lock:
            try:
                self._here.sendall(json.dumps(request).encode() + b"\n")
                answer = self._answers.readline()
            except BaseException:  # a test's time limit: its answer must not be read as the next one's
                self._kill_with_ranks()
                preloaded.cache_clear()
                raise
        assert answer, f"the preloaded process has ended with {self._process.wait()}"
        codes = json.loads(answer)
        if codes is None:
            raise TimeoutError(f"{module} was not done after {timeout_s:.0f} s")
        return list(codes)

    def _kill_with_ranks(self) -> None:
        ranks = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in [self._process.pid, *map(int, ranks)]:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._here.close()
        self._answers.close()
        self._process.wait()


@functools.cache
def preloaded() -> Preloaded:
    """The one of this test process, started when it is first needed."""
    process = Preloaded()
    atexit.register(process.close)
    return process


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side closes."""
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.enable()
    gc.freeze()  # what ranks share stays shared
    with connection.makefile("r") as requests:
        for line in requests:
            codes = _run(connection, **json.loads(line))
            connection.sendall(json.dumps(codes).encode() + b"\n")


def _run(
    connection: socket.socket, module: str, arguments: list[str], ranks: list[dict[str, Any]], timeout_s: float
) -> list[int] | None:
    pids = []
    for rank in ranks:
        pid = os.fork()
        if not pid:
            connection.close()
            _become(module, arguments, rank["environment"], rank["output"])
        pids.append(pid)
    return _wait(pids, timeout_s)


def _become(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Be a rank, in a child process. Does not return."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], timeout_s: float) -> list[int] | None:
    """Exit codes of all. Once one fails the others have a little while to end, as under torchrun."""
    with ThreadPoolExecutor(len(pids)) as pool:
        ends = [pool.submit(_end, pid) for pid in pids]
        ended, _ = wait(ends, timeout_s, FIRST_EXCEPTION)
        failed = any(end.exception() for end in ended)
        if failed:
            wait(ends, GRACE_S)
        in_time = failed or len(ended) == len(ends)
        for pid, end in zip(pids, ends, strict=True):
            if not end.done():
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.kill(pid, signal.SIGKILL)
        return [_code(end) for end in ends] if in_time else None


def _end(pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise RankFailedError(code)


def _code(end: Future[None]) -> int:
    error = end.exception()
    return error.args[0] if isinstance(error, RankFailedError) else 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
