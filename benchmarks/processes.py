"""A benchmark's module under a real torchrun on this machine, and what its first rank wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.announced import BEGINS


def under_torchrun(module: str, arguments: Sequence[str], *, processes: int) -> dict[str, Any]:
    """Run `module --output FILE` with these arguments in processes of one thread each. Returns FILE's JSON.

    What `announced` says there becomes a line on stderr. Raises SystemExit with all that was printed when a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        output = Path(scratch) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, "-m", module, "--output", str(output), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        printed: list[str] = []
        started_s = time.monotonic()
        running = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        with running as process:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(line)
                if line.startswith(BEGINS):
                    said = f"{time.monotonic() - started_s:6.0f} s, {processes} processes: {line.removeprefix(BEGINS)}"
                    print(said, end="", file=sys.stderr, flush=True)
        if process.returncode != 0:
            raise SystemExit(f"{module} failed on {processes} processes:\n{''.join(printed)}")
        return dict(json.loads(output.read_text()))
