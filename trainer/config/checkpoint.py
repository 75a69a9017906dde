"""The run file's `checkpoint` section: how checkpoints are written, kept and exported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from vlmpipe.trainer.config.base import Agreement, Section, StorageUri

QuantizedFormat = Literal["int4", "fp8"]
QUANTIZED_PACKAGE = "compressed_tensors"  # writes and opens quantized exports


class CheckpointConfig(Section):
    """How checkpoints are written, kept and exported. train.checkpoint_every_steps sets their interval."""

    async_save: bool = Field(
        True,
        description="Write and upload checkpoints while training continues; false waits for each COMMIT. Turn it off "
        "where host memory has no room for a copy of the state.",
    )
    keep_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between checkpoints that are never deleted, in addition to train.keep_checkpoints; 0 keeps "
        "none.",
    )
    mirror_uri: StorageUri = Field(
        "",
        description="Second folder or bucket prefix, such as in another region, to which checkpoints are copied "
        "during training; empty for none. Training resumes from the copy if the first store is lost.",
    )
    signing_key_file: str = Field(
        "",
        description="File with a secret key that signs checkpoints, every file by SHA-256; empty signs none. With a "
        "key, only checkpoints with its signature are loaded. Set it where others can write to the store.",
    )
    preemption_notice_s: float = Field(
        30.0,
        ge=0,
        description="Seconds from SIGTERM to the end of the machine; a save that takes longer is not started. Raise it "
        "for machines with a longer notice.",
    )
    max_s_without_commit: float = Field(
        3600.0,
        ge=0,
        description="Seconds without a COMMIT, from the first failed save, after which training ends; 0 ends it at the "
        "first failure. Until then training continues and saves again a minute after each failure; after "
        "the last step it waits. Lower it where an hour of training must not be lost.",
    )
    max_starts_without_progress: int = Field(
        5,
        ge=0,
        description="Crashed starts at the same step after which the job gives up; 0 never gives up. Raise it where "
        "machines often fail early.",
    )
    export: Literal["last", "best"] = Field(
        "last",
        description="Exported checkpoint: that of the last step, or that of the validated step with the best "
        "train.best_metric, which is saved when it is found and kept until a better one is committed.",
    )
    export_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="Type of the exported weights; auto is bf16 with train.precision bf16, except before a later "
        "stage, and otherwise fp32. Adapters are always fp32, and so are checkpoints.",
    )


class QuantizeConfig(Section):
    """Quantized exports, next to the run's export; the evaluation writes them and asks them its questions."""

    formats: tuple[QuantizedFormat, ...] = Field(
        min_length=1,
        description="Formats of the weights: int4, integers of 4 bits with a scale for each group; fp8, floats of 8 "
        "bits, to which activations are rounded, too.",
    )
    min_agreement: Agreement = Field(
        0.98,
        description="Share of the validation answers that must be the export's, with its reason of their end; a "
        "quantized export with fewer is deleted and not registered. Above 0, which would accept any answers.",
    )

    @field_validator("formats")
    @classmethod
    def _distinct(cls, formats: tuple[QuantizedFormat, ...]) -> tuple[QuantizedFormat, ...]:
        if len(set(formats)) < len(formats):
            raise ValueError(f"found {', '.join(formats)}, expected formats that differ")
        return formats
