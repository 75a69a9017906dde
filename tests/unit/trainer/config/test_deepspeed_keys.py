from __future__ import annotations

from typing import Any

import pytest

from vlmpipe.trainer.config.deepspeed_keys import IN_SECTIONS, PASSED_ON, READ_UNDER, problems, problems_of_new_runs

KEYS: dict[str, Any] = {
    "zero_optimization": {
        "stage3_max_live_parameters": 1,
        "zero_hpz_partition_size": 8,
        "round_robin_gradients": True,
        "allgather_partitions": True,
    }
}


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("zero1", ["stage3_max_live_parameters", "zero_hpz_partition_size", "allgather_partitions"]),
        ("zero2", ["stage3_max_live_parameters", "zero_hpz_partition_size", "allgather_partitions"]),
        ("zero3", ["round_robin_gradients", "allgather_partitions"]),
        ("fsdp", []),  # which takes no key at all: problems() says so
    ],
)
def test_keys_that_a_stage_ignores_are_named_at_once_with_the_fix(strategy: str, names: list[str]) -> None:
    texts = problems_of_new_runs(KEYS, strategy)
    assert [text.split()[0] for text in texts] == [f"zero_optimization.{name}" for name in names]
    assert all("take it out" in text for text in texts)


def test_the_strategy_that_reads_a_key_is_named() -> None:
    (text, _) = problems_of_new_runs(KEYS, "zero3")
    assert text.endswith("or use zero1 and zero2")


@pytest.mark.parametrize("name", ["enabled", "detailed", "profile_step", "top_modules", "recompute_fwd_factor"])
def test_values_of_the_flops_profiler_are_looked_at(name: str) -> None:
    (text,) = problems_of_new_runs({"flops_profiler": {name: "high"}}, "zero2")
    assert text.startswith(f'flops_profiler.{name}: found "high", expected')


def test_records_of_earlier_runs_may_have_such_keys() -> None:
    assert problems({**KEYS, "aio": {"block_size": 1}, "flops_profiler": {"profile_step": 0}}, "zero2") == []


def test_every_key_of_the_tables_is_one_that_is_passed_on() -> None:
    assert set(READ_UNDER) <= set(PASSED_ON)
    assert {name.partition(".")[0] for name in IN_SECTIONS} <= set(PASSED_ON)
