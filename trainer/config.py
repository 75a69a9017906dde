"""The part of the run file that the container needs: model, data, features, train and evaluate.

Every field says its effect and unit in one line. `pipelines.config.RunConfig` adds the sections that only the pipeline
reads. `JobConfig` is what a job loads from `run.json`, the effective run file that `resolve_run` wrote.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer.model_config import ModelConfig
from trainer.section import Fraction, Positive, Section
from trainer.storage import join_uri, open_storage

RUN_JSON_VERSION = 1
PREPARED_FOLDER, CHUNKS_FOLDER = "prepared", "chunks"  # under the root of all runs
TENSOR_PARALLEL = ("tp", "tp+fsdp", "tp+pp+dp")  # strategies in which ranks split each layer
PIPELINE_PARALLEL = ("pp", "tp+pp+dp")  # and those in which they split the stack of layers
# Strategies under which a block's matrix products cannot be kept while the rest of it is computed again.
NOT_SELECTIVE = dict.fromkeys(TENSOR_PARALLEL, "sums products over ranks in place") | {
    "zero3": "gathers weights inside of a block, and in another order when it is computed again"
}
SHUFFLE_SHARDS = 64  # 64,000 samples at the default size of shards
COMPILING = ("ddp", "fsdp", "hsdp")  # strategies under which compiled layers were seen to give the same losses
OFFLOADING = {"optimizer": ("zero1", "zero2", "zero3"), "optimizer+weights": ("zero3", "fsdp", "hsdp")}


Checkpointing = Literal["none", "selective", "full"]
CompileBackend = Literal["inductor", "aot_eager"]
Precision = Literal["fp32", "bf16", "fp16"]


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
    held_out_fraction: Fraction = Field(
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
        0, ge=0, description="Processes that prepare pieces at the same time; 0 is one for each processor core."
    )
    tasks: Positive = Field(
        1, description="Pipeline tasks, each on a machine of its own, that share the pieces between them."
    )
    row_tokens: Positive = Field(description="Tokens per packed row.")
    row_images: Positive = Field(64, description="Most images in one row; with row_tokens it bounds memory.")
    pack: bool = Field(True, description="Pack several samples into a row; false gives each sample its own row.")
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
    over_long: Literal["reject", "truncate"] = Field(
        "reject", description="What happens to a sample longer than row_tokens: truncate drops its last turns."
    )


class FeaturesConfig(Section):
    """Caching of what the frozen tower outputs."""

    cache: Literal["on", "off", "auto"] = Field(
        "auto",
        description="on encodes each image once before training; auto does so where the plan finds that it pays.",
    )
    shard_images: Positive = Field(512, description="Images per feature shard.")
    batch_images: Positive = Field(64, description="Images encoded at once.")


# Keys of DeepSpeed's configuration, and the fields of the run file that decide them.
DECIDED_HERE = {
    "train_batch_size": "train.global_batch_rows",
    "train_micro_batch_size_per_gpu": "train.micro_batch_rows",
    "gradient_accumulation_steps": "train.global_batch_rows and micro_batch_rows",
    "gradient_clipping": "train.clip_grad_norm",
    "optimizer": "train.optimizer",
    "scheduler": "train.schedule",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "activation_checkpointing": "train.activation_checkpointing",
    "zero_allow_untested_optimizer": "train.optimizer",
    "zero_force_ds_cpu_optimizer": "train.optimizer",
    "zero_optimization.stage": "train.strategy",
    "zero_optimization.offload_optimizer": "train.offload",
    "zero_optimization.offload_param": "train.offload",
}


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019)."""

    learning_rate: float = Field(gt=0, description="Peak learning rate; never scaled silently with world size.")
    projector_learning_rate: float = Field(0.0, ge=0, description="Own peak rate of the projector; 0 uses the common.")
    tower_learning_rate: float = Field(0.0, ge=0, description="Own peak rate of a trained tower; 0 uses the common.")
    batch_scaling: Literal["none", "sqrt", "linear"] = Field(
        "none",
        description="Scales all rates by global_batch_rows / reference_batch_rows, or by its square root, which suits "
        "AdamW. none leaves them as they are, whatever the batch.",
    )
    reference_batch_rows: int = Field(0, ge=0, description="Rows of a step that the rates are meant for; see above.")
    weight_decay: float = Field(0.0, ge=0, description="Decay of matrices; biases and norms are not decayed.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="Denominator offset.")


class TrainConfig(Section):
    """The training step."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "tp+fsdp", "pp", "tp+pp+dp"] = Field(
        "ddp", description="How training is distributed."
    )
    offload: Literal["none", "optimizer", "optimizer+weights"] = Field(
        "none",
        description="What is kept, and updated, in the machine's memory instead of the GPU's: slower steps, less GPU "
        "memory. optimizer is for the zero strategies, optimizer+weights for zero3, fsdp and hsdp.",
    )
    tensor_parallel: Positive = Field(
        1, description="Ranks of one node that split each layer between them. For the tp strategies."
    )
    pipeline_parallel: Positive = Field(
        1, description="Stages that the layers are divided into. For the pp strategies."
    )
    epochs: Positive = Field(1, description="Passes over the training split.")
    max_steps: int = Field(0, ge=0, description="Stop after N optimizer steps; 0 trains all epochs.")
    global_batch_rows: Positive = Field(description="Rows per optimizer step over all ranks.")
    micro_batch_rows: Positive = Field(1, description="Rows per forward pass on one rank.")
    optimizer: OptimizerConfig = Field(description="AdamW settings.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Learning rate after warm-up; wsd stays at the peak and falls at the end."
    )
    warmup_fraction: Fraction = Field(0.03, description="Share of steps in which the rate rises linearly from 0.")
    decay_fraction: Fraction = Field(0.2, description="Share of steps at the end in which the rate of wsd falls.")
    final_rate_fraction: Fraction = Field(0.0, description="Rate at the last step as a share of the peak.")
    clip_grad_norm: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    precision: Precision = Field(
        "bf16",
        description="Compute precision; weights stay fp32. fp16 is for GPUs without bf16: the loss is scaled, and "
        "steps that overflow are skipped.",
    )
    activation_checkpointing: Checkpointing = Field(
        "none",
        description="full computes each block of the language model again in the backward pass: least memory, about a "
        "third more compute. selective keeps the results of its matrix products and attention, and computes only the "
        "rest again.",
    )
    loss_chunk_tokens: int = Field(
        1024,
        ge=0,
        description="Label tokens of a micro-batch that have logits at a time; all chunks but one are computed again "
        "in the backward pass. 0 holds all logits at once.",
    )
    compile: bool = Field(
        False,
        description="Layers are compiled by torch.compile, each by itself, which takes time at the start. Measure "
        "whether steps get faster. For ddp, fsdp and hsdp.",
    )
    compile_backend: CompileBackend = Field(
        "inductor",
        description="What torch.compile makes of a layer: inductor's fused kernels, or with aot_eager the same "
        "operations as without, to find out what goes wrong.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="Laid over the DeepSpeed configuration that is derived from this file, key by key, for the zero "
        "strategies; what this file decides cannot be given. The result is in deepspeed.json beside the run.",
    )
    seed: int = Field(0, description="Seed of the data order.")
    log_every_steps: Positive = Field(10, description="Steps between lines of metrics.jsonl.")
    validate_every_steps: int = Field(
        0, ge=0, description="Steps between losses on held-out rows (held_out_loss in metrics.jsonl); 0 takes none."
    )
    validate_rows: Positive = Field(64, description="Rows of the held-out split that are validated on, the same ones.")
    checkpoint_every_steps: Positive = Field(100, description="Steps between checkpoints.")
    keep_checkpoints: Positive = Field(2, description="Newest committed checkpoints to keep.")
    resume: Literal["auto", "never"] = Field("auto", description="auto continues from the newest good checkpoint.")
    deterministic: bool = Field(False, description="Deterministic kernels: bit-equal reruns, slower on GPUs.")
    freeze_gc: bool = Field(True, description="Collect garbage between steps only, so that ranks do not stall apart.")
    measure_communication: bool = Field(
        False, description="Time collectives by size, inside a node and across nodes, before training starts."
    )
    stall_factor: float = Field(
        20.0, ge=0, description="End the job when no step is done for this many median steps; 0 never does."
    )
    stall_floor_s: float = Field(
        300.0, gt=0, description="Seconds without a step that are never a stall, whatever train.stall_factor says."
    )

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    def loss_chunks(self, label_tokens: float) -> int:
        """How many chunks the loss of a micro-batch with so many label tokens is computed in."""
        return max(1, math.ceil(label_tokens / self.loss_chunk_tokens)) if self.loss_chunk_tokens else 1

    @model_validator(mode="after")
    def _degrees_fit(self) -> TrainConfig:
        for name, strategies in (("tensor_parallel", TENSOR_PARALLEL), ("pipeline_parallel", PIPELINE_PARALLEL)):
            degree, uses = getattr(self, name), self.strategy in strategies
            if uses and degree == 1:
                raise ValueError(f"strategy {self.strategy} splits the model: give {name}, 2 or more")
            if degree > 1 and not uses:
                raise ValueError(
                    f"{name} {degree} has no meaning for strategy {self.strategy}: use one of {', '.join(strategies)}"
                )
        return self

    @model_validator(mode="after")
    def _checkpointing_works(self) -> TrainConfig:
        why_not = NOT_SELECTIVE.get(self.strategy)
        if self.activation_checkpointing == "selective" and why_not:
            raise ValueError(
                f"activation_checkpointing selective does not work with strategy {self.strategy}, which {why_not}: use "
                "full or none"
            )
        return self

    @model_validator(mode="after")
    def _compiling_works(self) -> TrainConfig:
        if self.compile and self.strategy not in COMPILING:
            raise ValueError(
                f"compile does not work with strategy {self.strategy}: use one of {', '.join(COMPILING)}, or leave "
                "compile out"
            )
        return self

    @model_validator(mode="after")
    def _deepspeed_is_ours_in_part(self) -> TrainConfig:
        if self.deepspeed and not self.strategy.startswith("zero"):
            raise ValueError(
                f"deepspeed has no meaning for strategy {self.strategy}: take it out, or use zero1 to zero3"
            )
        zero = self.deepspeed.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(f"deepspeed.zero_optimization: found {zero!r}, expected a mapping")
        given = [*self.deepspeed, *(f"zero_optimization.{name}" for name in zero)]
        for name in given:
            if name in DECIDED_HERE:
                raise ValueError(f"deepspeed.{name} is decided by {DECIDED_HERE[name]}: set that, and take this out")
        return self

    @model_validator(mode="after")
    def _validating_works(self) -> TrainConfig:
        if self.validate_every_steps and self.strategy in PIPELINE_PARALLEL:
            raise ValueError(
                f"validate_every_steps does not work with strategy {self.strategy}, whose stages have no pass without "
                "gradients: set it to 0; the evaluate step measures the held-out split after training"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainConfig:
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} and decay_fraction {self.decay_fraction} are more than all "
                "steps: they share 1 between them"
            )
        return self

    @model_validator(mode="after")
    def _offload_works(self) -> TrainConfig:
        able = OFFLOADING.get(self.offload)
        if able and self.strategy not in able:
            other = next((name for name, strategies in OFFLOADING.items() if self.strategy in strategies), "none")
            raise ValueError(
                f"strategy {self.strategy} cannot offload {self.offload}: use one of {', '.join(able)}, or offload "
                f"{other}"
            )
        return self

    @property
    def rate_scale(self) -> float:
        """What all peak rates are multiplied with for the size of the global batch, where the run file asks for it.

        linear: Goyal et al. 2017, arXiv 1706.02677 (SGD); sqrt: Malladi et al. 2022, arXiv 2205.10782 (Adam).
        """
        if self.optimizer.batch_scaling == "none":
            return 1.0
        ratio = self.global_batch_rows / self.optimizer.reference_batch_rows
        return ratio if self.optimizer.batch_scaling == "linear" else math.sqrt(ratio)

    @model_validator(mode="after")
    def _scaling_has_a_reference(self) -> TrainConfig:
        scaling, reference = self.optimizer.batch_scaling, self.optimizer.reference_batch_rows
        if (scaling == "none") != (reference == 0):
            raise ValueError(
                f"optimizer.batch_scaling {scaling} and optimizer.reference_batch_rows {reference}: give both, or none "
                "and 0"
            )
        return self

    @model_validator(mode="after")
    def _divisible(self) -> TrainConfig:
        if self.global_batch_rows % self.micro_batch_rows:
            raise ValueError(
                f"global_batch_rows {self.global_batch_rows} must be a multiple of micro_batch_rows "
                f"{self.micro_batch_rows}"
            )
        return self


class CheckpointConfig(Section):
    """How checkpoints are written and kept. How often is train.checkpoint_every_steps."""

    asynchronous: bool = Field(
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

    @property
    def registry_root(self) -> str:
        return join_uri(self.root_uri, "registry")


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
