"""The table of a run's stages: where each starts, and the sum."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tests.support.planner.plans import make_plan, red, sizes_unknown
from vlmpipe.cli.views.plan import print_plan_tables


def printed(*stages: dict[str, Any], width: int = 100, **sums: Any) -> str:
    named = zip(("align", "finetune"), stages, strict=True)
    starts = iter(("lmsys/vicuna-7b-v1.5", "export of align"))
    plan = {
        "name": "llava", "state": "green", "errors": [], "doubts": [], "train_hours": 20.0,
        "train_hours_range": (18.0, 24.0), "usd": 1620.0, "usd_range": (1458.0, 1944.0),
        "schedule_runs_per_month": None, "schedule_usd_per_month": None,
        "stages": {name: {"starts_from": next(starts), "data": "gs://b/mix.json", **stage}
                   for name, stage in named},
    }  # fmt: skip
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    print_plan_tables({**plan, **sums}, screen, verbose=True)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_notes_of_several_stages_are_printed_once() -> None:
    text = printed(make_plan(), make_plan())
    assert text.count("Assumptions") == 1 and text.count("Not counted") <= 1
    assert "features that an earlier stage made make it cheaper" in text


def test_a_stage_names_what_it_shares_with_an_earlier_one() -> None:
    """Not what differs: `finetune` has other figures of memory, and the same cost."""
    text = " ".join(printed(make_plan(), red(), state="red").split())
    shared = text.partition("Stage finetune, as above: ")[2].partition(".")[0].split(", ")
    assert "cost of the jobs" in shared and "machines" in shared and "memory of a device" not in shared
    assert text.count("one epoch shows each image about once") == 1


def test_unknown_is_no_zero() -> None:
    unknown = {"train_hours": None, "train_hours_range": None, "usd": None, "usd_range": None}
    lines = [" ".join(line.split()) for line in printed(make_plan(), sizes_unknown(), **unknown).splitlines()]
    assert "all stages unknown unknown" in lines


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, printed(make_plan(), red(), width=width).splitlines())) <= width
