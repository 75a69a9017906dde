"""Back-test: what the planner predicts for training runs that others measured and published.

The runs, with their sources, are `published_runs.yaml`. `make bench-published` prints them, and
tests/unit/benchmarks/planner/test_published_runs.py holds the errors to bounds.
"""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmpipe.catalog.machines import MIB_PER_GIB, Gpu, Machine, load_catalog, read_yaml
from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import parse_run_config
from vlmpipe.planner.memory.estimate import estimate_memory
from vlmpipe.planner.memory.rank import GIB
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.parallel_layout import layout_of
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.time.interval import interval_of
from vlmpipe.planner.time.step_time import Time, estimate_time
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.sizing.flops import model_flops_per_sequence
from vlmpipe.trainer.sizing.model_shape import ModelShape, Part, Stack

FOLDER = Path(__file__).parent
FITTED = "llm-foundry"  # the source that rates were fitted to
FITTED_GPUS = ("B200", "GB200")  # to whose runs, of one source, their own rates were
# Text models get the smallest tower and no images.
NO_TOWER = Stack(1, 64, 1, 1, 64, 64, False, 0)
SMALLEST_CLIP = {
    "model_type": "clip_vision_model",
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8},
    **{"image_size": 28, "patch_size": 14, "projection_dim": 64},
}
TOWERS = {  # the layers, image tokens, parameters
    "clip-vit-l-336": (Stack(24, 1024, 16, 16, 64, 4096, False, 12_596_224), 576, 303_507_456),
    "siglip-so400m-384": (Stack(27, 1152, 16, 16, 72, 4304, False, 15_239_504), 729, 412_983_936),
}


@dataclass(frozen=True)
class PublishedRun:
    """One entry of `published_runs.yaml`, or one line of `published_text_runs.csv`."""

    id: str
    source: str
    model: str
    gpu: str
    measured: Mapping[str, Any]
    nodes: int = 1
    gpus_per_node: int = 8
    sequence_length: int = 0
    micro_steps: int = 1
    lora_rank: int = 0
    samples: int = 0  # of a run that is measured in hours
    sample_tokens: int = 0
    sample_images: float = 0
    freeze: Sequence[str] = ()
    train: Mapping[str, Any] | None = None  # fields of the run file's train section
    assumed: str = ""  # what the source leaves open
    kept_bytes: int = 0  # of each token in each layer, beside the layer's input, with selective checkpointing
    logit_bytes: int = 0  # of each logit while the loss is computed, where the source compiles it
    why_not: str = ""  # why the planner cannot express the run
    reason: str = ""  # why a prediction may be off by more than a factor of 2
    memory_reason: str = ""  # why one of memory may be off by more than a tenth


@dataclass(frozen=True)
class Outcome:
    """Speed, predicted and published, in the unit of the publication; more is faster."""

    run: PublishedRun
    unit: str
    predicted: float
    published: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All of `published_runs.yaml`, also those that the planner cannot express."""
    return tuple(PublishedRun(**entry) for entry in data()["runs"])


@functools.cache
def published_text_runs() -> tuple[PublishedRun, ...]:
    """The further rows of llm-foundry's tables: with those in `published_runs`, what the planner's rates were fitted
    to. Runs of other sources were not."""
    train = ("strategy", "micro_batch_size", "activation_checkpointing", "reduce_dtype")
    with (FOLDER / "published_text_runs.csv").open(encoding="utf-8", newline="") as lines:
        return tuple(
            PublishedRun(
                id=f"{row['model']} {row['gpu']} x {8 * int(row['nodes'])}, {row['sequence_length']} tokens",
                source="llm-foundry",
                model=row["model"],
                gpu=row["gpu"],
                measured={"tokens_per_s_per_gpu": float(row["tokens_per_s_per_gpu"])},
                nodes=int(row["nodes"]),
                sequence_length=int(row["sequence_length"]),
                micro_steps=int(row["micro_steps"]),
                train={name: row[name] for name in train},
            )
            for row in csv.DictReader(lines)
        )


def outcome(run: PublishedRun) -> Outcome:
    """Predict a run that has no `why_not`."""
    case = scenario(run)
    time = estimate_time(case)
    assert time.step_s is not None and time.tokens_per_s_per_gpu is not None
    if "hours" in run.measured:
        assert time.train_hours is not None
        return Outcome(run, "runs a day", 24 / time.train_hours, 24 / run.measured["hours"])
    if "tflops_per_gpu" in run.measured:
        return Outcome(run, "TFLOP/s a GPU", _model_tflops(case, time), run.measured["tflops_per_gpu"])
    return Outcome(run, "tokens/s a GPU", time.tokens_per_s_per_gpu, run.measured["tokens_per_s_per_gpu"])


def memory_outcome(run: PublishedRun) -> Outcome:
    """GiB that torch reserves on the fullest GPU, which is what `memory_gib` is. Traces the model, which takes seconds.

    What the source keeps beside the inputs of layers (`kept_bytes`) is added to a trace that keeps nothing else, and a
    compiled loss (`logit_bytes`) to one whose loss has few logits at a time.
    """
    case, sizes = scenario(run), data()["models"][run.model]
    changes = {
        "model.tower": {"config": SMALLEST_CLIP},
        "model.language_model": {"weights": sizes["hub"]},
        "model.image_size": SMALLEST_CLIP["image_size"],
        "model.freeze": ["tower", "projector"],
        "train.activation_checkpointing": "full",
        "train.float8": "none",
        "train.loss_chunk_tokens": 1024 if run.logit_bytes else 0,
    }
    config = parse_run_config(apply_overrides(case.config.to_dict(), changes), run.id)
    memory = estimate_memory(config, architecture(config), case.machine, case.gpu, nearest=False)
    tokens = run.sequence_length * config.train.micro_batch_size
    kept = tokens * (run.kept_bytes * sizes["layers"] + run.logit_bytes * sizes["vocabulary"])
    return Outcome(run, "GiB", (memory.reserved_bytes + kept) / GIB, run.measured["memory_gib"])


def has_memory(run: PublishedRun) -> bool:
    """Whether `memory_outcome` can predict it: not for models that the catalogue lacks."""
    return "memory_gib" in run.measured and "hub" in data()["models"][run.model]


def outcomes(runs: Iterable[PublishedRun] | None = None) -> list[Outcome]:
    """Of all runs that the planner can express."""
    return [outcome(run) for run in (published_runs() if runs is None else runs) if not run.why_not]


def quartiles(ratios: Iterable[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of at least two ratios."""
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return lower, median, upper


def scenario(run: PublishedRun) -> Scenario:
    """The run in the planner's terms."""
    machine, gpu = _hardware(run)
    train: dict[str, Any] = {
        "optimizer": {"learning_rate": 1e-4},
        "loss_chunk_tokens": 0,
        "checkpoint_every_steps": 10**9,
    }
    train |= dict(run.train or {})
    # Not checked: published runs compile with strategies that ours may not.
    kernels = {"compile": train.pop("compile", "off"), "float8": train.pop("float8", "none")}
    replicas = (
        run.nodes
        * run.gpus_per_node
        // math.prod(train.get(f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "context"))
    )
    train["global_batch_size"] = replicas * int(train.get("micro_batch_size", 1)) * run.micro_steps
    config = parse_run_config(
        {
            "name": "published",
            "model": {
                "tower": {"weights": "a"},
                "language_model": {"weights": "b"},
                "tokenizer": "b",
                "image_size": 336,
            },
            "data": {
                "source": "gs://bucket/data.json",
                "sequence_length": run.sequence_length,
                "pack": bool(run.samples),
            }
            | ({"max_images_per_sequence": 7} if run.sample_images else {}),
            "features": {"cache": "off"},
            "train": train,
            "cluster": {
                "replica_count": run.nodes,
                "machine_type": machine.machine_type,
                "accelerator_type": gpu.accelerator_type,
                "accelerator_count": run.gpus_per_node,
            },
            "plan": {
                "samples": run.samples,
                "sample_tokens": run.sample_tokens or run.sequence_length,
                "sample_images": run.sample_images,
            },
        },
        run.id,
    )
    config = config.model_copy(update={"train": config.train.model_copy(update=kernels)})
    shape = _shape(run)
    return Scenario(config, shape, layout_of(config), Workload.assumed(config, shape), machine, gpu)


def _hardware(run: PublishedRun) -> tuple[Machine, Gpu]:
    catalog, entry = load_catalog(), dict(data()["gpus"][run.gpu])
    machine = replace(catalog.machines[entry.pop("machine_type")], nic_gbps=entry.pop("nic_gbps"))
    gpu = catalog.gpus[entry.pop("accelerator_type")]
    if "memory_mib" in entry:
        entry["memory_gib"] = entry.pop("memory_mib") / MIB_PER_GIB
    return machine, replace(gpu, **entry)


def _shape(run: PublishedRun) -> ModelShape:
    sizes = data()["models"][run.model]
    hidden, heads, intermediate = sizes["hidden"], sizes["heads"], sizes["intermediate"]
    kv_heads, gated, head_dim = sizes.get("kv_heads", heads), sizes.get("gated", False), hidden // heads
    layer = Stack(sizes["layers"], hidden, heads, kv_heads, head_dim, intermediate, gated, 0)
    layer = replace(layer, layer_parameters=layer.matrices + 2 * hidden)
    tower, image_tokens, in_tower = TOWERS.get(sizes.get("tower"), (NO_TOWER, 576, 0))
    vocabulary = sizes["vocabulary"] * hidden
    kv_width = kv_heads * head_dim
    adapted = {"q_proj": 2 * hidden, "k_proj": hidden + kv_width, "v_proj": hidden + kv_width, "o_proj": 2 * hidden}
    adapted |= dict.fromkeys(["gate_proj", "up_proj", "down_proj"], hidden + intermediate)
    adapters = {name: run.lora_rank * numbers for name, numbers in adapted.items()} if run.lora_rank else {}
    frozen: set[Part] = {"tower"}
    if adapters or "language_model" in run.freeze:
        frozen |= {"embedding", "language_layers", "head"}
    if tower is NO_TOWER:
        frozen.add("projector")
    return ModelShape(
        tower=tower,
        tower_tokens=image_tokens,
        image_tokens=image_tokens,
        feature_width=tower.hidden,
        patch_pixels=3 * 14 * 14,
        language=layer,
        vocabulary=sizes["vocabulary"],
        tied_head=sizes.get("tied", False),
        parameters={
            "tower": in_tower,
            "tower_adapters": 0,
            "projector_adapters": 0,
            "projector": (tower.hidden + hidden + 2) * hidden if in_tower else 0,
            "embedding": vocabulary,
            "language_layers": layer.layers * layer.layer_parameters + hidden,
            "adapters": layer.layers * sum(adapters.values()),
            "head": 0 if sizes.get("tied") else vocabulary,
        },
        frozen=frozenset(frozen),
        adapters=adapters,
        adapter_rank=run.lora_rank,
    )


def _model_tflops(case: Scenario, time: Time) -> float:
    load = case.load
    useful = load.sequences_per_step * model_flops_per_sequence(
        case.shape,
        useful_tokens=load.useful_tokens_per_sequence,
        samples=load.samples_per_sequence,
        images=load.images_per_sequence,
        label_tokens=load.label_tokens_per_sequence,
        cached=case.cached,
    )
    assert time.step_s is not None
    return useful / case.layout.world_size / time.step_s / 1e12


@functools.cache
def data() -> dict[str, Any]:
    return read_yaml("published_runs.yaml", FOLDER)


def by_source(found: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Runs of sources that no rate was fitted to."""
    sources: dict[str, list[Outcome]] = {}
    for one in found:
        if one.run.source != FITTED and one.run.gpu not in FITTED_GPUS:
            sources.setdefault(one.run.source, []).append(one)
    return sources


def is_inside(outcome: Outcome) -> bool:
    """Whether the run took a time in the range that its plan prints."""
    interval = interval_of(scenario(outcome.run))
    return interval.low <= outcome.ratio <= interval.high
