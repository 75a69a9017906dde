"""What a user's own DeepSpeed configuration changes of a plan's memory, and that what it does not is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.host import NODE_WEIGHTS
from vlmpipe.planner.memory.zero_config import ZeroSettings
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.plan import plan_run

RUN_FILE = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
GIVEN = 2_000_000_000  # so many that the moment that has them is the fullest


def parts(strategy: str, **given: Any) -> dict[str, int]:
    """Bytes on the device by part, summed over parts of one name."""
    fields = {
        "train.strategy": strategy,
        "cluster.reduction_server": None,
        "train.deepspeed": {"zero_optimization": given},
    }
    config = load_run_file(RUN_FILE, [f"{name}={json.dumps(value)}" for name, value in fields.items()])
    catalog = load_catalog()
    machine, gpu = catalog.machines[config.cluster.machine_type], catalog.gpus[config.cluster.accelerator_type]
    memory = estimate_memory(config, architecture(config), machine, gpu, nearest=False)
    return {part.name: part.bytes for part in memory.parts}


@pytest.mark.parametrize(("strategy", "bytes_each"), [("zero2", 2), ("zero3", 4)])
def test_buckets_are_as_large_as_they_are_given(strategy: str, bytes_each: int) -> None:
    assert parts(strategy, reduce_bucket_size=GIVEN, overlap_comm=False)["buckets"] == bytes_each * GIVEN


def test_overlapping_takes_a_second_bucket_under_zero2_and_none_under_zero3() -> None:
    one, two = (parts("zero2", reduce_bucket_size=GIVEN, overlap_comm=on)["buckets"] for on in (False, True))
    assert two == 2 * one == 2 * 2 * GIVEN
    assert parts("zero3", overlap_comm=True) == parts("zero3", overlap_comm=False)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_buckets_overlap_by_default_in_the_memory_of_one(strategy: str) -> None:
    def settings(trainable: int, **given: Any) -> ZeroSettings:
        zero = {"zero_optimization": given}
        return ZeroSettings.of(zero, strategy=strategy, offload="none", trainable=trainable)

    two, one = settings(7 * 10**9), settings(7 * 10**9, overlap_comm=False)
    assert (two.buffers, one.buffers) == (2, 1)
    assert two.buffers * two.bucket_elements == one.bucket_elements
    assert settings(10**8).buffers == 1  # which takes all gradients


def test_what_zero3_may_gather_is_as_given() -> None:
    assert parts("zero3", stage3_max_live_parameters=GIVEN)["gathered weights"] == 2 * GIVEN
    assert parts("zero3")["gathered weights"] < 2 * GIVEN


def test_a_nodes_copy_is_all_weights_over_its_ranks() -> None:
    copied, plain = parts("zero3", zero_hpz_partition_size=8), parts("zero3")
    weights = 8 * (plain["weights"] + plain["frozen weights"])  # of one rank, over 4 nodes of 8
    assert copied.pop(NODE_WEIGHTS) == pytest.approx(4 * weights / 8, rel=1e-6)
    assert plain["fragmentation"] < copied.pop("fragmentation") and plain.pop("fragmentation")
    assert copied == plain


def test_a_plan_names_what_it_does_not_consider() -> None:
    given = {"zero_optimization": {"sub_group_size": 1, "reduce_bucket_size": GIVEN}, "prescale_gradients": True}
    plan = plan_run(load_run_file(RUN_FILE, [f"train.deepspeed={json.dumps(given)}"]))
    (note,) = (note for note in plan.notes if "train.deepspeed" in note)
    assert "prescale_gradients, zero_optimization.sub_group_size." in note
    assert "reduce_bucket_size" not in note
