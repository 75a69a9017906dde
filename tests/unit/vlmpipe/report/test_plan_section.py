"""The report's section about the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.planner.plans import amber, make_plan
from tests.support.report_page import Page
from tests.support.reports import write_json
from tests.support.short_form import chosen
from vlmpipe.report.build import build_report


def test_the_plan_shows_memory_by_part_and_dollars_by_step(run: Path) -> None:
    page = Page(build_report(str(run)))
    assert "60.0 of 40.0 GiB on one NVIDIA_H100_MEGA_80GB, 20.0 GiB too much." in page.text
    assert "optimizer 39.00 65.0% two moments in fp32" in page.text
    assert "2 smaller parts 1.00 1.7% logits, inputs" in page.text
    assert "train 10.00 h 2 min 9 s $1,600 $800 –" in page.text
    assert "whole run $1,620 $810 –" in page.text
    assert "✕ red" in page.text
    assert "VP101 job_spec.worker_pool_specs[0].machine_spec.machine_type a3-megagpu-9g → a3-megagpu-8g" in page.text
    assert "18,000 (400 done)" in page.text
    styles = [style for style in page.attributes("div", "style") if style.startswith("left:")]
    assert "left:66.67%" in styles  # the capacity


def test_a_plan_without_prices_names_the_missing_ones(run: Path) -> None:
    write_json(run / "plan.json", amber())
    page = Page(build_report(str(run)))
    assert "No price is known for: a3-megagpu-8g in us-central1, spot." in page.text
    assert "train unknown 2 min 9 s unknown unknown –" in page.text
    assert "$0" not in page.text


OTHER_FORMS = {str(value): value for value in (None, 3, "text", [1], {"a": 1})}


@pytest.mark.parametrize("value", chosen(OTHER_FORMS, lambda name: name == "{'a': 1}").values(), ids=str)
def test_a_plan_of_another_form_never_breaks_the_report(run: Path, value: Any) -> None:
    for other in ("predictions.jsonl", "metrics.jsonl"):  # which most of a report's time goes into
        (run / other).unlink()
    for name in make_plan():
        write_json(run / "plan.json", make_plan() | {name: value})
        assert "plan" in Page(build_report(str(run))).attributes("section", "id")
    for part in ("memory", "time", "cost"):
        for name in make_plan()[part]:
            plan = make_plan()
            plan[part][name] = value
            write_json(run / "plan.json", plan)
            assert "plan" in Page(build_report(str(run))).attributes("section", "id")
