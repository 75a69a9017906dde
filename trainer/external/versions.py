"""Versions of the packages in a program's environment."""

from __future__ import annotations

import json
import subprocess

from vlmpipe.trainer.errors import ConfigError

NAMES = (
    "torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "datasets", "llamafactory", "ms-swift",
    "axolotl", "nemo-automodel", "megatron-core", "lightning", "horovod", "tensorflow", "keras", "jax",
)  # fmt: skip
_PROGRAM = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions_in(python: str) -> dict[str, str]:
    """Return the versions of Python and known packages in `python`. Raises ConfigError if `python` does not start."""
    try:
        ended = subprocess.run(
            [python, "-I", "-c", _PROGRAM, *NAMES],
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"train.trainer.python {python} does not start: {error}",
            expected="the Python of the program's environment",
            fix="make that environment, or correct the path",
        ) from error
    versions: dict[str, str] = json.loads(ended.stdout)
    return versions
