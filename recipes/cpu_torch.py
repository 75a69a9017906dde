"""Make torchvision and torchaudio importable beside a CPU build of torch, in the environment that runs this.

Their packages on the index are built for CUDA and fail to load next to a CPU build. Training uses neither's compiled
operators: torchvision is left without the registration of its operators, torchaudio becomes an empty module. Where they
load, and beside a torch with CUDA, nothing is changed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch

BREAKS = {"torchvision": "_meta_registrations.py", "torchaudio": "__init__.py"}  # what fails at import


def main() -> None:
    if torch.version.cuda:
        return
    for name, file in BREAKS.items():
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None or _loads(name):
            continue
        Path(found.origin).with_name(file).write_text('"""Emptied: see recipes/cpu_torch.py."""\n', encoding="utf-8")
        if not _loads(name):
            sys.exit(f"{name} does not load beside torch {torch.__version__}; install the release that fits it")
        print(f"{name} does not fit torch {torch.__version__}: emptied its {file}")


def _loads(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
