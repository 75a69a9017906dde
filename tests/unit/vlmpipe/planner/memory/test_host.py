"""Offloading: which combinations work, and that what leaves the device is in the machine's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.flop_cases import QWEN2_5_VL, QWEN3_VL, model_config
from tests.support.trainer.tiny_native import model_section
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.run_config import load_run_file
from vlmpipe.planner.memory.activations import largest_sequences
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.host import TOKEN_BYTES, sequence_bytes
from vlmpipe.planner.memory.rank import Memory
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.dataloading.micro_batch_queue import AHEAD_BYTES
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.tracing.fake_inputs import SequenceShape, inputs_of, tensors_of

RUN_FILE = ROOT / "tests/fixtures/run_files/llava-7b-zero2-spot.yaml"
TRAIN = {"global_batch_size": 8, "optimizer": {"learning_rate": 1e-3}}


@pytest.mark.parametrize(
    ("strategy", "offload", "hint"),
    [
        ("ddp", "optimizer", "use one of zero1, zero2, zero3, or offload none"),
        ("ddp", "optimizer+weights", "use one of fsdp, hsdp, zero3, or offload none"),
        ("zero2", "optimizer+weights", "use one of fsdp, hsdp, zero3, or offload optimizer"),
        ("fsdp", "optimizer", "use one of zero1, zero2, zero3, or offload optimizer+weights"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_one_that_does(strategy: str, offload: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"strategy {strategy} cannot offload") as refused:
        TrainConfig.model_validate({**TRAIN, "strategy": strategy, "offload": offload})
    assert hint in str(refused.value)


def planned(strategy: str, offload: str, *, machine_gib: float | None = None) -> Memory:
    fields: dict[str, Any] = {
        "train.strategy": strategy,
        "train.offload": offload,
        "cluster.reduction_server": None,
    }
    if offload == "optimizer" and strategy in ("zero1", "zero2"):
        fields["train.gradient_accumulation_dtype"] = "bf16"
    if strategy.startswith("zero"):  # the same buckets with and without offloading
        fields["train.deepspeed"] = {"zero_optimization": {"overlap_comm": False}}
    if offload == "optimizer" and strategy in ("zero1", "zero2"):
        fields["train.gradient_accumulation_dtype"] = "bf16"
    config = load_run_file(RUN_FILE, [f"{name}={json.dumps(value)}" for name, value in fields.items()])
    catalog = load_catalog()
    machine = catalog.machines[config.cluster.machine_type]
    if machine_gib is not None:
        machine = replace(machine, memory_gib=machine_gib)
    gpu = catalog.gpus[config.cluster.accelerator_type]
    return estimate_memory(config, architecture(config), machine, gpu, nearest=False)


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer"), ("fsdp", "optimizer+weights")],
)
def test_moments_leave_the_device_and_lie_in_the_machine_for_each_of_its_ranks(strategy: str, offload: str) -> None:
    config = load_run_file(RUN_FILE)
    kept, offloaded = planned(strategy, "none"), planned(strategy, offload)
    assert kept.host is not None and offloaded.host is not None
    assert "optimizer" not in {part.name for part in kept.host.parts}
    on_device = {part.name: part.bytes for part in kept.parts}
    in_machine = {part.name: part.bytes for part in offloaded.host.parts}
    assert "optimizer" not in {part.name for part in offloaded.parts}
    assert in_machine["optimizer"] == config.cluster.processes * on_device["optimizer"]
    assert offloaded.total_bytes < kept.total_bytes - on_device["optimizer"] / 2


def test_weights_stay_on_the_device_unless_they_are_named() -> None:
    names = [{part.name for part in planned("zero3", offload).parts} for offload in ("optimizer", "optimizer+weights")]
    assert "weights" in names[0] and "weights" not in names[1]


def test_a_machine_with_too_little_memory_of_its_own_does_not_fit() -> None:
    roomy, small = (planned("zero2", "optimizer", machine_gib=gib) for gib in (4096, 64))
    assert roomy.fits and roomy.spare_bytes == small.spare_bytes
    assert not small.fits


@pytest.mark.parametrize(("strategy", "whole"), [("zero2", True), ("zero3", False), ("fsdp", False)])
def test_ranks_build_the_model_whole_unless_they_read_weights_while_they_shard_them(strategy: str, whole: bool) -> None:
    config, memory = load_run_file(RUN_FILE), planned(strategy, "none")
    parameters = architecture(config).shape.total_parameters
    assert memory.start is not None
    (built,) = (part.bytes for part in memory.start.parts if part.name == "model at the start")
    # DeepSpeed has it in fp32, and once more in bf16.
    assert (built == (4 + 2) * parameters * config.cluster.processes) == whole
    assert whole or built < 0.05 * 4 * parameters * config.cluster.processes
    small = planned(strategy, "none", machine_gib=256)
    assert small.fits == (not whole) and small.spare_bytes == memory.spare_bytes


def test_under_ddp_the_nodes_together_copy_the_state_once_for_a_checkpoint() -> None:
    nodes = load_run_file(RUN_FILE).cluster.replica_count
    memory = planned("ddp", "none")
    assert memory.host is not None
    state = sum(part.bytes for part in memory.parts if part.name in ("weights", "optimizer"))
    (copied,) = (part.bytes for part in memory.host.parts if part.name == "checkpoint")
    assert nodes * copied == pytest.approx(state, rel=1e-6)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_under_zero_the_ranks_copy_masters_and_moments_and_not_the_modules_weights(strategy: str) -> None:
    memory, ranks = planned(strategy, "none"), load_run_file(RUN_FILE).cluster.processes
    assert memory.host is not None
    state = sum(part.bytes for part in memory.parts if part.name in ("optimizer's weights", "optimizer"))
    (copied,) = (part.bytes for part in memory.host.parts if part.name == "checkpoint")
    assert copied == ranks * state > 0


@pytest.mark.slow
def test_offloaded_activations_are_inputs_of_blocks_in_the_machine_of_each_of_its_ranks() -> None:
    def plan(**train: Any) -> Memory:
        config = load_run_file(RUN_FILE, [f"train.{name}={json.dumps(value)}" for name, value in train.items()])
        catalog = load_catalog()
        machine, gpu = catalog.machines[config.cluster.machine_type], catalog.gpus[config.cluster.accelerator_type]
        return estimate_memory(config, architecture(config), machine, gpu, nearest=False)

    config = load_run_file(RUN_FILE)
    sizes = {"global_batch_size": 256, "micro_batch_size": 4, "activation_checkpointing": "full"}
    kept, offloaded = plan(**sizes), plan(**sizes, activation_offloading=True)
    shape = architecture(config).shape.language
    an_input = 2 * 4 * config.data.sequence_length * shape.hidden  # bf16
    assert kept.host and offloaded.host
    in_machine = {part.name: part.bytes for part in offloaded.host.parts}["offloaded activations"]
    assert in_machine == 8 * shape.layers * an_input
    # One is on its way while the next layer is computed again.
    assert kept.total_bytes - offloaded.total_bytes == pytest.approx((shape.layers - 2) * an_input, rel=0.1)


def ahead(accumulation: int) -> int:
    """Bytes of micro-batches on a node, planned for a step of so many of them on each rank."""
    config = load_run_file(RUN_FILE, ["features.cache=off"])
    size = accumulation * config.train.micro_batch_size * config.cluster.processes * config.cluster.replica_count
    config = load_run_file(RUN_FILE, ["features.cache=off", f"train.global_batch_size={size}"])
    catalog = load_catalog()
    machine, gpu = catalog.machines[config.cluster.machine_type], catalog.gpus[config.cluster.accelerator_type]
    memory = estimate_memory(config, architecture(config), machine, gpu, nearest=False)
    assert memory.host is not None
    return next(part.bytes for part in memory.host.parts if part.name == "micro-batches")


def test_micro_batches_take_no_more_memory_when_a_step_accumulates_more() -> None:
    ranks = load_run_file(RUN_FILE).cluster.processes
    assert ahead(640) == ahead(6400) > ranks * AHEAD_BYTES
    assert ahead(1) < ahead(640)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("model", [{}, QWEN2_5_VL, QWEN3_VL])
def test_a_sequence_takes_the_bytes_of_its_tensors(model: dict[str, Any], cached: bool) -> None:
    tokens, images = 192, 4
    changes = [f"data.sequence_length={tokens}", f"data.max_images_per_sequence={images}"]
    changes.append(f"plan.sample_tokens={tokens}")  # a mean sample is no longer than a row
    config = load_run_file(RUN_FILE, changes).model_copy(update={"model": model_config(**model)})
    shape = family_of(config.model).shape(config.model)
    most, labels = max(largest_sequences(config, shape))
    inputs = inputs_of(config.model, SequenceShape(1, tokens, most, labels), shape.vocabulary, cached=cached)
    held = sum(tensor.nbytes for tensor in tensors_of(inputs))
    assert sequence_bytes(config, shape, cached=cached) == pytest.approx(held, rel=0.05, abs=TOKEN_BYTES * tokens)


@pytest.mark.parametrize("cached", [False, True])
def test_a_sequence_takes_the_bytes_of_its_images_masks_too(cached: bool) -> None:
    tokens, square = 4 * 40, (40, 40)  # ten tiles of four tokens: three images, and room for labels
    changes = [f"data.sequence_length={tokens}", f"plan.sample_tokens={tokens}", "data.max_images_per_sequence=3"]
    section = model_section("smolvlm", longest_edge=48)
    config = load_run_file(RUN_FILE, changes).model_copy(update={"model": ModelConfig.model_validate(section)})
    shape, images = family_of(config.model).shape(config.model), image_form_of(config.model).published
    assert images is not None and shape.stored_numbers is not None
    _, labels = max(largest_sequences(config, shape))
    held = images.layout(square)["pixel_attention_mask"].nbytes
    held += 2 * shape.stored_numbers if cached else images.layout(square)["pixel_values"].nbytes
    images_held = (tokens - labels) / shape.image_tokens
    assert sequence_bytes(config, shape, cached=cached) == round(images_held * held) + TOKEN_BYTES * tokens
