"""Ranks that start at once: forked from a process that has torch, transformers and the trainer in memory.

Importing them takes a process seconds, several times as long as a tiny run trains. A rank gets what torchrun would give
it and is a process of its own, with its own process group and its own end. What torchrun itself does is for tests that
start it: of jobs, of the launcher and of whole runs. Ranks here also share the seed of Python's hashes.

The workers of a test run share the process. Each has a fork of it, from which the ranks of its tests are forked.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NoReturn

from tests.support.paths import ROOT
from tests.support.trainer.tiny_runs import TINY
from tests.support.workers import TEST_RUN_VARIABLE

REPOSITORY = ROOT
MODULES = (
    "deepspeed", "peft", "pyarrow.dataset", "torch._dynamo",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch.nn.parallel", "torch.profiler", "torch.utils.serialization.config",
    "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.siglip.modeling_siglip",
    "vlmpipe.trainer.evaluation.evaluate", "vlmpipe.trainer.feature_cache.encode",
    "vlmpipe.trainer.models.llava.family", "vlmpipe.trainer.strategies.ddp", "vlmpipe.trainer.strategies.fsdp",
    "vlmpipe.trainer.strategies.registry", "vlmpipe.trainer.strategies.tensor_parallel.strategy",
    "vlmpipe.trainer.train",
)  # fmt: skip
SINGLE_THREADED = {"OMP_NUM_THREADS": "1"}  # also: a fork keeps no threads
GRACE_S = 5.0  # for the other ranks, once one has failed
FOLDER = Path(tempfile.gettempdir(), f"vlmpipe-preloaded-{os.getuid()}")
# What may decide how modules are imported: not what the first test that needs ranks has set.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
}


class RankFailedError(Exception):
    """A rank ended with this exit code."""


class Preloaded:
    """This test process's fork of the process that has the modules. Safe to use from several threads, one request at a
    time.
    """

    def __init__(self) -> None:
        self._here, self._started = _connected()
        self._lock = threading.Lock()
        self._answers = self._here.makefile("r")
        pid = self._answers.readline()
        assert pid, "the preloaded process did not start"
        self._pid = int(pid)

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
        assert answer, "the preloaded process has ended"
        codes = json.loads(answer)
        if codes is None:
            raise TimeoutError(f"{module} was not done after {timeout_s:.0f} s")
        return list(codes)

    def _kill_with_ranks(self) -> None:
        ranks = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        for pid in [self._pid, *map(int, ranks)]:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(pid, signal.SIGKILL)


@functools.cache
def preloaded() -> Preloaded:
    """The one of this test process, started when it is first needed."""
    return Preloaded()


def _connected() -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """A connection to a fork of the process of this test run, and the process if it is started now.

    It ends with the process that has started the workers: the worker that starts it may end long before the others.
    """
    owner = os.environ.get(TEST_RUN_VARIABLE) or str(os.getpid())
    name = hashlib.sha256(json.dumps([owner, sorted(ENVIRONMENT.items())]).encode()).hexdigest()[:16]
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    path = FOLDER / name
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # none yet, or one that was killed
            return _connection(path), None
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            paths = (str(REPOSITORY), ENVIRONMENT.get("PYTHONPATH"))
            command = [sys.executable, "-m", "tests.support.trainer.preloaded", str(listener.fileno()), owner]
            environment = {**ENVIRONMENT, **SINGLE_THREADED, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            started = subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[listener.fileno()])
        return _connection(path), started


def _connection(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def serve(listener: socket.socket, owner: int) -> None:
    """Answer each connection in a fork, until the process `owner` ends."""
    path = Path(listener.getsockname())
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    _warm_up()
    gc.collect()
    gc.enable()
    gc.freeze()  # what ranks share stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended are not waited for
    try:
        ended = os.pidfd_open(owner)
        while ended not in select.select([listener.fileno(), ended], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                _answer_and_exit(connection, listener, ended)
            connection.close()
    finally:
        for file in (path, path.with_suffix(".lock")):
            file.unlink(missing_ok=True)


def _warm_up() -> None:
    """Have torch, transformers and the trainer look once at the model that most runs train, on the meta device.

    What they find out then or import at a first use, each rank would find out again. No gradients: autograd refuses to
    work in the fork of a process in which it has.
    """
    from vlmpipe.trainer.config.model import ModelConfig
    from vlmpipe.trainer.data.tokenize import make_tokenizer
    from vlmpipe.trainer.models.image_tokens import image_form_of
    from vlmpipe.trainer.models.registry import family_of

    config = ModelConfig.model_validate(TINY["model"])
    family = family_of(config)
    family.shape(config)
    tokenizer = make_tokenizer(
        config.tokenizer, [f"what digit is {number}?" for number in range(99)], image_form_of(config)
    )
    family.training_module(config, family.blueprint(config, tokenizer), cached=True)


def _answer_and_exit(connection: socket.socket, listener: socket.socket, ended: int) -> NoReturn:
    """Answer requests until the other side closes, in a fork, which must not go on as its parent does."""
    try:
        listener.close()
        os.close(ended)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.sendall(f"{os.getpid()}\n".encode())
        with connection.makefile("r") as requests:
            for line in requests:
                codes = _run(connection, **json.loads(line))
                connection.sendall(json.dumps(codes).encode() + b"\n")
    except OSError:
        """The test process is gone."""
    finally:
        os._exit(0)


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
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
