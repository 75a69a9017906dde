"""The table of strategies on a terminal and in docs/how-to/choose-a-strategy.md."""

from __future__ import annotations

import re

import pytest

from tests.support import strategy_page
from tests.support.paths import ROOT
from tests.support.strategy_page import MACHINES, NODES, PAGE, SIZES, run_file
from vlmpipe.catalog.machines import load_catalog, reducers_needed
from vlmpipe.cli.views.strategies import markdown_rows, print_strategies
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.plan import plan_basis, plan_run
from vlmpipe.planner.search import strategies
from vlmpipe.planner.search.choice import ERROR
from vlmpipe.planner.search.strategies import COMPARED, Cell, Comparison, compare_strategies
from vlmpipe.planner.search.ways import Suggestion

WAY = Suggestion({"train.strategy": "fsdp", "train.micro_batch_size": 2}, "", "fsdp", 30.0, 40.0, 1.0, 0.4, 4.75, 110.0)
FOUND = Comparison(
    "a2-highgpu-8g", "NVIDIA_TESLA_A100", 8, 40.0, 100.0, 32,
    (Cell("ddp", 1, None, 105.2), Cell("zero2", 1, lacks_host_memory=True), Cell("fsdp", 1, WAY), Cell("pp", 1)),
)  # fmt: skip


def page_rows() -> dict[tuple[str, str], dict[str, str]]:
    """Cells of the page's table by size and machines, without the marks of the fastest."""
    text = PAGE.read_text(encoding="utf-8").replace("**", "")
    found = {}
    for row in re.findall(r"^\| (?:\d+B) \|.*$", text, re.M):
        size, machines, _, *cells = row.strip("| ").split(" | ")
        found[size, machines] = dict(zip((*COMPARED, "fastest"), cells, strict=True))
    return found


def fastest(row: dict[str, str]) -> tuple[float, float]:
    """Hours and dollars of a row's fastest strategy."""
    hours = [float(row[name]) for name in COMPARED if re.fullmatch(r"[0-9.]+", row[name])]
    return min(hours), float(row["fastest"].strip("$").replace(",", ""))


def test_the_table_fits_a_narrow_terminal_and_its_command_changes_what_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmpipe.runs.terminal.COLUMNS", 80)
    config = load_run_file(ROOT / "configs/llava-7b.yaml")
    print_strategies(FOUND, config, "x.yaml", ["train.epochs=2"])
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.strip().startswith("1 "))
    assert row.split() == ["1", "105", "GiB", "host", "4.8", "–", "–", "–", "–", "$110"] and len(row) <= 80
    (command,) = (line for line in lines if "vlmpipe plan" in line)
    assert command.endswith("vlmpipe plan x.yaml train.epochs=2 train.micro_batch_size=2"), "fsdp is the run file's own"
    (markdown,) = markdown_rows(FOUND, "7B")
    assert markdown == "| 7B | 1 x a2-highgpu-8g | 100 | 105 GiB | host | **4.8** | – | – | – | – | $110 |"


def test_the_page_has_every_size_and_machine_and_a_row_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the row one strategy, whose traces take a second; `make test-whole` compares the table."""
    rows = page_rows()
    assert set(rows) == {(size, f"{nodes} x {machine}") for size in SIZES for machine in MACHINES for nodes in NODES}
    monkeypatch.setattr(strategies, "COMPARED", ("fsdp",))
    config = run_file("7B", "a2-ultragpu-8g")
    (row,) = markdown_rows(compare_strategies(config, *plan_basis(config), (1,)), "7B")
    assert rows["7B", "1 x a2-ultragpu-8g"]["fsdp"] == row.replace("**", "").strip("| ").split(" | ")[5]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_table_of_the_page_is_what_the_command_prints(size: str) -> None:
    """`python -m tests.support.strategy_page` writes it."""
    written = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {size} |")]
    assert written == [row for machine in MACHINES for row in strategy_page.rows(size, machine)]


def test_what_the_page_says_of_guides_is_in_its_table_and_in_the_catalogue() -> None:
    rows = page_rows()
    assert rows["3B", "1 x a2-highgpu-8g"]["ddp"].endswith(" GiB"), "3B under DDP does not fit"
    assert reducers_needed(4, load_catalog().machines["a2-highgpu-8g"].nic_gbps) == 13
    four = {name: float(cell) for name, cell in rows["7B", "4 x a2-highgpu-8g"].items() if name in ("fsdp", "hsdp")}
    assert four["fsdp"] == pytest.approx(four["hsdp"], rel=ERROR), "with the largest micro-batches that fit"
    for size in ("3B", "7B", "13B"):
        for machine in ("a2-highgpu-8g", "a2-ultragpu-8g"):
            one, several = (fastest(rows[size, f"{nodes} x {machine}"]) for nodes in NODES)
            assert 0.3 < several[0] / one[0] < 0.5 and 1.3 < several[1] / one[1] < 1.7, (size, machine)
    seventy, largest = rows["70B", "4 x a3-highgpu-8g"], rows["34B", "4 x a2-highgpu-8g"]
    assert float(seventy["fsdp"]) / float(seventy["tp+pp+dp"]) == pytest.approx(1.4, abs=0.05)
    assert rows["70B", "4 x a2-highgpu-8g"]["fastest"] == "–"
    assert float(largest["fsdp"]) / float(largest["tp"]) == pytest.approx(0.5, abs=0.05)
    assert float(largest["pp"]) / float(largest["fsdp"]) == pytest.approx(0.45, abs=0.05)


@pytest.mark.slow
def test_fp16_takes_24_gib_more_than_bf16_under_zero2() -> None:
    wanted = ["train.strategy=zero2", "train.activation_checkpointing=full", "cluster.machine_type=a2-highgpu-8g"]
    wanted += ["cluster.accelerator_type=NVIDIA_TESLA_A100"]
    plans = [
        plan_run(load_run_file(ROOT / "configs/llava-7b.yaml", [*wanted, f"train.precision={one}"]))
        for one in ("bf16", "fp16")
    ]
    bf16, fp16 = (plan.memory.total_bytes / (1 << 30) for plan in plans if plan.memory)
    assert bf16 == pytest.approx(32.2, abs=0.5) and fp16 - bf16 == pytest.approx(24, abs=1)
