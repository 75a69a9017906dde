"""The run file's `data` section: where samples come from, and how they are packed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from trainer.config.base import Fraction, Positive, Section, StorageUri
from trainer.config.model import ModelConfig

BY_IMAGE, BY_RECORD = "image", "record"  # values of data.split_by; every other one is the name of a field
NATIVE, OWN_FORMAT = "native", "vlmpipe"  # values of data.chat_template; every other one is a file's address
SHUFFLE_SHARDS = 64  # 64,000 samples at the default size of shards


class DataConfig(Section):
    """Where samples come from and how they become rows."""

    source: StorageUri = Field(
        description="builtin:digits, builtin:easy-vqa, builtin:openmoji, or a local or gs:// path: a LLaVA .json or "
        ".jsonl file, WebDataset tars, Parquet files, a COCO captions .json, or a folder with metadata.csv. Of tars "
        "and Parquet a folder or a pattern, such as train-{000..099}.tar."
    )
    image_folder: StorageUri = Field(
        "", description="Folder that image paths in records are relative to; by default that of the file."
    )
    caption_question: str = Field(
        "Describe this image.", min_length=1, description="What is asked about an image that comes with a caption only."
    )
    chat_template: StorageUri = Field(
        "",
        description="How conversations are written: native, the template of model.tokenizer; vlmpipe, a short format "
        "for models trained from scratch; or a file with a Jinja template, local or gs://. Empty is native where "
        "model.pretrained has weights and the tokenizer is not trained, and vlmpipe elsewhere.",
    )
    answer_end: str = Field(
        "",
        description="Token put behind answers where the chat template writes none that ends them, such as </s>.",
    )
    max_samples: int = Field(0, ge=0, description="Use only the first N samples of the source; 0 is all.")
    validation_fraction: Fraction = Field(
        0.1, description="Share of the groups that split_by makes, kept for evaluation if the source names no splits."
    )
    split_by: str = Field(
        BY_IMAGE,
        min_length=1,
        description="What is never in both splits: image keeps all samples of a picture on one side, record decides "
        "for each record by itself, and every other value names a field of the records, such as patient or document.",
    )
    max_reject_fraction: Fraction = Field(0.02, description="The step fails when a larger share of samples is bad.")
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="drop leaves out a sample with the images and the text of one before; both count them."
    )
    max_image_pixels: Positive = Field(50_000_000, description="Larger images are rejected before decoding.")
    max_image_bytes: Positive = Field(
        64 << 20,
        description="Image files with more bytes are rejected unread; a process holds at most this times its threads, "
        "or one sample.",
    )
    min_image_side: Positive = Field(4, description="Images with a shorter side, in pixels, are rejected.")
    max_image_aspect: float = Field(
        200.0, ge=1, description="Images whose longer side is more times the shorter one are rejected."
    )
    animated: Literal["first_frame", "reject"] = Field(
        "first_frame", description="What happens to an animated image: its first frame is used, or it is rejected."
    )
    shard_samples: Positive = Field(1000, description="Samples per shard.")
    chunk_samples: int = Field(
        16_384,
        ge=2,
        description="About how many records are prepared as one piece: what is kept, done again or shared out at once.",
    )
    workers: int = Field(
        0, ge=0, description="Processes that prepare chunks at the same time; 0 is one for each processor core."
    )
    tasks: Positive = Field(
        1, description="Pipeline tasks, each on a machine of its own, that share the chunks between them."
    )
    sequence_length: Positive = Field(description="Tokens of a packed sequence.")
    max_images_per_sequence: Positive = Field(
        64,
        description="Most images in a packed sequence, or tiles of images that are cut; with sequence_length it bounds "
        "memory.",
    )
    pack: bool = Field(True, description="Pack several samples into a sequence; false gives each sample its own.")
    shuffle_shards: Positive = Field(
        SHUFFLE_SHARDS,
        description="Shards that an epoch mixes at a time; it reads them once if twice as many fit into the cache.",
    )
    shard_cache_gib: float = Field(
        0.0,
        ge=0,
        description="Disk of each machine for shards from gs://, in GiB; 0 takes up to four fifths of what is free "
        "beside a checkpoint.",
    )
    overlong_policy: Literal["reject", "truncate"] = Field(
        "reject", description="What happens to a sample longer than sequence_length: truncate drops its last turns."
    )

    def chat_format(self, model: ModelConfig) -> str:
        """`native`, `vlmpipe` or the address of a template."""
        whole = model.pretrained
        is_chat_model = whole is not None and bool(whole.weights) and not model.tokenizer.startswith("train:")
        return self.chat_template or (NATIVE if is_chat_model else OWN_FORMAT)

    @field_validator("split_by")
    @classmethod
    def _has_such_a_field(cls, split_by: str, info: ValidationInfo) -> str:
        source = info.data.get("source", "")
        if split_by not in (BY_IMAGE, BY_RECORD) and source.startswith("builtin:"):
            raise ValueError(f"names a field of records, which {source} has none of: {BY_IMAGE} or {BY_RECORD}")
        return split_by
