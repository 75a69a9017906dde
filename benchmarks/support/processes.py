"""A function of a benchmark in processes of its own: one, or the ranks of a real torchrun on this machine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.announced import BEGINS

MODULE = "benchmarks.support.processes"


def call(
    target: str,
    arguments: dict[str, Any],
    *,
    ranks: int = 0,
    started_by: Sequence[str] = (),
    at: Callable[[str], None] = lambda _text: None,
) -> Any:
    """What `package.module:function` returns for these arguments (JSON, both) in a process of one thread.

    With `ranks` it is called by so many processes under torchrun, and the first one's result returned. `started_by` is
    what runs the module instead of `python -m`. Lines that say what the process is at (`tests.support.announced`) go to
    `at`. Raises CalledProcessError, with all that was printed as its output, when a process fails.
    """
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        # One thread; DeepSpeed asks for LOCAL_RANK, which torchrun sets. A torchrun that is stopped leaves its folder.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": scratch} | ({} if ranks else {"LOCAL_RANK": "0"})
        output = Path(scratch, "result.json")
        start = [sys.executable, "-W", "ignore", *torchrun, *(started_by or ("-m", MODULE))]
        command = [*start, target, json.dumps(arguments), str(output)]
        printed: list[str] = []
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            encoding="utf-8",
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    printed.append(line)
                    if line.startswith(BEGINS):
                        at(line.removeprefix(BEGINS).strip())
            except BaseException:  # a benchmark that is stopped leaves no process that writes on
                process.terminate()  # torchrun ends its ranks
                process.communicate()
                raise
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, "".join(printed))
        return json.loads(output.read_text(encoding="utf-8"))


def first_ranks_answer(may_go_on: bool) -> bool:
    """Whether the first rank may go on, so that all ranks do or none. Collective."""
    import torch  # not in the process that starts others
    import torch.distributed as dist

    answer = torch.tensor(may_go_on)
    dist.broadcast(answer, 0)
    return bool(answer)


def announce(text: str) -> None:
    """Say what this process is at, for the one that called it."""
    print(f"{BEGINS}{text}", flush=True)


def main() -> None:
    target, arguments, output = sys.argv[1:]
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    if os.environ.get("RANK", "0") == "0":
        Path(output).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    from vlmpipe.trainer.distributed.process import run_worker

    run_worker(main)
