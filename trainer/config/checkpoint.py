"""The run file's `checkpoint` section: how checkpoints are written, kept and exported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlmpipe.trainer.config.base import Section, StorageUri


class CheckpointConfig(Section):
    """How checkpoints are written, kept and exported. How often is train.checkpoint_every_steps."""

    async_save: bool = Field(
        True, description="Train while a checkpoint is written and uploaded; false waits for its COMMIT."
    )
    keep_every_steps: int = Field(
        0, ge=0, description="Keep checkpoints at multiples of this step for ever, beside train.keep_checkpoints."
    )
    keep_best: bool = Field(False, description="Keep the checkpoint with the lowest training loss as well.")
    mirror_uri: StorageUri = Field(
        "",
        description="Second folder or bucket's prefix, such as in another region. Checkpoints are copied there "
        "during training, which resumes from the copy when the first store is lost.",
    )
    mirror_lag_warning_s: float = Field(
        1800.0, gt=0, description="Age of a checkpoint that is not yet in the mirror at which training warns."
    )
    signing_key_file: str = Field(
        "",
        description="File with a secret key. Checkpoints are signed with it, every file by SHA-256, which takes about "
        "3 CPU seconds a GiB, and none without its signature is loaded.",
    )
    preemption_notice_s: float = Field(
        30.0, ge=0, description="Time from SIGTERM to the end of the machine; a save that takes longer is not begun."
    )
    max_s_without_commit: float = Field(
        3600.0,
        ge=0,
        description="Time from the first save that fails, because the store is away or a disk is full, to the end of "
        "training, if no checkpoint is committed meanwhile. Until then training continues and saves again a minute "
        "after each failure; after the last step it waits. 0 ends training at the first failure.",
    )
    max_starts_without_progress: int = Field(
        5, ge=0, description="Starts at the same step, after crashes, before the job gives up; 0 never does."
    )
    export_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="Type of the weights in the export; checkpoints keep fp32. bf16 takes half the bytes. auto is bf16 "
        "with train.precision bf16, in which evaluation and servers compute, and fp32 else and before a later stage. "
        "Adapters are always fp32.",
    )
