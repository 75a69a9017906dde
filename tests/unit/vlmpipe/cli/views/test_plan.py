"""What `vlmpipe plan` prints of plans: nothing unknown as 0, no line that a narrow terminal would break.

Their words are in tests/fixtures/screens.
"""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.support.paths import ROOT
from tests.support.planner.plans import GIB, PLANS, amber, make_plan, red, sizes_unknown, without_gpu
from vlmpipe.cli.views.memory_bar import cells
from vlmpipe.cli.views.plan import print_plan_tables
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.plan import plan_run
from vlmpipe.records.plan import MemoryPart
from vlmpipe.report.plan_section import merged_parts
from vlmpipe.trainer.printable import COLUMNS

CONFIGS = ROOT / "configs"
WIDTHS = [80, 100, 160]


def printed(plan: dict[str, Any], width: int = 100, *, verbose: bool = False) -> str:
    screen = Console(file=io.StringIO(), width=width, highlight=False)
    print_plan_tables(plan, screen, verbose=verbose)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def line_with(text: str, start: str) -> str:
    """The cells of the only line that begins so, parted by one space."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return " ".join(line.split())


def test_settings_that_fit_are_printed_as_overrides() -> None:
    plan = red()
    plan["memory"]["nearest"][0]["change"] = {"cluster.reduction_server": None, "train.shard_frozen_weights": True}
    assert "fits: cluster.reduction_server=null train.shard_frozen_weights=true" in printed(plan)


def test_every_reason_for_red_is_printed_once() -> None:
    plan = red()
    memory = plan["memory"]["total_bytes"] / GIB
    said = [
        f"does not fit: {memory:,.1f} GiB on a device",
        "train.float8 does not work on it",
        "the run never ends on spot",
    ]
    plan["errors"] += said
    text = printed(plan)
    assert [text.count(one) for one in said] == [0, 1, 1]  # the first one is the headline's
    assert text.count("a3-megagpu-9g") == 1  # a finding's own table has it


def test_nothing_unknown_is_a_zero() -> None:
    assert "$0" not in printed(amber())


@pytest.mark.parametrize("name", [name for name in PLANS if PLANS[name]()["state"] == "amber"])
def test_an_amber_plan_has_its_reason_in_the_first_line(name: str) -> None:
    assert printed(PLANS[name](), width=80).splitlines()[0] == f"! amber  planned: {PLANS[name]()['doubts'][0]}"


def test_the_hourly_price_is_shown_where_hours_are_not_known() -> None:
    plan = amber()
    plan["cost"]["term"] = "standard"
    plan["cost"]["steps"] = plan["cost"]["by_term"]["standard"]["steps"]
    text = printed(plan)
    assert "cost unknown, $160 an hour of training." in " ".join(text.split())
    assert "train $160 an hour unknown –" in [" ".join(line.split()) for line in text.splitlines()]


def test_what_is_known_of_an_unknown_cost_is_a_lower_bound() -> None:
    plan = amber()
    plan["cost"]["steps"].append(
        {"job": "pipeline steps", "replicas": 1, "hours": 1.0, "usd_per_hour": None, "usd": 0.4}
    )
    text = " ".join(printed(plan).split())
    assert "cost unknown, at least $0.40: no price of a3-megagpu-8g in us-central1, spot." in text


def test_a_ladder_marks_its_rungs_in_order() -> None:
    plan = amber()
    plan["cost"]["option_numbers"] = {"spot": 1, "standard": 2}
    header = line_with(printed(plan), "cost ")
    assert "spot ◂ option 1" in header and "standard ◂ option 2" in header and "run file" not in header


def test_without_gpus_there_is_no_time_and_a_reason() -> None:
    text = printed(without_gpu())
    assert "time unknown; cost unknown" in text
    assert "Time of a step: unknown. Training on CPUs: how fast they compute is not known." in text


def test_without_sizes_machines_and_the_reason_are_left() -> None:
    text = printed(sizes_unknown())
    assert "Memory unknown; time unknown; cost unknown." in text
    assert "3 x a3-megagpu-8g" in text
    assert "the model's sizes are not known." in text


def test_notes_are_shown_once_and_assumptions_are_counted_or_listed() -> None:
    plan = make_plan()
    decisive = ["Old prices: look them up.", "How long the benchmark job takes is not known, so"]
    plan["cost"]["assumptions"] = [*decisive, "Not counted: logs."]
    text, verbose = printed(plan), printed(plan, verbose=True)
    assert text.count("Rows are those of the prepared data.") == verbose.count("Rows are those") == 1
    assert text.index("1 x n1-standard-16") < text.index("Notes")
    assert all(line in text for line in decisive) and "Not counted" not in text and "--verbose" in text
    assert "Not counted: logs." in verbose and "--verbose" not in verbose


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLANS)
def test_no_line_is_too_long_and_no_word_is_cut(name: str, width: int) -> None:
    text = printed(PLANS[name](), width)
    assert max(map(len, text.splitlines())) <= min(width, COLUMNS)
    assert "…" not in text
    plan = PLANS[name]()
    names = [pool["machine_type"] for pools in plan["jobs"].values() for pool in pools]
    names += [finding["path"] for finding in plan["findings"]]
    names += [part.name for part in merged_parts(parts_of(plan))] if plan["memory"] else []
    assert [name for name in names if name not in text] == []
    assert "500 GB pd-ssd" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bar_has_as_many_letters_as_a_part_has_of_the_device(width: int) -> None:
    bar = next(line for line in printed(make_plan(), width).splitlines() if line.startswith("AAA"))
    width = min(width, COLUMNS)
    assert len(bar) == width
    shares = {letter: bar.count(letter) / width for letter in "ABC·"}
    assert shares == pytest.approx({"A": 39 / 80, "B": 20 / 80, "C": 1 / 80, "·": 20 / 80}, abs=1 / width)


def test_the_capacity_is_marked_inside_a_bar_that_is_longer() -> None:
    lines = printed(red(), 90).splitlines()
    (mark,) = [line for line in lines if line.endswith("on the device ┃")]
    assert len(mark) == 60
    assert mark.strip().startswith("40.0 GiB")


def parts_of(plan: dict[str, Any]) -> list[MemoryPart]:
    return [MemoryPart.model_validate(part) for part in plan["memory"]["parts"]]


def test_small_parts_share_a_line_and_nothing_is_lost() -> None:
    merged = merged_parts(parts_of(make_plan()))
    assert [part.name for part in merged] == ["optimizer", "weights", "2 smaller parts"]
    assert sum(part.bytes for part in merged) == 60 * GIB
    assert merged[-1].why == "logits, inputs"


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30), st.integers(10, 200), st.integers(0, 10**12))
def test_a_bar_is_never_longer_than_its_width(sizes: list[int], width: int, spare: int) -> None:
    scale = max(1, sum(sizes) + spare)
    found = cells(sizes, scale, width)
    assert min(found) >= 0
    assert sum(found) == round(width * sum(sizes) / scale)


def test_colours_do_not_change_the_text() -> None:
    screen = Console(file=io.StringIO(), width=100, highlight=False, force_terminal=True, color_system="truecolor")
    print_plan_tables(make_plan(), screen)
    assert isinstance(screen.file, io.StringIO)
    coloured = screen.file.getvalue()
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printed(make_plan(), 100)


def test_the_json_of_a_real_plan_prints_the_same_tables() -> None:
    plan = plan_run(load_run_file(CONFIGS / "digits.yaml", [])).as_dict()
    assert printed(json.loads(json.dumps(plan))) == printed(plan)
