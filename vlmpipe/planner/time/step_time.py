"""Time of a training step, its components, and the bottleneck."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.sizing.checkpoint_size import checkpoint_bytes
from trainer.sizing.flops import SequenceFlops, model_flops_per_sequence
from trainer.sizing.model_shape import ModelShape
from trainer.sizing.pipeline_partition import Stage, stages_of
from vlmpipe.catalog.machines import Gpu
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.memory.pipeline_partition import by_rank, planned_stages, sequence_flops
from vlmpipe.planner.parallel_layout import SHARDED_BY_FSDP, Layout
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.communication import Work, pipeline_bubble, traffic
from vlmpipe.planner.time.kernels import kernel_sentences, kernel_speedup
from vlmpipe.planner.time.optimizer_step import update_sentences, update_times
from vlmpipe.planner.time.overlap import Hiding, by_name, exposed_communication

# Share of the peak that computing reaches, recomputation and padding included. Read: 39-43 % of an H100's bf16 peak in
# NeMo AutoModel and torchtitan, 30-40 % with packed images on A800 in lmms-engine, 41-48 % in Megatron-LM.
ASSUMED_EFFICIENCY = 0.40
GPUS_WITH_PUBLISHED_EFFICIENCY = frozenset(
    {
        "NVIDIA_TESLA_A100",
        "NVIDIA_A100_80GB",
        "NVIDIA_H100_80GB",
        "NVIDIA_H100_MEGA_80GB",
        "NVIDIA_H200_141GB",  # an H100 with more memory
    }
)
DATA_WAIT_SHARE = 0.02  # the loader's goal; the part `loops` of `make bench-train` measures it

# Bytes a second that a node saves. Read: 419 MB in 0.66-1.39 s by torch.distributed.checkpoint on one rank; 148.8 s for
# a 7B model at IBM, which is 0.56 GB/s if it was weights and moments.
SAVE_BYTES_PER_S = 0.5e9

OVERLAPPED = "communication behind computing"


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
    save_s: float | None  # that one checkpoint holds training up
    exposed_all_reduce_s: float  # between nodes, in a step: what a Reduction Server could shorten
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Rates:
    """FLOP/s that one GPU reaches."""

    trained: float  # in the run's precision
    frozen: float  # frozen parts of the model in the training step
    fp32: float  # jobs that compute in fp32: encoding features, evaluation
    peak: float  # nominal, of the run's precision


def estimate_time(case: Scenario) -> Time:
    """Time of a step and of the training job. Under PowerSGD a step is a compressed one, unless there is none."""
    time, train = _time_of_steps(case), case.config.train
    if not train.gradient_rank or case.layout.replicas == 1:
        return time
    plain = case.config.model_copy(update={"train": train.model_copy(update={"gradient_compression": "none"})})
    return _after_first_steps(time, _time_of_steps(replace(case, config=plain)), train.powersgd.start_step)


def _after_first_steps(time: Time, before: Time, first: int) -> Time:
    """Time of a job whose first `first` steps take the time of `before`."""
    if time.step_s is None or before.step_s is None:
        return time
    if time.steps is not None and time.steps <= first:
        said = f"All {time.steps:,} steps are before train.powersgd.start_step {first:,}: no gradient is compressed."
        return replace(before, save_s=time.save_s, assumptions=(*before.assumptions, said))
    said = (
        f"PowerSGD begins after {first:,} steps, which take {before.step_s:.3g} s each. What it computes is not in the "
        "time of a step, and nothing hides what it sends: torch's hook waits for the GPU in each bucket."
    )
    more_hours = first * (before.step_s - time.step_s) / 3600
    hours = None if time.train_hours is None else time.train_hours + more_hours
    return replace(time, train_hours=hours, assumptions=(*time.assumptions, said))


def _time_of_steps(case: Scenario) -> Time:
    """As `estimate_time`, if all steps take the same time."""
    config, shape, layout, load = case.config, case.shape, case.layout, case.load
    if case.gpu is None:
        why = "Training on CPUs: how fast they compute is not known, so there is no time and no cost."
        return Time(None, (), None, "", load.steps, None, None, None, 0.0, (why, load.origin))
    rates, assumptions = reached(config, shape, layout, case.gpu, cached=case.cached)
    work = work_of(case)
    flops = sequence_flops(config, shape, load, cached=case.cached)
    rank_sequences = work.micro_steps * work.micro_batch_size
    compute_s = rank_sequences * compute_seconds(flops, shape, layout, rates) / kernel_speedup(case)
    transfers = traffic(layout, shape, work)
    backward_s = compute_s * (1 - flops.forward / flops.total)
    behind = Hiding.of(
        config.train,
        shape.trainable_parameters,
        micro_steps=work.micro_steps,
        forward_s=compute_s - backward_s,
        backward_s=backward_s,
    )
    exposed = exposed_communication(transfers, case.machine, case.gpu, behind)
    hidden_s = sum(by_name(transfers, case.machine, case.gpu).values()) - sum(each.s for each in exposed)
    saved_bytes = checkpoint_bytes(shape.trainable_parameters, config.train, layout.replicas)
    save_s = config.plan.checkpoint_save_s or saved_bytes / layout.nodes / SAVE_BYTES_PER_S

    parts = [TimePart("computing", compute_s), *(TimePart(each.name, each.s) for each in exposed)]
    if layout.pipeline_parallel > 1:
        share = pipeline_bubble(layout, work.micro_steps)
        parts.append(TimePart("pipeline bubble", compute_s * share / (1 - share)))
    updating = update_times(case, micro_steps=work.micro_steps)
    parts += [TimePart(name, spent_s) for name, spent_s in updating.items()]
    parts.append(TimePart("waiting for data", DATA_WAIT_SHARE * sum(part.s for part in parts)))
    parts.append(TimePart("saving checkpoints", save_s / config.train.checkpoint_every_steps))
    step_s = sum(part.s for part in parts)
    if hidden_s > 0:
        parts.append(TimePart(OVERLAPPED, hidden_s, hidden=True))

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
        train_hours=None if load.steps is None else load.steps * step_s / 3600,
        tokens_per_s_per_gpu=sequences * load.useful_tokens_per_sequence / step_s / layout.world_size,
        save_s=save_s,
        exposed_all_reduce_s=sum(each.s for each in exposed if each.between_nodes and each.all_reduce),
        assumptions=(
            *assumptions,
            *kernel_sentences(case),
            *_sentences(config, layout, save_s),
            *update_sentences(case),
            load.origin,
        ),
    )


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
        max_images_per_sequence=0.0 if case.cached else load.images_per_sequence,
        sequence_label_tokens=load.label_tokens_per_sequence,
        rounds_gradients=train.rounds_gradients,
        gradient_rank=train.gradient_rank,
        quantized_weights=train.zero_quantized_weights,
        quantized_gradients=train.zero_quantized_gradients,
        sequence_parallel=train.sequence_parallel,
        reshard_after_forward=train.reshard_after_forward,
        stages=stages,
    )


def reached(config: RunConfig, shape: ModelShape, layout: Layout, gpu: Gpu, *, cached: bool) -> tuple[Rates, list[str]]:
    """The rates to compute with, and their assumptions as sentences."""
    said = []
    fp32 = gpu.fp32_tflops * 1e12
    peak = fp32
    if config.train.compute_type == "bf16" and gpu.bf16_tflops is None:
        said.append(f"{gpu.accelerator_type} has no bf16 units: bf16 is taken as no faster than fp32.")
    elif config.train.precision == "fp16" and gpu.bf16_tflops is None:
        said.append(f"The catalogue has no fp16 rate of {gpu.accelerator_type}: fp16 is taken as no faster than fp32.")
    elif config.train.precision != "fp32":
        assert gpu.bf16_tflops is not None  # fp16 has the rate of bf16 on GPUs that have both
        peak = gpu.bf16_tflops * 1e12
    efficiency = config.plan.efficiency
    if efficiency:
        said.append(f"Computing reaches {efficiency:.0%} of the peak (plan.efficiency).")
    else:
        efficiency = ASSUMED_EFFICIENCY
        text = f"Computing is taken to reach {efficiency:.0%} of the GPU's peak; published runs on A100 and H100 "
        text += "reach 30-48 %."
        if gpu.accelerator_type not in GPUS_WITH_PUBLISHED_EFFICIENCY:
            text += f" None is known for {gpu.accelerator_type}."
        said.append(f"{text} Set plan.efficiency to what a run of yours measured.")
    frozen = peak
    computes_frozen = shape.left_whole - ({"tower"} if cached else set())
    leaves_fp32 = layout.strategy in SHARDED_BY_FSDP and not config.train.has_bf16_weights
    if leaves_fp32 and peak > fp32 and computes_frozen:
        frozen = fp32
        said.append("Frozen parts stay fp32, so they compute at the fp32 rate.")
    return Rates(peak * efficiency, frozen * efficiency, fp32 * efficiency, peak), said


def compute_seconds(flops: SequenceFlops, shape: ModelShape, layout: Layout, rates: Rates) -> float:
    """One rank's time for one packed sequence; in a pipeline, that of the slowest stage.

    Tensor parallelism shards all but the projector and one of each adapter's matrices; context parallelism all but the
    tower and the projector.
    """
    language_rate = rates.frozen if "language_layers" in shape.left_whole else rates.trained
    tower_rate = rates.frozen if "tower" in shape.left_whole else rates.trained
    projector_rate = rates.frozen if "projector" in shape.left_whole else rates.trained
    whole = flops.tower.total / tower_rate / layout.tensor_parallel + flops.projector.total / projector_rate
    layers = (flops.language_layers.total + flops.attention.total) / language_rate / layout.tensor_parallel
    layers += shape.of_tensor_rank("adapters", flops.adapters.total, layout.tensor_parallel) / rates.trained
    head = flops.head.total / language_rate / layout.tensor_parallel
    layers, head = layers / layout.context_parallel, head / layout.context_parallel
    one_layer = layers / shape.language.layers
    stages = stages_of(shape.language.layers, layout.stages, flops, image_layers=shape.image_layers)
    return max(
        whole * stage.is_first + one_layer * len(stage.layers) + head * stage.is_last
        for stage in by_rank(stages, layout)
    )


def _sentences(config: RunConfig, layout: Layout, save_s: float) -> list[str]:
    said = [f"The loop waits for data {DATA_WAIT_SHARE:.0%} of the time, the loader's goal."]
    if config.model.quantizes_base:
        said.append("Not counted: dequantizing 4-bit weights in each pass. Steps take longer than planned.")
    if layout.context_parallel > 1:
        said.append(
            f"Each of the {layout.context_parallel} ranks that share sequences runs the vision encoder, where it runs, "
            "and the projector for all of their images. Labels are taken as spread evenly over a sequence."
        )
    if config.plan.checkpoint_save_s:
        said.append(f"A checkpoint holds training up for {save_s:.0f} s (plan.checkpoint_save_s).")
    else:
        said.append(
            f"A checkpoint holds training up for {save_s:.0f} s: a node is taken to save "
            f"{SAVE_BYTES_PER_S / 1e9:g} GB/s. Set plan.checkpoint_save_s to what a run of yours measured."
        )
    if layout.world_size > 1:
        said.append(
            "Links inside a node are taken at 75 % and network cards at 70 % of their nominal rate, between the 45 % "
            "and 96 % of published tests."
        )
    if config.cluster.reduction_server:
        said.append("Steps are timed without the Reduction Server: only the NCCL log of a run shows that it works.")
    return said
