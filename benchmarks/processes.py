"""A benchmark's module under a real torchrun on this machine, and what its first rank wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def under_torchrun(module: str, arguments: Sequence[str], *, processes: int) -> dict[str, Any]:
    """Run `module --output FILE` with these arguments in processes of one thread each. Returns FILE's JSON.

    Raises SystemExit with all that was printed when a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        output = Path(scratch) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, "-m", module, "--output", str(output), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{module} failed on {processes} processes:\n{done.stdout}{done.stderr}")
        return dict(json.loads(output.read_text()))
