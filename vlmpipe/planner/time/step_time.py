"""Time of a training step, its components, and the bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.pipeline_partition import by_rank, planned_stages, sequence_flops
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.calibration import LATEST, Calibration, calibration_of, latest_calibration
from vlmpipe.planner.time.communication import Work, pipeline_bubble, traffic
from vlmpipe.planner.time.computing import compute_seconds, moved_bytes, reached
from vlmpipe.planner.time.interval import Interval, interval_of
from vlmpipe.planner.time.kernels import kernel_sentences
from vlmpipe.planner.time.optimizer_step import activation_copies_s, update_sentences, update_times
from vlmpipe.planner.time.overlap import Hiding, by_name, exposed_communication, slowed_seconds
from vlmpipe.planner.time.saving import SaveTime, save_sentences, save_time
from vlmpipe.trainer.config.model import PUBLISHED_FAMILIES
from vlmpipe.trainer.sizing.flops import model_flops_per_sequence
from vlmpipe.trainer.sizing.image_preparation import rank_preparation_s
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.sizing.pipeline_partition import Stage

# By how much of computing runs with images take longer than text of the same arithmetic, in parts, without a measured
# plan.efficiency. Kernels of layers that are not compiled, and selective checkpointing of those: on an H200 this
# trainer took 1/0.65 and 1/0.45 of the computing that was planned (benchmarks/results/2026-11-26-h200.md). The rest, of
# ranks whose images differ and that wait for each other: what is left of the 1.6 that is the median of 12 published
# runs without their padding (LLaVA-1.5 and TinyLLaVA, 1.2 to 2.1), which were not compiled.
UNCOMPILED_SHARE = 0.5
UNCOMPILED_SELECTIVE_SHARE = 0.9
UNEVEN_SHARE = 0.1
UNCOMPILED, UNEVEN = "kernels of uncompiled layers", "image imbalance between ranks"
DATA_WAIT_SHARE = 0.02  # the loader's goal; the part `loops` of `make bench-train` measures it

SAVING = "saving checkpoints"
OVERLAPPED = "communication overlapped with computing"
SLOWED = "computing slowed by communication"
# Loss by the slowest rank for each doubling of nodes. Read: 8B on 8 and on 128 H100, 2.7 and 2.3 % (torchtitan); 1B to
# 70B on 64 to 512, 2 to 5 % a doubling (llm-foundry).
STRAGGLER_SHARE = 0.01


REFERENCES = (
    "The pass under the reference over both splits, {minutes:,.1f} min of computing before the first step, is in the "
    "time of training; another run with this start and data finds what it computed."
)


@dataclass(frozen=True)
class TimePart:
    """Seconds of a step; hidden ones run at the same time as others and add nothing."""

    name: str
    s: float
    hidden: bool = False


@dataclass(frozen=True)
class Time:
    """Time of the training job. None: not known, and an assumption says why."""

    step_s: float | None
    parts: tuple[TimePart, ...]
    mfu: float | None  # useful model FLOPs of a step / (peak in the compute precision x step_s)
    binds: str  # the largest part
    steps: int | None
    train_hours: float | None
    tokens_per_s_per_gpu: float | None  # useful tokens
    save: SaveTime | None
    exposed_all_reduce_s: float  # between nodes, in a step: what a Reduction Server could shorten
    assumptions: tuple[str, ...]
    pace: float = 1.0  # by which parts are longer than without plan.calibrate_from
    interval: Interval | None = None  # shares of step_s and train_hours that published runs took

    @property
    def working_s(self) -> float:
        """A step without its share of checkpoints."""
        return sum(part.s for part in self.parts if not part.hidden and part.name != SAVING)


def estimate_time(case: Scenario) -> Time:
    """Time of a step and of the training job."""
    config, shape, layout, load = case.config, case.shape, case.layout, case.load
    if case.gpu is None:
        what = "Training on CPUs: how fast they compute"
        if config.cluster.accelerator_count:
            what = "How fast this machine's GPUs compute, which the catalogue does not have,"
        why = f"{what} is not known, so there is no time."
        return Time(None, (), None, "", load.steps, None, None, None, 0.0, (why, load.origin))
    rates, assumptions = reached(config, shape, layout, case.gpu, cached=case.cached)
    work = work_of(case)
    flops = sequence_flops(config, shape, load, cached=case.cached)
    rank_sequences = work.micro_steps * work.micro_batch_size
    moved = moved_bytes(config, shape, load, flops, rates, cached=case.cached)
    compute_s = rank_sequences * compute_seconds(flops, moved, config, shape, layout, rates)
    transfers = traffic(layout, shape, work)
    backward_s = compute_s * (1 - flops.forward / flops.total)
    hiding = Hiding.of(
        config.train,
        shape.trainable_parameters,
        micro_steps=work.micro_steps,
        forward_s=compute_s - backward_s,
        backward_s=backward_s,
    )
    exposed = exposed_communication(transfers, case.machine, case.gpu, hiding)
    hidden_s = sum(by_name(transfers, case.machine, case.gpu).values()) - sum(phase.s for phase in exposed)
    slowed_s = slowed_seconds(transfers, exposed, case.machine, case.gpu)
    parts = [TimePart("computing", compute_s), *(TimePart(phase.name, phase.s) for phase in exposed)]
    if slowed_s > 0:
        parts.append(TimePart(SLOWED, slowed_s))
    parts += [TimePart(name, share * (compute_s + slowed_s)) for name, share in image_shares(case).items()]
    if layout.pipeline_parallel > 1:
        share = pipeline_bubble(layout, work.micro_steps)
        parts.append(TimePart("pipeline bubble", compute_s * share / (1 - share)))
    copying_s = work.micro_steps * activation_copies_s(case, work)
    waiting_s = max(0.0, copying_s - (compute_s - backward_s)) + max(0.0, copying_s - backward_s)
    if waiting_s:
        parts.append(TimePart("waiting for offloaded activations", waiting_s))
    updating = update_times(case, micro_steps=work.micro_steps)
    parts += [TimePart(name, spent_s) for name, spent_s in updating.items()]
    if layout.nodes > 1:
        lost = STRAGGLER_SHARE * math.log2(layout.nodes)
        parts.append(TimePart("waiting for the slowest rank", lost * sum(part.s for part in parts)))
    preparing_s = 0.0
    if not case.cached:
        cores, ranks = case.machine.vcpus, layout.ranks_per_node
        image_s = rank_preparation_s(
            config.model.image_kind, shape, config.data.loader_threads, cores=cores, ranks=ranks
        )
        preparing_s = rank_sequences * load.images_per_sequence * image_s
    if (behind_s := preparing_s - sum(part.s for part in parts)) > 0:
        parts.append(TimePart("waiting for prepared images", behind_s))
    parts.append(TimePart("waiting for data", DATA_WAIT_SHARE * sum(part.s for part in parts)))
    calibration = _calibration(case)
    if calibration.pace != 1.0:
        parts = [replace(part, s=part.s * calibration.pace) for part in parts]
    save, every_steps = save_time(case), config.train.checkpoint_every_steps
    parts.append(TimePart(SAVING, save.in_a_step(sum(part.s for part in parts), every_steps)))
    step_s = sum(part.s for part in parts)
    forward_s = (compute_s - backward_s) * (1 + sum(image_shares(case).values())) * calibration.pace
    references_s = _references_s(case, forward_s)
    if hidden_s > 0:
        parts.append(TimePart(OVERLAPPED, hidden_s, hidden=True))
    if copying_s:
        parts.append(
            TimePart("copies of activations overlapped with computing", 2 * copying_s - waiting_s, hidden=True)
        )

    sequences = load.sequences_per_step
    useful = sequences * model_flops_per_sequence(
        shape,
        useful_tokens=load.useful_tokens_per_sequence,
        samples=load.samples_per_sequence,
        images=load.images_per_sequence,
        label_tokens=load.label_tokens_per_sequence,
        cached=case.cached,
    )
    return Time(
        step_s=step_s,
        parts=tuple(parts),
        mfu=useful / layout.world_size / rates.peak / step_s,
        binds=max((part for part in parts if not part.hidden), key=lambda part: part.s).name,
        steps=load.steps,
        train_hours=None if load.steps is None else (load.steps * step_s + references_s) / 3600,
        tokens_per_s_per_gpu=sequences * load.useful_tokens_per_sequence / step_s / layout.world_size,
        save=save,
        exposed_all_reduce_s=sum(phase.s for phase in exposed if phase.between_nodes and phase.all_reduce),
        assumptions=(
            *assumptions,
            *([calibration.origin] if calibration.origin else []),
            *kernel_sentences(case),
            *_sentences(config, shape, layout),
            *(
                f"Beyond the computing of text of the same arithmetic, a run with images is taken to need {share:.0%} "
                f"for {name}: vlmpipe docs planner says where that is from."
                for name, share in image_shares(case).items()
            ),
            *save_sentences(case, save),
            *update_sentences(case),
            *([REFERENCES.format(minutes=references_s / 60)] if references_s else []),
            load.origin,
        ),
        pace=calibration.pace,
        interval=interval_of(case, measured=calibration.measures_steps or bool(config.plan.efficiency)),
    )


def _references_s(case: Scenario, forward_s: float) -> float:
    """Seconds of the pass under the reference that DPO is compared with, over both splits; 0 without one.

    forward_s: of a step's forward pass. How much data there is may not be known: then 0, as training has no time.
    """
    load, config = case.load, case.config
    if not config.train.has_reference or load.sequences_per_epoch is None:
        return 0.0
    of_training = 1 - config.data.validation_fraction
    return load.sequences_per_epoch / load.sequences_per_step / (of_training or 1.0) * forward_s


def image_shares(case: Scenario) -> dict[str, float]:
    """Shares of computing by which a run with images takes longer. None with a measured efficiency, which has them."""
    if not case.load.images_per_sequence or case.config.plan.efficiency:
        return {}
    shares = {}
    if not case.compiling.on:
        selective = case.config.train.activation_checkpointing == "selective"
        shares[UNCOMPILED] = UNCOMPILED_SELECTIVE_SHARE if selective else UNCOMPILED_SHARE
    if case.layout.data_parallel > 1 and not case.cached:
        shares[UNEVEN] = UNEVEN_SHARE
    return shares


def _calibration(case: Scenario) -> Calibration:
    """Calibration from plan.calibrate_from; a pace of 1 without it, and on other GPUs than it ran on."""
    uri = case.config.plan.calibrate_from
    if not uri:
        return Calibration(1.0, "", "")
    requested = case.config.cluster.accelerator_type
    if uri == LATEST:
        return latest_calibration(case.config.bucket_root_uri, case.config.name, requested)
    calibration = calibration_of(uri)
    if calibration.accelerator_type != requested:
        ran_on = calibration.accelerator_type or "CPUs"
        return Calibration(
            1.0, "", f"Not calibrated: {uri} (plan.calibrate_from) ran on {ran_on}, this is {requested}."
        )
    return calibration


def work_of(case: Scenario) -> Work:
    """One rank's share of a step."""
    config, layout, load, train = case.config, case.layout, case.load, case.config.train
    stages: tuple[Stage, ...] = ()
    if layout.pipeline_parallel > 1:
        stages = by_rank(planned_stages(config, case.shape, layout, load, cached=case.cached), layout)
    return Work(
        micro_steps=max(1, train.global_batch_size // (layout.data_parallel * train.micro_batch_size)),
        micro_batch_size=train.micro_batch_size,
        sequence_length=config.data.sequence_length,
        precision=train.precision,
        bf16_weights=train.has_bf16_weights,
        reduce_bytes=2 if train.reduce_dtype == "bf16" else 4,
        activation_checkpointing=train.activation_checkpointing,
        recomputes_tower=train.tower_activation_checkpointing and case.shape.trains_tower,
        max_images_per_sequence=0.0 if case.cached else load.images_per_sequence,
        sequence_label_tokens=load.label_tokens_per_sequence,
        rounds_gradients=train.rounds_gradients,
        sequence_parallel=train.sequence_parallel,
        reshard_after_forward=train.reshard_after_forward,
        stages=stages,
    )


def _sentences(config: RunConfig, shape: ModelShape, layout: Layout) -> list[str]:
    sentences = [f"The loop waits for data {DATA_WAIT_SHARE:.0%} of the time, the loader's goal."]
    if config.model.family in PUBLISHED_FAMILIES:
        sentences.append(
            "FLOPs were counted in a pass of the model's own code over a small image and a short text, all layers."
            if shape.counted
            else "FLOPs follow from widths, as if all layers were equal: the model's code does not run on zeros."
        )
    if config.model.quantizes_base:
        sentences.append(
            "Not counted: dequantizing 4-bit weights in each pass. Published steps of 4,096 tokens took 15 to 18 % "
            "longer than those of LoRA (Qwen 7B and 14B, with other kernels)."
        )
    if layout.context_parallel > 1:
        sentences.append(
            f"Each of the {layout.context_parallel} ranks that share sequences runs the vision encoder, where it runs, "
            "and the projector for all of their images. Labels are taken as spread evenly over a sequence."
        )
    if layout.world_size > 1:
        sentences.append(
            "Links inside a node are taken at 75 % and network cards at 70 % of their nominal rate, between the 45 % "
            "and 96 % of published tests."
        )
    if config.cluster.reduction_server:
        sentences.append(
            "Steps are timed without the Reduction Server: only the NCCL log of a run shows that it works."
        )
    return sentences
