"""Components of a rank's memory, and what the estimate reads of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlmpipe.planner.memory.zero_config import ZeroSettings
from vlmpipe.planner.parallel_layout import Layout
from vlmpipe.trainer.sizing.model_shape import ModelShape, Part

FP32_BYTES, BF16_BYTES = 4, 2
Place = Literal["device", "machine"]


@dataclass(frozen=True)
class MemoryPart:
    """One part of the bar. `why` is a few words."""

    name: str
    bytes: int
    why: str = ""
    place: Place = "device"  # or the machine's memory, where offloading puts it

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"name": self.name, "bytes": self.bytes, "why": self.why}


def average_parts(count: int, *, averaged: bool) -> list[MemoryPart]:
    """The moving average of `count` weights (train.ema_decay), where there is one."""
    return [MemoryPart("averaged weights", FP32_BYTES * count, "fp32, train.ema_decay")] if averaged else []


def split(count: int, shards: int) -> int:
    """The largest of `shards` nearly equal shares."""
    return -(-count // shards)


@dataclass(frozen=True)
class Setting:
    """Other values of the run file, and the memory that they need."""

    change: dict[str, object]
    total_bytes: int
    fits: bool


@dataclass(frozen=True)
class Weights:
    """Parameters on one rank, before data-parallel sharding: tensor and pipeline parallelism divide the model."""

    trainable: int
    frozen: int  # without quantized ones
    quantized_bytes: int  # of frozen weights in 4 bits, whole on each rank
    sliced: int  # those that FSDP slices: trainable ones, and frozen ones of the same part of the model
    sliced_layer: int  # of these, in one language layer
    sliced_root: int  # of these, outside of layers
    layer: int  # trainable ones of one language layer
    last_product: int  # those of the last matrix of its feed-forward part
    root: int  # trainable ones outside of layers
    embedding: int  # trainable ones of a matrix that does not make logits too
    head: int  # trainable ones of the matrix that makes logits
    largest: int  # trainable ones of the embedding or of the head, which is more
    whole_layer: int  # all of the largest layer, frozen ones too
    whole_embedding: int  # frozen or not
    whole_head: int
    only_linear: bool  # the trainable ones are those of linear layers: no embedding, no norm

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, *, cached: bool) -> Weights:
        """The first pipeline stage, which has the embedding, the tower and the projector."""

        def on_rank(part: Part, count: int, local: int | None = None) -> int:
            stages = layout.pipeline_parallel
            if (part == "tower" and cached) or (part == "head" and stages > 1):
                return 0
            if local is None:
                local = shape.of_tensor_rank(part, count, layout.tensor_parallel)
            return local // stages if part in ("language_layers", "adapters") else local

        def trained_on_rank(part: Part) -> int:
            whole = shape.trained_on_rank(part, layout.tensor_parallel)
            return on_rank(part, whole, whole)

        trained = {part: trained_on_rank(part) for part in shape.trained}
        sliced = {part: on_rank(part, count) for part, count in shape.sliced.items()}
        trainable = sum(trained.values())
        layer = shape.trained_per_layer(layout.tensor_parallel)
        language = shape.language
        in_layer = language.layer_parameters - shape.quantized // language.layers  # those are not gathered
        whole_layer = shape.of_tensor_rank("language_layers", in_layer, layout.tensor_parallel)
        embedding = on_rank("embedding", shape.parameters["embedding"])
        in_tower_layers = shape.tower.layers * shape.tower.layer_parameters
        tower_layers = min(trained["tower"], in_tower_layers)
        if shape.chosen and trained["tower"]:
            tower_layers = min(trained["tower"], sum(shape.chosen.tower.parameters))
        return cls(
            trainable=trainable,
            frozen=sum(on_rank(part, count) for part, count in shape.parameters.items()) - trainable - shape.quantized,
            quantized_bytes=shape.quantized_bytes,
            sliced=sum(sliced.values()),
            sliced_layer=max(layer, whole_layer if sliced["language_layers"] else 0),
            sliced_root=sum(sliced.values())
            - sliced["language_layers"]
            - sliced["adapters"]
            - sliced["tower_adapters"]
            - min(sliced["tower"], in_tower_layers),
            layer=layer,
            last_product=layer * language.hidden * language.intermediate // language.layer_parameters,
            root=trainable
            - trained["language_layers"]
            - trained["adapters"]
            - trained["tower_adapters"]
            - tower_layers,
            embedding=0 if shape.tied_head else trained["embedding"],
            head=trained["embedding" if shape.tied_head else "head"],
            largest=max(trained["embedding"], trained["head"]),
            whole_layer=max(
                shape.language.layer_parameters + sum(shape.adapters.values()),
                0 if cached else shape.tower.layer_parameters,
            ),
            whole_embedding=embedding,
            whole_head=embedding if shape.tied_head else on_rank("head", shape.parameters["head"]),
            only_linear=not (
                trained["embedding"]
                or trained["language_layers"]
                or trained["tower"]
                or (shape.images_differ and trained["projector"])  # mergers have norms
            ),
        )


@dataclass(frozen=True)
class Gathering:
    """How FSDP gathers weights: train.reshard_after_forward and train.prefetch_layers."""

    keeps_all: bool = False  # from the forward to the backward pass
    layers_ahead: int = 1


@dataclass(frozen=True)
class Run:
    """Inputs that decide a strategy's parts."""

    weights: Weights
    layout: Layout
    precision: str
    bf16_weights: bool  # those that compute, also at rest (train.has_bf16_weights)
    reduce_bytes: int  # of a gradient on its way, with bf16_weights
    sum_bytes: int  # of a sum of gradients over micro-batches, likewise
    passes: int
    checkpointing: bool  # full
    recomputing: bool  # full or selective
    on_gpu: bool
    offload: str
    rounded: bool
    zero: ZeroSettings
    gathering: Gathering

    @property
    def module_bytes(self) -> int:
        """Return the bytes of one trained weight in DeepSpeed's module."""
        return BF16_BYTES if self.bf16_weights else FP32_BYTES


Phase = Literal["forward", "turn", "backward", "end", "rest", "step"]
