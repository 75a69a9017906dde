"""Real vLLM on this machine's CPUs, with the arguments and the environment of a deployment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_fields import RunFields
from vlmpipe.config.sections.deploy import PORT
from vlmpipe.config.serving_container import arguments_of, require_deploy

RECIPES = ROOT / "build/recipes"
ENVIRONMENT = RECIPES / "vllm"
# Of CPUs only: memory for keys and values in GiB, and no word to vLLM's makers. The model is in the engine's own
# process, as another would import everything once more; it has one thread, as two wait for each other at each operation
# of a tiny model; and nothing is compiled.
OF_CPUS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
START_S, LOG_LINES, STOP_S = 900, 40, 30
VLLM = (str(ENVIRONMENT / "bin/vllm"), "serve")
START_PROGRAM = (str(ENVIRONMENT / "bin/python"), "-m", "vlmpipe.trainer.serving.vllm_server")


@dataclass(frozen=True)
class Release:
    """vLLM and the transformers that it imports. packages: put before those of the environment."""

    vllm: str
    transformers: str
    packages: Path | None = None

    @property
    def title(self) -> str:
        return f"vLLM {self.vllm}, transformers {self.transformers}"


RELEASES = {
    "vllm-032": Release("0.32.0", "5.19.0"),
    "vllm-027": Release("0.27.0", "5.5.4", RECIPES / "vllm-older"),
}
NEWEST = RELEASES["vllm-032"]
needs_vllm = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").is_file(), reason="make recipe-vllm makes its environment"
)


@contextlib.contextmanager
def vllm_of(settings: RunFields, folder: str, log: Path, *, release: Release = NEWEST) -> Iterator[str]:
    """vLLM as the `deploy` section of a run's run.json starts it, with the model's files in `folder`.

    Gives the address up to /v1. A deployment with accelerator_count 0 has CPUs.
    """
    environment = require_deploy(settings).environment
    with running_vllm(arguments_of(settings, folder), environment, log, release=release) as url:
        yield url


@contextlib.contextmanager
def running_vllm(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    release: Release = NEWEST,
    program: Sequence[str] = VLLM,
) -> Iterator[str]:
    """`vllm serve`, or the serving image's start program, with these arguments, but for the port.

    Gives the address up to /v1 once it is ready.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    given = [f"--port={port}" if one == f"--port={PORT}" else one for one in arguments]
    assert f"--port={port}" in given
    variables = {**os.environ, **OF_CPUS, "VLLM_CACHE_ROOT": str(RECIPES / "vllm-cache"), **environment}
    variables["PATH"] = f"{ENVIRONMENT / 'bin'}:{variables['PATH']}"
    variables["PYTHONPATH"] = str(release.packages or "")
    if program == START_PROGRAM:
        variables["PYTHONPATH"] = str(ROOT)
    command = [*program, *given]
    with log.open("w", encoding="utf-8") as said:
        said.write(f"{' '.join(command)}\n")
        said.flush()
        server = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Until it is well, which it says once the model is loaded."""
    for _ in range(START_S):
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1)
            break
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
    last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    raise AssertionError(f"vLLM did not start:\n{last}")
