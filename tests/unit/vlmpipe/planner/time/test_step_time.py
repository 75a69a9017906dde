"""Time of a step: against published runs, and part by part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.configs import A100_80, H100, LLAVA_7B, T4, TEXT_8B, machine, run_config
from vlmpipe.catalog.machines import Gpu
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.parallel_layout import layout_of, make_layout
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.computing import compute_seconds, moved_bytes, reached
from vlmpipe.planner.time.optimizer_step import HOST_BYTES_PER_S, LINK_BYTES_PER_S, UPDATE_BYTES_PER_PARAMETER
from vlmpipe.planner.time.saving import SAVE_BYTES_PER_S, SIDE_BY_SIDE
from vlmpipe.planner.time.step_time import (
    OVERLAPPED,
    SAVING,
    UNCOMPILED,
    UNEVEN,
    Time,
    estimate_time,
    image_shares,
    sequence_flops,
)
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.sizing.image_preparation import SQUARE_S
from vlmpipe.trainer.sizing.model_shape import ModelShape

NODE = machine()


NO_OVERLAP: dict[str, Any] = {"train__deepspeed": {"zero_optimization": {"overlap_comm": False}}}


def timed(
    config: RunConfig, shape: ModelShape = LLAVA_7B, gpu: Gpu | None = A100_80, *, cached: bool = False, **node: Any
) -> Time:
    load = Workload.assumed(config, shape)
    return estimate_time(Scenario(config, shape, layout_of(config), load, replace(NODE, **node), gpu, cached=cached))


def part(time: Time, name: str) -> float:
    return sum(each.s for each in time.parts if each.name == name)


def test_exposed_components_add_up_to_the_step() -> None:
    for strategy in ("ddp", "fsdp", "zero2"):
        time = timed(run_config(train__strategy=strategy, cluster__replica_count=2))
        assert sum(each.s for each in time.parts if not each.hidden) == pytest.approx(time.step_s)


def test_a_measured_efficiency_is_the_rate_of_all_flops_and_replaces_the_assumption() -> None:
    load = Workload.assumed(run_config(), LLAVA_7B)
    flops = sequence_flops(run_config(), LLAVA_7B, load, cached=False).total
    measured = timed(run_config(plan__efficiency=0.8))
    assert part(measured, "computing") == pytest.approx(8 * flops / (312e12 * 0.8))
    assert any("80% of the peak (plan.efficiency)" in sentence for sentence in measured.assumptions)
    assert not any("Matrix products reach" in sentence for sentence in measured.assumptions)


def test_a_small_model_on_a_fast_gpu_waits_for_the_threads_that_prepare_its_images() -> None:
    small = replace(
        LLAVA_7B,
        tower=replace(LLAVA_7B.tower, layers=1),
        language=replace(LLAVA_7B.language, layers=1),
        vocabulary=1000,
        parameters={name: number // 1000 for name, number in LLAVA_7B.parameters.items()},
    )
    name, config = "waiting for prepared images", run_config(train__global_batch_size=64)
    assert part(timed(config, gpu=H100), name) == 0
    bound = timed(config, small, H100, vcpus=8)  # one for each rank
    images = 8 * Workload.assumed(config, small).images_per_sequence  # of a rank in a step
    before = sum(each.s for each in bound.parts if each.name not in ("waiting for data", SAVING) and not each.hidden)
    assert part(bound, name) > 0 and before == pytest.approx(images * SQUARE_S)
    assert part(timed(config, small, H100, vcpus=8, cached=True), name) == 0
    assert part(timed(config, small, H100, vcpus=8 * 16), name) < part(bound, name) / 4


def test_fp32_computes_at_the_fp32_rate() -> None:
    kinds = {"train__precision": "bf16", "plan__efficiency": 0.5}, {"train__precision": "fp32", "plan__efficiency": 0.5}
    bf16, fp32 = (part(timed(run_config(**kind)), "computing") for kind in kinds)
    assert fp32 / bf16 == pytest.approx(312 / 19.5)


def test_a_gpu_without_bf16_is_reported_and_computes_as_fp32() -> None:
    bf16, fp32 = (timed(run_config(train__precision=kind), gpu=T4) for kind in ("bf16", "fp32"))
    assert part(bf16, "computing") == pytest.approx(part(fp32, "computing"))
    assert any("no bf16 units" in sentence for sentence in bf16.assumptions)
    assert not any("no bf16 units" in sentence for sentence in fp32.assumptions)
    assert any("assumed, as no run on it was published" in sentence for sentence in bf16.assumptions)


def test_fsdp_computes_a_frozen_tower_in_fp32_unless_its_weights_are_bf16() -> None:
    fp16 = {"train__precision": "fp16"}
    fsdp, ddp = (timed(run_config(train__strategy=name, **fp16)) for name in ("fsdp", "ddp"))
    assert part(fsdp, "computing") > 1.1 * part(ddp, "computing")
    assert part(timed(run_config(train__strategy="fsdp")), "computing") == pytest.approx(part(ddp, "computing"))
    cached_fsdp, cached_ddp = (timed(run_config(train__strategy=name, **fp16), cached=True) for name in ("fsdp", "ddp"))
    assert part(cached_fsdp, "computing") == pytest.approx(part(cached_ddp, "computing"))
    assert any("Frozen parts stay fp32" in sentence for sentence in fsdp.assumptions)
    assert not any("Frozen parts stay fp32" in sentence for sentence in cached_fsdp.assumptions)


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "bf16"), ("zero1", "bf16-autocast"), ("zero2", "bf16")])
def test_sums_of_gradients_hide_behind_the_backward_pass(strategy: str, precision: str) -> None:
    found = timed(run_config(train__strategy=strategy, train__precision=precision))
    assert part(found, "all-reduce of gradients") == 0
    assert part(found, OVERLAPPED) > 0
    assert (part(found, "all-gather of weights") > 0) == (strategy != "ddp")  # after the update


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_nothing_hides_of_zero_without_overlap_comm(strategy: str) -> None:
    assert part(timed(run_config(train__strategy=strategy, **NO_OVERLAP)), OVERLAPPED) == 0


def test_deepspeeds_bf16_optimizer_hides_nothing() -> None:
    assert part(timed(run_config(train__strategy="zero1")), OVERLAPPED) == 0


def test_a_pipeline_hides_gathers_behind_its_first_forward_pass_and_no_reduction() -> None:
    pipeline = {"train__strategy": "pp", "train__pipeline_parallel": 2, "cluster__replica_count": 2}
    found = timed(run_config(**pipeline), nic_gbps=3200)
    assert part(found, "all-gather of weights") == 0
    assert part(found, "reduce-scatter of gradients") > 0


def test_weights_kept_from_forward_to_backward_pass_are_gathered_once() -> None:
    twice, once = (
        timed(run_config(train__strategy="fsdp", train__reshard_after_forward=kind), nic_gbps=1)
        for kind in ("always", "never")
    )
    sent = [part(each, "all-gather of weights") + part(each, OVERLAPPED) for each in (twice, once)]
    assert sent[0] > 1.2 * sent[1]


def test_fsdp_hides_its_traffic_until_the_network_is_slower_than_computing() -> None:
    fast, slow = (
        timed(run_config(train__strategy="fsdp", cluster__replica_count=2), nic_gbps=gbps) for gbps in (3200, 20)
    )
    names = ("all-gather of weights", "reduce-scatter of gradients")
    assert [part(fast, name) for name in names] == [0, 0]
    assert all(part(slow, name) > 0 for name in names)
    assert slow.exposed_all_reduce_s == 0  # nothing that a Reduction Server could do


def test_tensor_parallelism_hides_no_sum_of_activations() -> None:
    config = run_config(train__global_batch_size=32)
    layout = make_layout("tp", 1, 8, tensor_parallel=8)
    load = Workload.assumed(config, LLAVA_7B)
    time = estimate_time(Scenario(config, LLAVA_7B, layout, load, NODE, A100_80))
    assert part(time, "all-reduce of activations") > 0


def test_a_slow_network_is_the_bottleneck() -> None:
    time = timed(run_config(cluster__replica_count=4), nic_gbps=10)
    assert time.binds == "all-reduce of gradients"
    assert time.exposed_all_reduce_s == pytest.approx(part(time, "all-reduce of gradients"))
    assert timed(run_config()).binds == "computing"


def test_a_reduction_server_is_not_counted_on() -> None:
    reducers = {"replica_count": 13}
    without, with_them = (
        timed(run_config(cluster__replica_count=4, cluster__reduction_server=value)) for value in (None, reducers)
    )
    assert with_them.step_s == without.step_s
    assert any("without the Reduction Server" in sentence for sentence in with_them.assumptions)


def test_one_node_waits_for_no_network() -> None:
    assert timed(run_config()).exposed_all_reduce_s == 0


def test_the_update_moves_its_bytes_through_memory() -> None:
    update = {name: part(timed(run_config(train__strategy=name)), "optimizer update") for name in ("ddp", "zero2")}
    assert update["ddp"] == pytest.approx(LLAVA_7B.trainable_parameters * UPDATE_BYTES_PER_PARAMETER / 2039e9)
    assert update["zero2"] == pytest.approx(update["ddp"] / 8)


def test_the_ema_is_read_and_written_with_the_weights() -> None:
    averaged = timed(run_config(train__strategy="ddp", train__ema_decay=0.999))
    moved = LLAVA_7B.trainable_parameters * (UPDATE_BYTES_PER_PARAMETER + 12)
    assert part(averaged, "optimizer update") == pytest.approx(moved / 2039e9)
    fsdp = timed(run_config(train__strategy="fsdp", train__ema_decay=0.999))
    assert fsdp.save is not None
    assert fsdp.save.writes_s == pytest.approx(
        (12 + 4) * LLAVA_7B.trainable_parameters / (SIDE_BY_SIDE * SAVE_BYTES_PER_S)
    )


COPIES = "copies to and from the machine's memory"


def test_an_offloaded_update_takes_the_time_of_host_memory_and_of_the_link() -> None:
    kept, offloaded = (
        timed(run_config(train__strategy="zero3", train__offload=where)) for where in ("none", "optimizer")
    )
    owned = LLAVA_7B.trainable_parameters / 8
    assert part(kept, COPIES) == 0
    assert part(offloaded, "optimizer update") == pytest.approx(owned * UPDATE_BYTES_PER_PARAMETER / HOST_BYTES_PER_S)
    assert part(offloaded, COPIES) == pytest.approx(
        owned * (4 + 2) / LINK_BYTES_PER_S
    )  # fp32 gradients in, bf16 weights out
    assert offloaded.step_s is not None and kept.step_s is not None and offloaded.step_s > kept.step_s
    assert any("An offloaded update moves 20 GB/s a rank" in sentence for sentence in offloaded.assumptions)
    assert not any("offloaded" in sentence for sentence in kept.assumptions)


def test_offloaded_weights_are_copied_whenever_they_are_gathered() -> None:
    optimizer, weights = (
        timed(run_config(train__strategy="zero3", train__offload=what)) for what in ("optimizer", "optimizer+weights")
    )
    micro_steps = run_config().train.global_batch_size // (8 * run_config().train.micro_batch_size)
    assert part(weights, COPIES) == pytest.approx(part(optimizer, COPIES) * (4 + 2 * 2 * micro_steps) / 6)


def test_a_pipeline_waits_in_its_bubble() -> None:
    config = run_config(train__global_batch_size=32)
    layout = make_layout("pp", 1, 8, pipeline_parallel=4)
    load = Workload.assumed(config, LLAVA_7B)
    time = estimate_time(Scenario(config, LLAVA_7B, layout, load, NODE, A100_80))
    assert part(time, "pipeline bubble") == pytest.approx(part(time, "computing") * 3 / 16)


def test_a_checkpoint_blocks_for_its_copy_and_for_what_the_background_does_not_finish() -> None:
    state = 12 * LLAVA_7B.trainable_parameters
    often, seldom = (
        timed(run_config(train__strategy="fsdp", train__checkpoint_every_steps=every)) for every in (1, 1000)
    )
    assert seldom.save is not None and seldom.step_s is not None and often.step_s is not None
    assert seldom.save.blocks_s == pytest.approx(state / 8 / LINK_BYTES_PER_S)
    assert seldom.save.writes_s == pytest.approx(state / (SIDE_BY_SIDE * SAVE_BYTES_PER_S)), "by ranks side by side"
    assert part(seldom, SAVING) == pytest.approx(seldom.save.blocks_s / 1000)
    assert often.step_s == pytest.approx(seldom.save.blocks_s + seldom.save.writes_s)  # a save waits for the one before


@pytest.mark.parametrize("change", [{"checkpoint__async_save": False}, {"plan__checkpoint_save_s": 30}])
def test_a_checkpoint_that_training_waits_for_or_that_was_measured_blocks_whole(change: dict[str, Any]) -> None:
    time = timed(run_config(**change, train__strategy="fsdp", train__checkpoint_every_steps=10))
    assert time.save is not None and time.save.writes_s == 0
    blocks_s = change.get(
        "plan__checkpoint_save_s", 12 * LLAVA_7B.trainable_parameters / (SIDE_BY_SIDE * SAVE_BYTES_PER_S)
    )
    assert time.save.blocks_s == pytest.approx(blocks_s)
    assert part(time, SAVING) == pytest.approx(blocks_s / 10)


def test_cpu_jobs_have_no_time_and_say_why() -> None:
    config = run_config(
        cluster__accelerator_type="", cluster__accelerator_count=0, cluster__machine_type="n1-standard-8"
    )
    time = timed(config, gpu=None)
    assert time.step_s is None and time.train_hours is None and time.mfu is None
    assert time.steps == Workload.assumed(config, LLAVA_7B).steps
    assert "CPU" in time.assumptions[0]


def test_mfu_counts_neither_padding_nor_recomputation() -> None:
    base = timed(run_config())
    assert base.mfu is not None
    padded = timed(run_config(data__pack=False))
    assert padded.mfu is not None and padded.mfu < 0.3 * base.mfu
    lean = timed(run_config(train__activation_checkpointing="none"))
    assert lean.mfu is not None and lean.mfu > base.mfu


def test_hours_are_steps_of_that_time() -> None:
    time = timed(run_config())
    assert time.steps is not None and time.step_s is not None
    assert time.train_hours == pytest.approx(time.steps * time.step_s / 3600)


def test_dpo_has_a_forward_pass_under_the_reference_before_its_steps() -> None:
    """The forward share of an epoch's computing, and as much more as there are validation samples."""
    configs = [run_config(train__objective=name, data__validation_fraction=0.2) for name in ("dpo", "simpo")]
    dpo, simpo = map(timed, configs)
    assert dpo.steps and dpo.step_s and dpo.train_hours and simpo.train_hours
    before_s = 3600 * dpo.train_hours - dpo.steps * dpo.step_s
    of_images = sum(part(dpo, name) for name in (UNCOMPILED, UNEVEN))
    load = Workload.assumed(configs[0], LLAVA_7B)
    assert load.sequences_per_epoch
    epoch_s = load.sequences_per_epoch / load.sequences_per_step * (part(dpo, "computing") + of_images)
    flops = sequence_flops(configs[0], LLAVA_7B, load, cached=False)
    assert 0.25 < flops.forward / flops.total < 0.6
    # Less by what communication slows computing in a step.
    assert before_s == pytest.approx(flops.forward / flops.total * epoch_s / 0.8, rel=0.1)
    assert simpo.train_hours == pytest.approx(simpo.steps * simpo.step_s / 3600)  # type: ignore[operator]
    said = [any("pass under the reference" in sentence for sentence in time.assumptions) for time in (dpo, simpo)]
    assert said == [True, False]


def test_without_samples_a_step_is_known_and_the_run_is_not() -> None:
    time = timed(run_config(plan__samples=0))
    assert time.step_s is not None and time.steps is None and time.train_hours is None
    assert timed(run_config(plan__samples=0, train__max_steps=10)).steps == 10


def test_hpz_gathers_inside_nodes_add_to_the_one_between_them() -> None:
    """Two collectives, one after the other, not two scopes of one."""
    changes: dict[str, Any] = {"train__strategy": "zero3", "cluster__replica_count": 4, "train__global_batch_size": 64}
    plain, copied = (
        timed(run_config(**changes, train__deepspeed={"zero_optimization": {"overlap_comm": False, **copies}}))
        for copies in ({}, {"zero_hpz_partition_size": 8})
    )
    gathers = 2 * 64 // 32
    whole, name = part(plain, "all-gather of weights"), "all-gather of weights"
    assert part(copied, name) == pytest.approx(whole / gathers, rel=0.01)  # but for the tower all is trained
    assert 0 < part(copied, f"{name} within nodes") < whole - part(copied, name)
    assert sum(each.s for each in copied.parts if not each.hidden) == pytest.approx(copied.step_s)


def test_llama_8b_with_262144_tokens_trains_at_about_torchtitans_rate() -> None:
    """torchtitan: 548 tokens/s/GPU on 8 H100 that share sequences of 262,144 tokens (by a ring, not by heads)."""
    changes: dict[str, Any] = {
        "train__strategy": "fsdp",
        "train__global_batch_size": 1,
        "train__micro_batch_size": 1,
        "train__activation_checkpointing": "full",
        "train__checkpoint_every_steps": 10_000,
        "train__context_parallel": 8,
        "data__sequence_length": 262_144,
        "plan__sample_tokens": 262_144,
        "plan__sample_images": 0,
    }
    time = timed(run_config(**changes), TEXT_8B, H100, nic_gbps=800)
    print(f"8B, 262,144 tokens, 8 ranks a sequence: {time.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")
    assert time.tokens_per_s_per_gpu == pytest.approx(548, rel=0.25)
    assert 0 < part(time, "all-to-all of activations") < 0.02 * part(time, "computing")


def test_ranks_that_share_sequences_divide_the_language_model_and_not_the_vision_encoder() -> None:
    config = run_config(plan__efficiency=0.5)
    load = Workload.assumed(config, LLAVA_7B)
    flops = sequence_flops(config, LLAVA_7B, load, cached=False)
    rates, _ = reached(config, LLAVA_7B, layout_of(config), A100_80, cached=False)
    moved = moved_bytes(config, LLAVA_7B, load, flops, rates, cached=False)
    one, four = (
        compute_seconds(flops, moved, config, LLAVA_7B, make_layout("fsdp", 1, 8, context_parallel=ranks), rates)
        for ranks in (1, 4)
    )
    whole = (flops.tower.total + flops.projector.total) / rates.trained
    assert four == pytest.approx(whole + (one - whole) / 4)


def test_what_images_add_to_computing_is_there_only_where_it_can_be() -> None:
    config, layout = run_config(train__strategy="ddp"), make_layout("ddp", 1, 8)
    load = Workload.assumed(config, LLAVA_7B)
    case = Scenario(config, LLAVA_7B, layout, load, NODE, A100_80)
    assert image_shares(case) == {UNCOMPILED: 0.5, UNEVEN: 0.1}, "the 1.6 of published runs"

    def on(alone: bool = False, cached: bool = False, **changes: Any) -> set[str]:
        other = run_config(train__strategy="ddp", **changes)
        of = make_layout("ddp", 1, 1) if alone else layout
        return set(image_shares(Scenario(other, LLAVA_7B, of, load, NODE, A100_80, cached=cached)))

    assert on(plan__efficiency=0.4) == set(), "a measured share of the peak has all of it"
    assert on(cached=True) == on(alone=True) == {UNCOMPILED}, "nothing is decoded, or there is nobody to wait for"
    assert on(train__compile="on", alone=True) == set() and on(train__compile="on") == {UNEVEN}
    selective = run_config(train__strategy="ddp", train__activation_checkpointing="selective")
    assert image_shares(replace(case, config=selective))[UNCOMPILED] == 0.9
    assert image_shares(replace(case, load=replace(load, images_per_sequence=0.0))) == {}
