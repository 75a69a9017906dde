"""Memory of the jobs cache_features, evaluate, benchmark and audit, and of `predict`.

Evaluation and predictions load the export in the precision that training computed in, spread over a rank's GPUs where
one has no room (`vlmpipe.trainer.sizing.device_spread`). Lengths of questions are not known before data is prepared: a
question is taken as long as the mean sample, and the longest as long as a packed sequence.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vlmpipe.catalog.this_machine import NAME as THIS_MACHINE
from vlmpipe.catalog.this_machine import LocalMachine
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cluster import JobMachineConfig
from vlmpipe.planner.jobs.nodes import Nodes, nodes_of
from vlmpipe.planner.memory.components import BF16_BYTES, FP32_BYTES, MemoryPart
from vlmpipe.planner.memory.host import GIB, PROCESS_BYTES, HostMemory
from vlmpipe.planner.memory.rank import CONTEXT_BYTES, LITTLE_SPARE, NEAR, WORKSPACE_BYTES
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.job import AUDIT_CHUNK_TOKENS
from vlmpipe.trainer.evaluation.questions_at_once import questions_at_once
from vlmpipe.trainer.sizing.device_spread import devices_needed, fullest_device
from vlmpipe.trainer.sizing.model_shape import ModelShape, Stack

Asking = Literal["replay", "evaluate", "benchmark", "audit", "predict"]
MASK_BYTES = 3  # of each pair of a prompt's tokens: true or false, and what torch adds to scores in bf16
LOGIT_BYTES = 8  # fp32, and a copy
SHARDS_AT_ONCE = 2  # of features: one is written while the next one is made


@dataclass(frozen=True)
class JobMemory:
    """Memory of one rank of a job other than training, and host memory of a node's ranks."""

    job: str
    device: str  # GPU; empty for `predict`, whose machine is not known
    devices: int  # that hold one copy of the model
    capacity_bytes: int  # of each; 0 where it is not known
    parts: tuple[MemoryPart, ...]  # of the fullest device; empty on CPUs
    host: HostMemory | None
    remedy: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return (not self.capacity_bytes or self.total_bytes <= self.capacity_bytes) and (
            self.host is None or self.host.fits
        )

    @property
    def spare_share(self) -> float:
        """Spare memory as a share of the fullest device's; all of it where that is not known."""
        return 1 - self.total_bytes / self.capacity_bytes if self.capacity_bytes else 1.0

    @property
    def is_roomy(self) -> bool:
        """Return whether the job fits with more to spare than the estimate may be wrong."""
        return self.fits and self.spare_share >= LITTLE_SPARE

    def doubts(self) -> Iterator[str]:
        """Why a job that may run should be looked at."""
        job, share = f"job {self.job.replace('_', '-')}", self.spare_share
        if -NEAR <= share < 0:
            yield (
                f"{job} takes {-share:.1%} more memory than there is, within the error of the estimate, {NEAR:.0%}; "
                f"{self.remedy}"
            )
        elif 0 <= share < LITTLE_SPARE:
            yield f"{job} has only {share * self.capacity_bytes / GIB:,.1f} GiB of memory to spare"

    def errors(self) -> Iterator[str]:
        """Why the job cannot run."""
        if self.spare_share < -NEAR:
            largest = max(self.parts, key=lambda part: part.bytes)
            copies = f"each of the {self.devices} GPUs of a copy" if self.devices > 1 else "each GPU"
            yield (
                f"job {self.job.replace('_', '-')} does not fit: {self.total_bytes / GIB:,.1f} GiB on {copies}, "
                f"{self.device} with {self.capacity_bytes / GIB:,.1f} GiB; the largest part is {largest.name} "
                f"({largest.bytes / GIB:,.1f} GiB, {largest.why}); {self.remedy}"
            )
        if self.host and not self.host.fits:
            parts = ", ".join(part.name for part in self.host.parts)
            yield (
                f"job {self.job.replace('_', '-')} does not fit: a {self.host.machine} has "
                f"{self.host.capacity_bytes / GIB:,.1f} GiB of memory for it, and {parts} take "
                f"{self.host.total_bytes / GIB:,.1f} GiB; {self.remedy}"
            )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "job": self.job,
            "device": self.device,
            "devices": self.devices,
            "capacity_bytes": self.capacity_bytes,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "parts": [part.as_dict() for part in self.parts],
            "host": self.host.as_dict() if self.host else None,
        }


def memory_beside_training(
    config: RunConfig, shape: ModelShape, load: Workload, *, encodes: bool, here: LocalMachine | None = None
) -> tuple[JobMemory, ...]:
    """Return the memory of every job other than training, and of `vlmpipe predict`, whose machine is not known.

    encodes: a job makes features. here: this machine, for a local run. Jobs on machines that the catalog does not know
    are left out: the plan says so.
    """
    jobs = [_encoding(config, nodes_of(config, "cache_features", here), shape)] if encodes else []
    trainer = config.train.trainer
    asking: list[Asking] = []
    if not (trainer and trainer.evaluate_command):  # a command of the user's own
        asking += ["evaluate", "predict"]
    if config.evaluate.lmms_eval:
        asking.append("benchmark")
    if config.evaluate.audit and not trainer:  # without checkpoints of ours it loads no model
        asking.append("audit")
    jobs += [_asking(config, nodes_of(config, job, here), shape, load, job) for job in asking]
    if config.data.replay:
        jobs.append(_asking(as_replayed(config), nodes_of(config, "replay", here), shape, load, "replay"))
    return tuple(job for job in jobs if job)


def as_replayed(config: RunConfig) -> RunConfig:
    """The run file with answers as long as those of its source of replay."""
    assert config.data.replay
    answers = {"max_new_tokens": config.data.replay.replay_max_new_tokens}
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=answers)})


def _asking(config: RunConfig, nodes: Nodes, shape: ModelShape, load: Workload, job: Asking) -> JobMemory | None:
    memory = _asked_on(config, nodes, shape, load, job)
    if memory is None or memory.fits:
        return memory
    return JobMemory(**{**vars(memory), "remedy": _remedy(config, nodes, shape, load, job)})


def _asked_on(config: RunConfig, nodes: Nodes, shape: ModelShape, load: Workload, job: Asking) -> JobMemory | None:
    cluster, machine, gpu = nodes.cluster, nodes.machine, nodes.device
    if machine is None and job != "predict":
        return None
    number_bytes = BF16_BYTES if config.train.precision == "bf16" else FP32_BYTES
    weights = number_bytes * shape.total_parameters
    # `transformers serve` spreads one copy over all GPUs (its device is auto), and answers one question at a time.
    ranks = 1 if job not in ("evaluate", "replay", "audit") else cluster.processes
    questions = 1 if job in ("benchmark", "audit") else config.evaluate.batch_questions
    logits = tuple(_audited_logits(config, shape)) if job == "audit" else ()
    # Adapters of the start model are merged while its files are written, weight by weight.
    merged = FP32_BYTES if config.model.exports_adapter and job != "replay" else number_bytes
    host = None
    if machine and job != "predict":
        copies = MemoryPart("models", ranks * merged * shape.total_parameters, f"loaded by each of {ranks} ranks")
        processes = MemoryPart("processes", ranks * PROCESS_BYTES, "Python, torch and transformers, assumed")
        asked = () if gpu else tuple(_questions(config, shape, load, shape.language.layers, number_bytes, questions))
        asked = (*asked, *logits) if not gpu else ()
        on_host = (copies, processes, *(MemoryPart(p.name, ranks * p.bytes, p.why) for p in asked))
        host = HostMemory(machine.machine_type, machine.usable_bytes, on_host)
    if job != "predict" and gpu is None:
        return JobMemory(job, "", 1, 0, (), host)
    capacity = int(gpu.memory_gib * GIB) if gpu and job != "predict" else 0
    devices = devices_needed(weights, capacity, max(1, cluster.accelerator_count // ranks)) if capacity else 1
    outside = number_bytes * (shape.total_parameters - shape.parameters["language_layers"])
    in_layer = number_bytes * shape.parameters["language_layers"] // shape.language.layers
    held, layers = fullest_device(outside, [in_layer] * shape.language.layers, devices)
    kind = "bf16" if number_bytes == BF16_BYTES else "fp32"
    parts = (
        MemoryPart("weights", held, kind if devices == 1 else f"{kind}, layers spread over {devices} GPUs"),
        *_questions(config, shape, load, layers, number_bytes, questions),
        *logits,
        MemoryPart("CUDA context", CONTEXT_BYTES, "measured once"),
        MemoryPart("cuBLAS workspaces", WORKSPACE_BYTES, "measured"),
    )
    return JobMemory(job, gpu.label if capacity and gpu else "", devices, capacity, parts, host)


def _questions(
    config: RunConfig, shape: ModelShape, load: Workload, layers: int, number_bytes: int, questions: int
) -> Iterator[MemoryPart]:
    """Memory of a batch of questions where `layers` language layers are; at least the longest question alone."""
    language, longest = shape.language, config.data.sequence_length
    mean = min(longest, round(load.sample_tokens))
    images_each = load.sample_images
    bound = config.evaluate.batch_tokens
    questions = questions_at_once(questions, bound, mean + config.evaluate.max_new_tokens, images_each)
    prompt, count = (mean, questions) if questions * mean > longest else (longest, 1)
    held = prompt + config.evaluate.max_new_tokens
    why = f"{count} questions of {prompt:,} tokens, the mean sample"
    if count == 1:
        why = f"1 question of {prompt:,} tokens"
    values = 2 * layers * language.kv_heads * language.head_dim * number_bytes
    yield MemoryPart("keys and values", count * held * values, why)
    inner = language.intermediate * (3 if language.gated else 2) + 4 * language.hidden
    pass_bytes = count * prompt * inner * number_bytes + count * prompt**2 * MASK_BYTES
    yield MemoryPart("prompts", pass_bytes, f"a layer's activations and the mask of {why}")
    images = math.ceil(count * prompt / mean * images_each)
    yield MemoryPart("images", _images(config, shape, images, number_bytes), f"{images} images of {why}")
    yield MemoryPart("logits", count * shape.vocabulary * LOGIT_BYTES, "of the next token")


def _audited_logits(config: RunConfig, shape: ModelShape) -> Iterator[MemoryPart]:
    tokens = min(config.data.sequence_length, config.train.loss_chunk_tokens or AUDIT_CHUNK_TOKENS)
    yield MemoryPart("logits of a loss", tokens * shape.vocabulary * LOGIT_BYTES, f"of {tokens:,} tokens at once")


def _images(config: RunConfig, shape: ModelShape, images: int, number_bytes: int) -> int:
    """The tower's pass over as many images as are encoded at once, and the features of all."""
    # transformers' own code encodes the images of a batch together.
    at_once = images if config.model.image_kind == "published" else min(images, config.features.batch_images)
    features = images * shape.image_tokens * (shape.feature_width + shape.language.hidden) * number_bytes
    return features + at_once * _tower_pass(shape, number_bytes)


def _tower_pass(shape: ModelShape, number_bytes: int) -> int:
    """Return the bytes of encoding one image: pixels in fp32 and a layer's activations (attention stores no scores)."""
    tower: Stack = shape.tower
    numbers = tower.intermediate * (3 if tower.gated else 2) + 6 * tower.hidden
    return shape.tower_tokens * (FP32_BYTES * shape.patch_pixels + number_bytes * numbers)


def _encoding(config: RunConfig, nodes: Nodes, shape: ModelShape) -> JobMemory | None:
    cluster, machine, gpu = nodes.cluster, nodes.machine, nodes.device
    if machine is None:
        return None
    number_bytes = BF16_BYTES if config.train.precision == "bf16" else FP32_BYTES
    weights, ranks = shape.parameters["tower"], cluster.processes
    numbers = shape.stored_numbers or shape.image_tokens * shape.feature_width
    shards = SHARDS_AT_ONCE * config.features.shard_images * BF16_BYTES * numbers
    pass_bytes = config.features.batch_images * _tower_pass(shape, number_bytes)
    on_host = (
        MemoryPart("tower", ranks * FP32_BYTES * weights, f"fp32, loaded by each of {ranks} ranks"),
        MemoryPart("features", ranks * shards, f"{SHARDS_AT_ONCE} shards of each rank"),
        MemoryPart("processes", ranks * PROCESS_BYTES, "Python, torch and transformers, assumed"),
        *([] if gpu else [MemoryPart("images", ranks * pass_bytes, "features.batch_images at once")]),
    )
    host = HostMemory(machine.machine_type, machine.usable_bytes, on_host)
    remedy = "set features.batch_images or features.shard_images lower, or cluster.features_machine to a larger machine"
    if gpu is None:
        return JobMemory("cache_features", "", 1, 0, (), host, remedy)
    parts = (
        MemoryPart("tower", number_bytes * weights, "bf16" if number_bytes == BF16_BYTES else "fp32"),
        MemoryPart("images", pass_bytes, f"{config.features.batch_images} at once (features.batch_images)"),
        MemoryPart("CUDA context", CONTEXT_BYTES, "measured once"),
        MemoryPart("cuBLAS workspaces", WORKSPACE_BYTES, "measured"),
    )
    capacity = int(gpu.memory_gib * GIB)
    return JobMemory("cache_features", gpu.label, 1, capacity, parts, host, remedy)


def _remedy(config: RunConfig, nodes: Nodes, shape: ModelShape, load: Workload, job: Asking) -> str:
    """The nearest setting with which the job fits with memory to spare, or else at all."""
    fitting = [(changes, memory) for changes, memory in _settings(config, nodes, shape, load, job) if memory.fits]
    named = [changes for changes, memory in fitting if memory.is_roomy] or [changes for changes, _ in fitting]
    if named:
        return f"it fits with {shlex.join(named[0])}"
    if nodes.cluster.machine_type == THIS_MACHINE:
        return "this machine has too little memory for this model"
    return "set cluster.evaluate_machine to a machine with larger or more GPUs"


def _settings(
    config: RunConfig, nodes: Nodes, shape: ModelShape, load: Workload, job: Asking
) -> Iterator[tuple[list[str], JobMemory]]:
    """Overrides with fewer questions at once, or fewer ranks that share the GPUs, nearest first, and their memory."""
    evaluate, cluster = config.evaluate, nodes.cluster
    is_here = cluster.machine_type == THIS_MACHINE
    batches = [evaluate.batch_questions >> halvings for halvings in range(1, evaluate.batch_questions.bit_length())]
    fewer_ranks = [] if is_here else [count for count in (4, 2, 1) if count < cluster.processes]
    for ranks in [cluster.processes, *fewer_ranks]:
        for questions in [evaluate.batch_questions, *batches]:
            other = config.model_copy(update={"evaluate": evaluate.model_copy(update={"batch_questions": questions})})
            on = cluster.model_copy(update={"processes_per_replica": ranks})
            memory = _asked_on(other, replace(nodes, cluster=on), shape, load, job)
            if memory is None:
                continue
            changes = [f"evaluate.batch_questions={questions}"] if questions != evaluate.batch_questions else []
            if ranks != cluster.processes:
                fields = {name: getattr(on, name) for name in JobMachineConfig.model_fields}
                machine = JobMachineConfig.model_validate(fields | {"reservation_affinity": None})
                settings = machine.model_dump(exclude_defaults=True)
                text = ", ".join(f"{name}: {value}" for name, value in settings.items())
                changes.append(f"cluster.evaluate_machine={{{text}}}")
            yield changes, memory
