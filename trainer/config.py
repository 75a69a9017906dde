"""The part of the run file that the container needs: model, data, features, train and evaluate.

Every field says its effect and unit in one line. `pipelines.config.RunConfig` adds the sections that only the pipeline
reads. `JobConfig` is what a job loads from `run.json`, the effective run file that `resolve_run` wrote.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from trainer.storage import join_uri, open_storage

RUN_JSON_VERSION = 1
PREPARED_FOLDER, CHUNKS_FOLDER = "prepared", "chunks"  # under the root of all runs
TENSOR_PARALLEL = ("tp", "tp+fsdp", "tp+pp+dp")  # strategies in which ranks split each layer
PIPELINE_PARALLEL = ("pp", "tp+pp+dp")  # and those in which they split the stack of layers
# Strategies under which a block's matrix products cannot be kept while the rest of it is computed again.
NOT_SELECTIVE = dict.fromkeys(TENSOR_PARALLEL, "sums products over ranks in place") | {
    "zero3": "gathers weights inside of a block, and in another order when it is computed again"
}
# Families whose tower and language model come together: `model.whole` is where both are from.
WHOLE_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
# Of their images: the longer side to the shorter one. transformers refuses to resize what is longer.
MOST_ASPECT = 200.0
SHUFFLE_SHARDS = 64  # 64,000 samples at the default size of shards
COMPILING = ("ddp", "fsdp", "hsdp")  # strategies under which compiled layers were seen to give the same losses
OFFLOADING = {"optimizer": ("zero1", "zero2", "zero3"), "optimizer+weights": ("zero3", "fsdp", "hsdp")}


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
ModelPart = Literal["tower", "projector", "language_model"]
Checkpointing = Literal["none", "selective", "full"]
CompileBackend = Literal["inductor", "aot_eager"]
Precision = Literal["fp32", "bf16", "fp16"]


class WeightsConfig(Section):
    """Where a part of the model comes from: pretrained `weights`, or a `config` to draw at random. Exactly one."""

    weights: str = Field("", description="Hugging Face hub id or local folder with pretrained weights.")
    revision: str = Field("", description="Commit of the hub repository; pin it for a reproducible run.")
    config: dict[str, Any] = Field(
        default_factory=dict, description="transformers configuration (with model_type) for random initial weights."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> WeightsConfig:
        if bool(self.weights) == bool(self.config):
            raise ValueError("give exactly one of weights (a hub id or folder) and config (random initial weights)")
        if self.config and "model_type" not in self.config:
            raise ValueError("config needs model_type, for example siglip_vision_model or qwen2")
        return self


class LoraConfig(Section):
    """LoRA (Hu et al., 2021): small trained matrices beside the language model's own, which are frozen."""

    rank: Positive = Field(16, description="Inner width of each adapter.")
    alpha: float = Field(32.0, gt=0, description="What adapters add is scaled by alpha / rank.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of an adapter's inputs set to 0; what is drawn depends on the world size."
    )
    targets: tuple[str, ...] = Field(
        (), description="Linear layers of the language blocks, such as q_proj or mlp.up_proj; empty is all of them."
    )


def _parts_of_llava_only(schema: dict[str, Any]) -> None:
    """In the JSON Schema: which fields are required depends on the family."""
    schema["required"] = [name for name in schema["required"] if name not in ("tower", "language_model")]


class ModelConfig(Section):
    """The vision-language model: a tower, a projector and a language model."""

    model_config = ConfigDict(json_schema_extra=_parts_of_llava_only)

    family: Literal["llava", "qwen2_5_vl", "qwen3_vl"] = Field(
        "llava",
        description="Model family. llava joins any tower and any language_model, the others are a model as a whole.",
    )
    whole: WeightsConfig | None = Field(
        None, description="The whole model, in place of tower and language_model. Not for llava."
    )
    tower: WeightsConfig = Field(description="Vision encoder. For llava.")
    language_model: WeightsConfig = Field(description="Causal language model. For llava.")
    tokenizer: str = Field(
        description="Hub id or folder of a tokenizer, or train:N to train a byte-level BPE of N entries on the first "
        "200,000 training samples of the data."
    )
    feature_layer: int = Field(-1, description="Tower hidden state that feeds the projector; -1 is the last layer.")
    feature_select: Literal["full", "drop_cls"] = Field(
        "full", description="full keeps every tower token; drop_cls drops the first (CLIP's class token)."
    )
    image_size: int = Field(
        0, ge=0, description="Side of the square that images are resized to, in pixels. For llava, which needs it."
    )
    min_pixels: Positive | None = Field(
        None, description="Smaller images are enlarged to about so many pixels. Not for llava."
    )
    max_pixels: Positive | None = Field(
        None,
        description="Larger images are reduced to at most about so many pixels, which bounds their tokens. The other "
        "families than llava need it.",
    )
    freeze: tuple[ModelPart, ...] = Field(
        ("tower",), description="Parts whose weights do not change. Feature caching needs a frozen tower."
    )
    lora: LoraConfig | None = Field(
        None, description="Adapters to train in place of the language model's weights; null trains these themselves."
    )
    seed: int = Field(0, description="Seed of random initial weights.")

    @model_validator(mode="before")
    @classmethod
    def _whole_is_both(cls, content: Any) -> Any:
        """A whole model is where its tower and its language model come from."""
        if not isinstance(content, dict) or content.get("family", "llava") not in WHOLE_FAMILIES:
            return content
        family, whole = content["family"], content.get("whole")
        if whole is None:
            raise ValueError(f"family {family} needs whole, with weights or config: its parts come together")
        if given := [name for name in ("tower", "language_model") if name in content]:
            raise ValueError(
                f"family {family} has no {' and no '.join(given)} of its own: whole is where both are from"
            )
        return {**content, "tower": whole, "language_model": whole}

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = dump(self)
        if self.family in WHOLE_FAMILIES:
            content.pop("tower", None)
            content.pop("language_model", None)
        return content

    @model_validator(mode="after")
    def _fits_the_family(self) -> ModelConfig:
        if self.family in WHOLE_FAMILIES:
            if alien := sorted({"image_size", "feature_layer", "feature_select"} & _changed(self)):
                raise ValueError(
                    f"{alien[0]} is for family llava: of {self.family}, images keep their shape between min_pixels and "
                    "max_pixels, and the model says which features it takes"
                )
            if self.max_pixels is None:
                raise ValueError(
                    f"family {self.family} needs max_pixels, such as 1003520: it bounds the tokens of an image"
                )
            if (self.min_pixels or 0) > self.max_pixels:
                raise ValueError(f"min_pixels {self.min_pixels} is more than max_pixels {self.max_pixels}")
            return self
        if alien := sorted({"whole", "min_pixels", "max_pixels"} & _changed(self)):
            raise ValueError(f"{alien[0]} has no meaning for family llava, which has tower, language_model, image_size")
        if not self.image_size:
            raise ValueError("family llava needs image_size: the side in pixels that its tower was trained with")
        return self

    @model_validator(mode="after")
    def _frozen_once(self) -> ModelConfig:
        if self.lora and "language_model" in self.freeze:
            raise ValueError("lora freezes the language model already: take language_model out of freeze, or lora away")
        return self

    @property
    def frozen(self) -> frozenset[ModelPart]:
        """Parts whose own weights do not change: those in `freeze`, and the language model under adapters."""
        return frozenset(("language_model", *self.freeze) if self.lora else self.freeze)


def _changed(section: Section) -> set[str]:
    """Names of the fields that are not at their defaults."""
    fields = type(section).model_fields
    return {name for name, field in fields.items() if getattr(section, name) != field.default}


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


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019)."""

    learning_rate: float = Field(gt=0, description="Peak learning rate; never scaled silently with world size.")
    projector_learning_rate: float = Field(0.0, ge=0, description="Own peak rate of the projector; 0 uses the common.")
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
        description="Layers are compiled by torch.compile, each by itself: minutes at the start, faster steps. For "
        "ddp, fsdp and hsdp.",
    )
    compile_backend: CompileBackend = Field(
        "inductor",
        description="What torch.compile makes of a layer: inductor's fused kernels, or with aot_eager the same "
        "operations as without, to find out what goes wrong.",
    )
    seed: int = Field(0, description="Seed of the data order.")
    log_every_steps: Positive = Field(10, description="Steps between lines of metrics.jsonl.")
    checkpoint_every_steps: Positive = Field(100, description="Steps between checkpoints.")
    keep_checkpoints: Positive = Field(2, description="Newest committed checkpoints to keep.")
    resume: Literal["auto", "never"] = Field("auto", description="auto continues from the newest good checkpoint.")
    deterministic: bool = Field(False, description="Deterministic kernels: bit-equal reruns, slower on GPUs.")
    freeze_gc: bool = Field(True, description="Collect garbage between steps only, so that ranks do not stall apart.")
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
