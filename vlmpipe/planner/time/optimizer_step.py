"""Time of the optimizer update, on the GPU or offloaded (`train.offload`), and of offloaded activations."""

from __future__ import annotations

from vlmpipe.planner.parallel_layout import SHARDED_BY_FSDP
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.communication import Work

# Memory traffic per fp32 parameter of torch's fused AdamW, which reads weight, gradient and two moments once (16) and
# writes all but the gradient (12), and of clipping (norm 4, scaling 8).
UPDATE_BYTES_PER_PARAMETER = 40
AVERAGE_UPDATE_BYTES_PER_PARAMETER = 12  # torch's foreach lerp reads the average and the weight, and writes the average

# Bytes a second of one rank's update in the machine's memory. Measured: fused AdamW on one thread of an AMD EPYC moved
# 48e9, with clipping 44e9 (part host-update of `bench-planner`). Less is taken: a machine's ranks share its memory.
HOST_BYTES_PER_S = 20e9
# A GPU's link to the machine's memory: assumed. PCI Express 3.0 x16 has 15.8 GB/s, each generation after it twice that.
LINK_BYTES_PER_S = 12e9


def update_times(case: Scenario, *, micro_steps: int) -> dict[str, float]:
    """Seconds of a step by component. AdamW and EMA are bound by the bytes that they move for a rank's parameters."""
    assert case.gpu is not None
    train = case.config.train
    # Parameters that a rank updates.
    owned = case.shape.trainable_parameters / (case.layout.optimizer_shards * case.layout.model_ranks)
    moved = UPDATE_BYTES_PER_PARAMETER + (AVERAGE_UPDATE_BYTES_PER_PARAMETER if train.ema_decay else 0)
    if train.offload == "none":
        return {"optimizer update": owned * moved / (case.gpu.memory_gbytes_per_s * 1e9)}
    # Gradients come in the type of their sums. Weights go back once, or whenever they are gathered from the machine's
    # memory, where FSDP has masters only.
    gradient_bytes = 2 if train.gradient_accumulation_dtype == "bf16" else 4
    weight_bytes = 2 if train.has_bf16_weights and train.strategy.startswith("zero") else 4
    copied_bytes = gradient_bytes + weight_bytes * (2 * micro_steps if train.offload == "optimizer+weights" else 1)
    return {
        "optimizer update": owned * moved / HOST_BYTES_PER_S,
        "copies to and from the machine's memory": owned * copied_bytes / LINK_BYTES_PER_S,
    }


def activation_copies_s(case: Scenario, work: Work) -> float:
    """Seconds in which the inputs of blocks go to the machine's memory in one forward pass, and come back in one
    backward pass (`train.activation_offloading`)."""
    train, shape = case.config.train, case.shape
    if not train.activation_offloading:
        return 0.0
    # Between blocks, autocast leaves fp32.
    number_bytes = 2 if train.has_bf16_weights or (train.strategy in SHARDED_BY_FSDP and work.compute_bytes == 2) else 4
    shares = case.layout.context_parallel * (case.layout.tensor_parallel if train.sequence_parallel else 1)
    numbers = work.micro_batch_size * work.sequence_length * shape.language.hidden / shares
    return shape.language.layers * numbers * number_bytes / LINK_BYTES_PER_S


def update_sentences(case: Scenario) -> list[str]:
    """Assumptions of `update_times`."""
    config, sentences = case.config, []
    if config.train.activation_offloading:
        sentences.append(
            f"Inputs of blocks move at {LINK_BYTES_PER_S / 1e9:g} GB/s between host memory and each GPU "
            "(assumed), overlapped with the computation of a pass."
        )
    if config.train.offload == "none":
        return sentences
    sentences += [
        f"An offloaded update moves {HOST_BYTES_PER_S / 1e9:g} GB/s a rank in the machine's memory (one thread, alone, "
        f"moved 44 on another machine), and {LINK_BYTES_PER_S / 1e9:g} GB/s between it and each GPU (assumed). Nothing "
        "hides them."
    ]
    return sentences
