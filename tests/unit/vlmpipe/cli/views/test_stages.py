"""The table of a run's stages: where each starts, and the sum."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tests.support.planner.plans import make_plan, red, sizes_unknown
from vlmpipe.cli.views.plan import print_plan_tables


def printed(*stages: dict[str, Any], width: int = 120, **sums: Any) -> str:
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


def test_stages_stand_above_their_sum() -> None:
    lines = [" ".join(line.split()) for line in printed(make_plan(), make_plan(), width=140).splitlines()]
    assert lines[0] == "✓ green llava"
    assert lines[1] == "All stages: training 20.0 h (18.0 to 24.0 h); cost $1,620 ($1,458 to $1,944)."
    assert "✓ align lmsys/vicuna-7b-v1.5 gs://b/mix.json 18,000 10.0 h $810 60.0 of 80.0 GiB" in lines
    assert "✓ finetune export of align gs://b/mix.json 18,000 10.0 h $810 60.0 of 80.0 GiB" in lines
    assert "all stages 20.0 h $1,620" in lines
    assert [line.split()[1] for line in lines if line.startswith("stage ") and "─" in line] == ["align", "finetune"]


def test_notes_of_several_stages_are_printed_once() -> None:
    text = printed(make_plan(), make_plan())
    assert text.count("Assumptions") == 1 and text.count("Not counted") <= 1
    assert "features that an earlier stage made make it cheaper" in text


def test_a_stage_that_does_not_fit_is_marked_and_its_plan_says_what_would() -> None:
    text = printed(make_plan(), red(), state="red")
    assert text.splitlines()[0].startswith("✗ red") and "✗ finetune" in text
    assert "60.0 of 40.0 GiB, does not fit" in text.partition("stage align")[0]
    assert "30.0 GiB, fits: train.strategy=fsdp" in text


def test_unknown_is_no_zero() -> None:
    unknown = {"train_hours": None, "train_hours_range": None, "usd": None, "usd_range": None}
    lines = [" ".join(line.split()) for line in printed(make_plan(), sizes_unknown(), **unknown).splitlines()]
    assert "all stages unknown unknown" in lines


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, printed(make_plan(), red(), width=width).splitlines())) <= width
