"""`vlmpipe plan --strategies`: what a cell says is what a plan of its settings says."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.overrides import override_texts
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.plan import plan_basis, plan_run
from vlmpipe.planner.search import strategies
from vlmpipe.planner.search.strategies import Comparison, compare_strategies
from vlmpipe.trainer.errors import ConfigError

SEVEN_B = ROOT / "configs/llava-7b.yaml"


def compared(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], nodes: tuple[int, ...]) -> Comparison:
    """Few strategies, whose traces take a second."""
    monkeypatch.setattr(strategies, "COMPARED", names)
    config = load_run_file(SEVEN_B)
    return compare_strategies(config, *plan_basis(config), nodes)


def test_what_is_too_large_is_said_with_its_least_and_what_is_not_possible_has_no_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = compared(monkeypatch, ("ddp", "hsdp"), (1, 8))
    assert set(found.row(1)) == {"ddp"}, "hsdp on one node is fsdp"
    assert not found.row(8), "32 sequences on 64 ranks"
    ddp = found.row(1)["ddp"]
    assert ddp.way is None and ddp.min_gib and ddp.min_gib > found.gpu_memory_gib == 80
    assert found.fastest(1) is None and found.nic_gbps == 100


def test_a_cell_is_the_plan_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(monkeypatch, ("ddp", "fsdp"), (1,))
    best = found.fastest(1)
    assert best and best.strategy == "fsdp" and best.way
    plan = plan_run(load_run_file(SEVEN_B, override_texts(best.way.change)))
    assert plan.memory and plan.time and plan.time.train_hours and plan.cost
    assert best.way.memory_gib == pytest.approx(plan.memory.total_bytes / (1 << 30))
    assert best.way.hours == pytest.approx(plan.cost.by_term["spot"].train_hours)
    assert best.way.usd == pytest.approx(plan.cost.usd)
    assert [cell["strategy"] for cell in found.as_dict()["cells"]] == ["ddp", "fsdp"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "cluster={machine_type: n1-standard-8, accelerator_type: '', accelerator_count: 0}",
            "n1-standard-8, without a",
        ),
        ("gcp.location=africa-south1", "no price or no time is known of a2-ultragpu-8g"),
        ("plan.samples=0", "the number of steps is not known"),
    ],
)
def test_what_cannot_be_compared_is_said(monkeypatch: pytest.MonkeyPatch, override: str, said: str) -> None:
    monkeypatch.setattr(strategies, "COMPARED", ("fsdp",))
    config = load_run_file(SEVEN_B, [override])
    with pytest.raises(ConfigError, match=said):
        compare_strategies(config, *plan_basis(config), (1,))
