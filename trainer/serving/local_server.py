"""A run's exported model in `transformers serve` on this machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from vlmpipe.trainer.config.checkpoint import QUANTIZED_PACKAGE
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError, require_package
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import FOLDER, link_export, quantized_folder, require_whole_export

START_S = 180.0
END_S = 10.0
LOG_LINES = 8
HOST = "127.0.0.1"
NEEDED = ("fastapi", "uvicorn", "openai")
PROGRAM = "vlmpipe.trainer.serving.transformers_server"


@dataclass(frozen=True)
class LocalServer:
    """The server's process, its address up to /v1, and the model's name on it."""

    url: str
    model: str
    process: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Until Ctrl-C, which the server gets too. Raises UserError (69) where it ends by itself."""
        code = self.process.wait()
        raise UserError(
            f"the server ended with code {code}", expected="a server that runs until Ctrl-C", code=ExitCode.UNAVAILABLE
        )


@contextlib.contextmanager
def serving(run_uri: str, *, port: int = 0, quantized: str = "") -> Iterator[LocalServer]:
    """Serve the run's export in the precision of its evaluation; stops at the end of the block.

    quantized: the format of its quantized export that is served in its place; empty for none.

    Raises UserError (69) without the packages of the extra `serving`, for a port that is in use and when the server
    does not start, ConfigError for an adapter alone, DataError for a damaged export.
    """
    for module in (*NEEDED, *((QUANTIZED_PACKAGE,) if quantized else ())):
        require_package(module)
    require_free_port(port)
    store = open_storage(run_uri)
    export = quantized_folder(quantized) if quantized else FOLDER
    if require_whole_export(store, export).get("is_adapter"):
        raise ConfigError(
            f"{store.uri(FOLDER)} is an adapter alone, which transformers serve does not put on its base",
            expected="a whole model",
            fix="export it merged (model.lora.export: merged), or serve it by vLLM: deploy puts it on its base",
        )
    job = JobConfig.read(store)
    dtype = "bfloat16" if job.train.precision == "bf16" else "float32"
    with tempfile.TemporaryDirectory(prefix="vlmpipe-serve-") as scratch:
        folder, port = Path(scratch, "model"), port or _free_port()
        folder.mkdir()
        link_export(store, folder, export)
        command = [sys.executable, "-P", "-m", PROGRAM, "serve", str(folder), "--host", HOST, "--port", str(port)]
        command += ["--dtype", dtype]
        with open(Path(scratch, "log"), "w+", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                _wait(process, port, Path(log.name))
                yield LocalServer(f"http://{HOST}:{port}/v1", str(folder), process)
            finally:
                process.terminate()
                _wait_for_end(process)


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, also a second one, kills the server where it takes long."""
    try:
        process.wait(END_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until the server says that it is well, which it does once the model is loaded."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).close()
            if _listens(process, port):  # not another program, which took the port meanwhile
                return
        time.sleep(0.2)
    last_lines = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    raise UserError(
        f"transformers serve did not start; its last lines:\n  {last_lines}",
        expected=f"an answer to http://{HOST}:{port}/health within {START_S:.0f} s",
        code=ExitCode.UNAVAILABLE,
    )


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether the process, or one that it has started, is what answers at the port."""
    with contextlib.suppress(psutil.Error):
        server = psutil.Process(process.pid)
        for process_of_tree in (server, *server.children(recursive=True)):
            if any(place.laddr and place.laddr.port == port for place in process_of_tree.net_connections("tcp")):
                return True
    return False


def require_free_port(port: int) -> None:
    """Raise UserError (69) for a port that is in use; 0 takes a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections are no reason, a listener is
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"port {port} of this machine cannot be used: {error.strerror}",
                expected="a free port",
                fix="--port 0 takes a free one, or give another",
                code=ExitCode.UNAVAILABLE,
            ) from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
