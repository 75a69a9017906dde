"""Bytes that the step sync_checkpoint reads, writes and holds during an export. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.train_options import StateType
from vlmpipe.trainer.sizing.model_shape import ModelShape

MAX_SHARD_BYTES = 2 << 30  # of an exported file; a larger tensor gets a file of its own
IN_FLIGHT_BYTES = 128 << 20  # of ranges that arrive in parallel (vlmpipe.trainer.checkpoint.verified_files)
FP32_BYTES = 4  # of a number in the optimizer's weights and in their average
STORED_BYTES = {"fp32": FP32_BYTES, "bf16": 2}  # of a number in an export
PUBLISHED_BYTES = 2  # of a frozen weight in the files that it is read from, which mostly hold bf16
PROGRAM_BYTES = 3 << 29  # torch, transformers and a storage client in one process
TENSOR_COPIES = 3  # of the largest tensor: as it arrives, assembled, and as it is merged or written


def published_bytes(model: ModelConfig, shape: ModelShape) -> int:
    """Bytes of published weights that a machine reads to build the whole model. 0 for one that begins from random
    weights."""
    reads = any(part and part.weights for part in model.sources.values())
    return shape.total_parameters * PUBLISHED_BYTES if reads else 0


@dataclass(frozen=True)
class ExportSize:
    """Bytes of one export.

    `read_bytes` come from the checkpoint: of each trained weight its fp32 value, or its average, and nothing of the
    moments. `base_bytes` come from published files of safetensors, where they lie: the frozen weights, once for their
    digest, and again for what they are merged into. `disk_bytes` is the most that lies on the step's disk at once: one
    exported file, which is uploaded and deleted before the next is begun. `memory_bytes` is the most that the process
    holds: a bound, not an expectation.
    """

    read_bytes: int
    base_bytes: int
    written_bytes: int
    disk_bytes: int
    memory_bytes: int


def export_size(shape: ModelShape, model: ModelConfig, dtype: StateType) -> ExportSize:
    """The export of a checkpoint by `vlmpipe.trainer.checkpoint.export.hf_export`, whichever strategy wrote it.

    dtype: of the export (`vlmpipe.trainer.config.job.export_dtype`).
    """
    matrix = shape.language.hidden * shape.language.intermediate
    largest = max(shape.parameters["embedding"], shape.parameters["head"], matrix) * FP32_BYTES
    adapters = sum(shape.parameters[part] for part in ("tower_adapters", "projector_adapters", "adapters"))
    base = shape.total_parameters - adapters
    trained = shape.trainable_parameters
    frozen = max(0, base - trained + adapters)
    written = (trained if model.exports_adapter else base) * STORED_BYTES[dtype]
    # The frozen tower is built to compare its digest with the checkpoint's.
    tower = 0 if shape.trains_tower else shape.parameters["tower"] * FP32_BYTES
    held = written if model.exports_adapter else TENSOR_COPIES * largest
    return ExportSize(
        read_bytes=trained * FP32_BYTES,
        base_bytes=frozen * PUBLISHED_BYTES * (1 if model.exports_adapter else 2),
        written_bytes=written,
        disk_bytes=written if model.exports_adapter else min(written, max(MAX_SHARD_BYTES, largest)),
        memory_bytes=PROGRAM_BYTES + max(tower, held),
    )
