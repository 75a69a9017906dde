"""Time of computing: laws of the rates and of the memory traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.configs import A100_80, H100, LLAVA_7B, TEXT_8B, machine, run_config
from vlmpipe.catalog.machines import Gpu, load_catalog
from vlmpipe.planner.memory.pipeline_partition import sequence_flops
from vlmpipe.planner.parallel_layout import layout_of, make_layout
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.computing import MovedBytes, compute_seconds, moved_bytes, reached
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.sizing.flops import PartFlops, SequenceFlops, tower_attention_share
from vlmpipe.trainer.sizing.model_shape import ModelShape

TEXT: dict[str, Any] = {"train__strategy": "fsdp", "plan__sample_images": 0}


def computed(shape: ModelShape = TEXT_8B, gpu: Gpu = A100_80, **run: Any) -> tuple[SequenceFlops, float]:
    """FLOPs of a packed sequence and seconds to compute it."""
    config = run_config(**TEXT | run)
    load = Workload.assumed(config, shape)
    case = Scenario(config, shape, layout_of(config), load, machine(), gpu)
    flops = sequence_flops(config, shape, load, cached=False)
    rates, _ = reached(config, shape, case.layout, gpu, cached=False)
    moved = moved_bytes(config, shape, load, flops, rates, cached=False)
    return flops, compute_seconds(flops, moved, config, shape, case.layout, rates)


def share_of_peak(shape: ModelShape = TEXT_8B, gpu: Gpu = A100_80, **run: Any) -> float:
    flops, seconds = computed(shape, gpu, **run)
    assert gpu.bf16_tflops
    return flops.total / seconds / (gpu.bf16_tflops * 1e12)


def narrowed(factor: int) -> ModelShape:
    language = TEXT_8B.language
    sizes = {name: getattr(language, name) // factor for name in ("hidden", "heads", "kv_heads", "intermediate")}
    return replace(TEXT_8B, language=replace(language, **sizes))


def test_no_run_computes_faster_than_its_matrix_products() -> None:
    for gpu in (A100_80, H100):
        assert share_of_peak(gpu=gpu, plan__sample_tokens=512) < gpu.matmul_share


def test_narrow_layers_reach_less_of_the_peak() -> None:
    shares = [share_of_peak(narrowed(factor)) for factor in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.7 * shares[0]


def test_a_gpu_whose_memory_kept_pace_less_reaches_less_of_its_peak() -> None:
    assert share_of_peak(gpu=H100) < share_of_peak(gpu=A100_80)
    fast_memory = replace(H100, memory_gbytes_per_s=4800)
    assert share_of_peak(gpu=fast_memory) > share_of_peak(gpu=H100)


def test_compiled_layers_move_fewer_bytes_and_launch_as_one() -> None:
    assert 1.05 < share_of_peak(train__compile="on") / share_of_peak() < 1.3
    tiny: dict[str, Any] = {"data__sequence_length": 128, "plan__sample_tokens": 128}
    eager, compiled = (computed(narrowed(8), train__compile="on" if on else "off", **tiny)[1] for on in (False, True))
    assert eager > 5 * compiled  # launches bind


def test_launches_bind_less_the_more_sequences_a_pass_holds() -> None:
    tiny: dict[str, Any] = {"data__sequence_length": 128, "plan__sample_tokens": 128}
    one, eight = (computed(narrowed(8), train__micro_batch_size=size, **tiny)[1] for size in (1, 8))
    assert one > 4 * eight


def test_launches_of_adapters_bind_short_sequences_and_not_long_ones() -> None:
    def slower(tokens: int) -> float:
        sizes: dict[str, Any] = {"data__sequence_length": tokens, "plan__sample_tokens": tokens}
        adapted = replace(TEXT_8B, adapters={"q_proj": 16 * 8192}, adapter_rank=16)
        return computed(adapted, **sizes)[1] / computed(**sizes)[1]

    assert slower(128) > 1.5 and slower(4096) < 1.1


def test_ranks_that_share_tokens_compute_what_lies_between_layers_once() -> None:
    def seconds(ranks: int, *, shared: bool) -> float:
        config = run_config(**TEXT, train__sequence_parallel=False)
        config = config.model_copy(
            update={"train": config.train.model_copy(update={"tensor_parallel": ranks, "sequence_parallel": shared})}
        )
        layout, load = make_layout("tp", 1, 8, tensor_parallel=ranks), Workload.assumed(config, TEXT_8B)
        flops = sequence_flops(config, TEXT_8B, load, cached=False)
        rates, _ = reached(config, TEXT_8B, layout, A100_80, cached=False)
        moved = moved_bytes(config, TEXT_8B, load, flops, rates, cached=False)
        return compute_seconds(flops, moved, config, TEXT_8B, layout, rates)

    assert seconds(8, shared=True) == pytest.approx(seconds(1, shared=True) / 8)
    assert seconds(8, shared=True) < seconds(8, shared=False)


def test_attention_of_the_tower_takes_the_rate_of_attention_unless_efficiency_was_measured() -> None:
    def tower_s(**changes: Any) -> float:
        config = run_config(**changes)
        layout, load = make_layout("ddp", 1, 1), Workload.assumed(config, LLAVA_7B)
        flops = sequence_flops(config, LLAVA_7B, load, cached=False)
        rates, _ = reached(config, LLAVA_7B, layout, A100_80, cached=False)
        still = MovedBytes(0.0, 0.0, 0.0, 0.0)
        whole = compute_seconds(flops, still, config, LLAVA_7B, layout, rates)
        without = replace(flops, tower=PartFlops())
        return (whole - compute_seconds(without, still, config, LLAVA_7B, layout, rates)) / flops.tower.total

    share = tower_attention_share(LLAVA_7B, -1)
    assert 0.05 < share < 0.2, "576 patches at a width of 1,024"
    peak = 312e12
    expected = (1 - share) / (A100_80.matmul_share * peak) + share / (A100_80.attention_share * peak)
    assert tower_s() == pytest.approx(expected, rel=1e-6)
    assert tower_s(plan__efficiency=0.4) == pytest.approx(1 / (0.4 * peak), rel=1e-6)


def test_every_gpu_of_the_catalogue_has_rates_and_says_where_from() -> None:
    for gpu in load_catalog().gpus.values():
        assert 0 < gpu.attention_share < gpu.matmul_share < 0.9, gpu.accelerator_type
        assert gpu.has_published_runs == gpu.rates_from.startswith("fitted to published runs"), gpu.accelerator_type
