"""The part of the run file that the container needs: model, data, features, train and evaluate.

Every field says its effect and unit in one line. `vlmpipe.config.run_config.RunConfig` adds the sections that only
the pipeline reads. `JobConfig` is what a job loads from `run.json`, the effective run file that `resolve_run` wrote.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.config.base import Fraction, Positive, Section
from trainer.config.model import ModelConfig
from trainer.config.train import TrainConfig
from trainer.storage import open_storage
from trainer.storage.base import join_uri

PREPARED_FOLDER, CHUNKS_FOLDER = "prepared", "chunks"  # under the root of all runs
SHUFFLE_SHARDS = 64  # 64,000 samples at the default size of shards


class DataConfig(Section):
    """Where samples come from and how they become rows."""

    source: str = Field(
        description="builtin:digits, builtin:easy-vqa, builtin:openmoji, or a local or gs:// path: a LLaVA .json or "
        ".jsonl file, WebDataset tars, Parquet files, a COCO captions .json, or a folder with metadata.csv. Of tars "
        "and Parquet a folder or a pattern, such as train-{000..099}.tar."
    )
    image_folder: str = Field(
        "", description="Folder that image paths in records are relative to; by default that of the file."
    )
    caption_question: str = Field(
        "Describe this image.", min_length=1, description="What is asked about an image that comes with a caption only."
    )
    max_samples: int = Field(0, ge=0, description="Use only the first N samples of the source; 0 is all.")
    validation_fraction: Fraction = Field(
        0.1, description="Share of samples, chosen by id hash, kept for evaluation (if the source has no own split)."
    )
    max_reject_fraction: Fraction = Field(0.02, description="The step fails when a larger share of samples is bad.")
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="drop leaves out a sample with the images and the text of one before; both count them."
    )
    max_image_pixels: Positive = Field(50_000_000, description="Larger images are rejected before decoding.")
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


class FeaturesConfig(Section):
    """Caching of what the frozen tower outputs."""

    cache: Literal["on", "off", "auto"] = Field(
        "auto",
        description="on encodes each image once before training; auto does so where the plan finds that it pays.",
    )
    shard_images: Positive = Field(512, description="Images per feature shard, or tiles of images that are cut.")
    batch_images: Positive = Field(64, description="Images encoded at once, or tiles of images that are cut.")


class CheckpointConfig(Section):
    """How checkpoints are written and kept. How often is train.checkpoint_every_steps."""

    async_save: bool = Field(
        True, description="Training goes on while a checkpoint is written and uploaded; false waits for its COMMIT."
    )
    keep_every_steps: int = Field(
        0, ge=0, description="Keep checkpoints at multiples of this step for ever, beside train.keep_checkpoints."
    )
    keep_best: bool = Field(False, description="Keep the checkpoint with the lowest training loss as well.")
    mirror_uri: str = Field(
        "", description="Second folder or gs:// prefix, such as another region's bucket, for the last checkpoint."
    )
    signing_key_file: str = Field(
        "",
        description="File with a secret key. Checkpoints are signed with it, every file by SHA-256, which takes about "
        "3 CPU seconds a GiB, and none without its signature is loaded.",
    )
    preemption_notice_s: float = Field(
        30.0, ge=0, description="Time from SIGTERM to the end of the machine; a save that takes longer is not begun."
    )
    max_starts_without_progress: int = Field(
        5, ge=0, description="Starts at the same step, after crashes, before the job gives up; 0 never does."
    )


class EvaluateConfig(Section):
    """Evaluation on the held-out split."""

    max_samples: int = Field(0, ge=0, description="Held-out samples to use; 0 is all.")
    max_new_tokens: Positive = Field(16, description="Longest generated answer, in tokens.")
    batch_questions: Positive = Field(64, description="Questions answered at once.")
    controls: tuple[Literal["shuffled_image", "no_image"], ...] = Field(
        ("shuffled_image", "no_image"),
        description="Evaluate again with another sample's image, or with none: what the text alone gives away.",
    )
    cider_d: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Score answers as captions, by CIDEr-D; auto does where expected answers have five words or more "
        "on average.",
    )


class RunPaths(Section):
    """Where this run reads and writes. Prepared data and features are shared between runs by content."""

    run_id: str = Field(description="Name of the run, unique under root_uri.")
    root_uri: str = Field(description="Folder or gs:// prefix that holds everything.")

    @property
    def run_uri(self) -> str:
        return join_uri(self.root_uri, "runs", self.run_id)

    @property
    def prepared_root(self) -> str:
        return join_uri(self.root_uri, PREPARED_FOLDER)

    @property
    def chunks_root(self) -> str:
        return join_uri(self.root_uri, CHUNKS_FOLDER)

    @property
    def features_root(self) -> str:
        return join_uri(self.root_uri, "features")


class DataPointers(Section):
    """What `prepare_data` hands to the jobs through `prepared.json` in the run's folder."""

    prepared_uri: str = Field(description="Prepared data of this run.")
    features_uri: str = Field(description="Feature store of this run's tower.")
    features: Literal["encode", "reuse", "off"] = Field(
        description="Whether features are used, and if any are missing."
    )


class JobConfig(BaseModel):
    """What a job knows of its run. Sections that only the pipeline reads are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Literal[1]
    name: str
    run: RunPaths
    model: ModelConfig
    data: DataConfig
    features: FeaturesConfig
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig

    @classmethod
    def load(cls, uri: str) -> JobConfig:
        """Read the effective run file at `uri` (`<run>/run.json`)."""
        folder, _, name = uri.rpartition("/")
        return cls.model_validate(json.loads(open_storage(folder).read(name)))

    def pointers(self) -> DataPointers:
        """The prepared data and features of this run. Needs `prepare_data` to have run."""
        return DataPointers.model_validate_json(open_storage(self.run.run_uri).read("prepared.json"))


def run_uri_of(root_uri: str, run_id: str, job_name: str) -> str:
    """The run's folder. `job_name` is the pipeline job's own name, which an empty `run_id` stands for."""
    return join_uri(root_uri, "runs", run_id or job_name)
