"""The table of docs/how-to/choose-a-strategy.md: what `vlmpipe plan --strategies` prints, by size and machine.

    python -m tests.support.strategy_page

writes it, in a minute or two: the memory of each way is traced.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.paths import ROOT
from vlmpipe.cli.views.strategies import markdown_rows
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.plan import plan_basis
from vlmpipe.planner.search.strategies import COMPARED, compare_strategies

PAGE = ROOT / "docs/how-to/choose-a-strategy.md"
RUN_FILE = ROOT / "configs/llava-7b.yaml"
SIZES = {
    "3B": "Qwen/Qwen2.5-3B",
    "7B": "lmsys/vicuna-7b-v1.5",
    "13B": "lmsys/vicuna-13b-v1.5",
    "34B": "01-ai/Yi-34B",
    "70B": "meta-llama/Llama-3.1-70B",
}
MACHINES = {
    "a2-highgpu-8g": "NVIDIA_TESLA_A100",
    "a2-ultragpu-8g": "NVIDIA_A100_80GB",
    "a3-highgpu-8g": "NVIDIA_H100_80GB",
}
NODES = (1, 4)
FIRST, LAST = "| size |", "\n\nHours of training"


def overrides(size: str, machine: str) -> list[str]:
    """What is typed behind `vlmpipe plan configs/llava-7b.yaml --strategies`."""
    return [
        f"model.language_model.weights={SIZES[size]}",
        f"cluster.machine_type={machine}",
        f"cluster.accelerator_type={MACHINES[machine]}",
        "train.global_batch_size=128",
    ]


def run_file(size: str, machine: str) -> RunConfig:
    return load_run_file(RUN_FILE, overrides(size, machine))


def rows(size: str, machine: str) -> Iterator[str]:
    """The rows of a size on a machine."""
    config = run_file(size, machine)
    yield from markdown_rows(compare_strategies(config, *plan_basis(config), NODES), size)


def table() -> str:
    """The whole table."""
    head = f"| size | machines | Gbit/s | {' | '.join(COMPARED)} | fastest |"
    lines = [head, f"|---|---|--:|{'--:|' * (len(COMPARED) + 1)}"]
    lines += [row for size in SIZES for machine in MACHINES for row in rows(size, machine)]
    return "\n".join(lines)


def page_with(table: str) -> str:
    """The page with this table."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(FIRST)
    return text[:start] + table + text[text.index(LAST, start) :]


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")
