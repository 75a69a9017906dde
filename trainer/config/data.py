"""The run file's `data` section: where samples come from, and how they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from vlmpipe.trainer.config.base import Fraction, NonNegative, OfFeature, Positive, Section, StorageUri
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.sources.data_source import Columns, DataSource, SourceUri, function_named, require_function

BY_IMAGE, BY_RECORD = "image", "record"  # values of data.split_by; every other one is the name of a field
NATIVE, OWN_FORMAT = "native", "vlmpipe"  # values of data.chat_template (every other one is a file's address)
REPLAY_SAMPLES = "samples"  # folder of the start model's answers, below `replay_folder`
AUTO_QUESTIONS = 4  # about an image in a packed sequence: docs/decisions/0248
SHUFFLE_SHARDS = 64  # 64,000 samples at the default size of shards


class DataPhase(Section):
    """Consecutive epochs of a curriculum."""

    epochs: Positive = Field(1, description="Epochs of the phase. The last phase lasts to the end of the run.")
    weights: dict[str, NonNegative] = Field(
        description="Weight of each source by name; a source without one is not drawn."
    )


class DataConfig(Section):
    """Where samples come from, and how they become packed sequences."""

    _fetched_folder: str = PrivateAttr("")  # not in the run file: it is below the root of the run
    _replay_folder: str = PrivateAttr("")  # likewise

    source: SourceUri = Field(
        "",
        description="Source of samples: builtin:digits, builtin:easy-vqa, builtin:openmoji, "
        "bq://PROJECT.DATASET.TABLE, or a path, local or in a bucket, of a LLaVA .json or .jsonl file, WebDataset "
        "tars, Parquet files, a COCO captions .json, or a folder with metadata.csv. Tars and Parquet files also as a "
        "folder or a pattern, such as train-{000..099}.tar. MODULE:FUNCTION or FILE.py:FUNCTION yields records: a "
        "module is installed where data is prepared, a file is read at its address. Either this or sources is needed.",
    )
    source_arguments: dict[str, str | int | float | bool] = Field(
        {}, description="Arguments of a source that is a function, such as {path: exports/tasks.json}."
    )
    sources: tuple[DataSource, ...] = Field(
        (), description="Several sources instead of one. Each epoch mixes their samples in fixed shares throughout."
    )
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = Field(
        "all_exhausted",
        description="End of an epoch of weighted sources: first_exhausted, once one source is used up; all_exhausted, "
        "once each was read whole, so that smaller ones repeat.",
    )
    max_source_passes: float = Field(
        100.0, gt=0, description="Most passes over a source in one epoch; more fail the step, and more than 10 warn."
    )
    phases: tuple[DataPhase, ...] = Field(
        (),
        description="Curriculum: weights of sources by epoch; empty for none. The sources then have no weights "
        "themselves.",
    )
    image_folder: StorageUri = Field(
        "", description="Folder that image paths in records are relative to; empty takes that of the file."
    )
    fetch: bool = Field(
        False,
        description="Download images that records name by http or https before preparation, and keep them under "
        "output.root_uri; false rejects such records. Only public addresses are requested.",
    )
    max_fetched_images: Positive = Field(
        1_000_000,
        description="Most addresses that records may name; more end the step before any request. Raise it for larger "
        "sets.",
    )
    max_fetched_gib: float = Field(500.0, gt=0, description="Most GiB of downloaded images; more end the step.")
    max_fetch_hours: float = Field(
        24.0,
        gt=0,
        description="Most hours of downloading, after which the step ends; the next run continues. Raise it for sets "
        "that take longer.",
    )
    caption_question: str = Field(
        "Describe this image.", min_length=1, description="Question about an image that has a caption only."
    )
    columns: Columns = Field(
        Columns(), description="Names of the records' keys or columns, such as {image: image_path, answer: label}."
    )
    exclude: StorageUri = Field(
        "",
        description="File with ids of samples that are left out, local or in a bucket: JSON Lines "
        "with a key id, or CSV with a column id. Empty leaves out none.",
    )
    slices: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Fields of the records by whose values answers are compared, such as [camera, weather]: a text, a "
        "number or true and false. The evaluation, the report and vlmpipe compare show each value as a slice.",
    )
    chat_template: StorageUri = Field(
        "",
        description="Form of conversations: native, the template of model.tokenizer; vlmpipe, a short format for "
        "models trained from scratch; or a file with a Jinja template, local or in a bucket. Empty is native if "
        "model.pretrained has weights and the tokenizer is not trained, otherwise vlmpipe.",
    )
    answer_end: str = Field(
        "",
        description="End token appended to answers if the chat template adds none, such as </s>.",
    )
    allowed_tokens: tuple[str, ...] = Field(
        (),
        description="Control tokens of the tokenizer that answers and questions may contain, such as <|box_start|> of "
        "Qwen2-VL or <ref> of InternVL; never those that end turns or stand for images. Set it where "
        "answers are boxes or tags in the model's own tokens.",
    )
    max_samples: int = Field(0, ge=0, description="Use only the first N samples of the source; 0 is all.")
    train_share: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Share of the training samples that a run trains on, of each source; 1 is all. Smaller shares are "
        "parts of larger ones with the same train.seed; samples that share images stay together, unless split_by is "
        "record. All shares have the same prepared data and features.",
    )
    validation_fraction: Fraction = Field(
        0.1, description="Share of the groups by split_by in the validation split, if the source names no splits."
    )
    split_by: str = Field(
        BY_IMAGE,
        min_length=1,
        description="Groups that are never in both splits: image keeps all samples of an image together, record "
        "decides for each record by itself, and every other value names a field of the records, such as patient or "
        "document.",
    )
    file_splits: Literal["stated", "ignored"] = Field(
        "stated",
        description="stated: words such as train, validation, val, dev and test in names of files and folders decide "
        "the split of several files, with test in the validation split. ignored: split_by decides. Set it "
        "to ignored where such words in names do not mean splits.",
    )
    max_image_share: Fraction = Field(
        0.05,
        description="Largest share of samples that one image joins into a group; an image in more samples, next to "
        "others, joins none. Raise it where an image has more of the samples and must stay in one split.",
    )
    max_split_error: Fraction = Field(
        0.05,
        description="Largest difference of the validation share from validation_fraction, beyond sampling error; more "
        "fails the step. Raise it where a few large groups make the split coarse.",
    )
    max_reject_fraction: Fraction = Field(0.02, description="Largest share of rejected samples; more fails the step.")
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="Samples with the images and the text of an earlier one: keep or drop. Both count them."
    )
    max_image_pixels: Positive = Field(
        50_000_000,
        description="Most pixels of an image; larger ones are rejected before decoding. Raise it for larger scans or "
        "maps.",
    )
    max_image_bytes: Positive = Field(
        64 << 20,
        description="Most bytes of an image file; larger ones are rejected unread. A process holds at most this times "
        "its threads, or one sample. Lower it where preparation runs out of memory.",
    )
    max_media_bytes: Positive = Field(
        1 << 30,
        description="Most bytes of a video or document; larger ones are rejected unread. A thread holds one in memory. "
        "Raise it for longer videos.",
    )
    video: Annotated[Literal["frames", "native"], OfFeature("native_video")] = Field(
        "frames",
        description="frames makes an image of each frame of a video; native makes video tokens, each patch of two "
        "frames, with their times. native is for models of qwen2_5_vl and qwen3_vl, and of hf with max_pixels.",
    )
    video_frames: Positive = Field(
        8, description="Most frames of a video, evenly spread; each is an image, or half a patch with video native."
    )
    video_fps: NonNegative = Field(
        0.0, description="Frames per second of video, up to video_frames; 0 takes video_frames of any video."
    )
    video_times: bool = Field(
        False,
        description="Write the time before each frame of a video, such as <1.5 seconds>, as Qwen3-VL's own processor "
        "does. Set it for questions about when something happens.",
    )
    min_image_side: Positive = Field(
        4, description="Shortest side of an image, in pixels; smaller images are rejected. Raise it to leave out icons."
    )
    max_image_aspect: float = Field(
        200.0, ge=1, description="Largest ratio of an image's longer to its shorter side; others are rejected."
    )
    animated: Literal["first_frame", "reject"] = Field(
        "first_frame",
        description="Handling of an animated image: first_frame uses its first frame, reject rejects it. Set it to "
        "reject where later frames matter.",
    )
    grey_bits: int = Field(
        16,
        ge=8,
        le=16,
        description="Bits that 16-bit grey images use, such as 12 of X-rays; images with other values are rejected.",
    )
    shard_samples: Positive = Field(
        1000, description="Samples per shard. Lower it for large samples such as videos, which make large shards."
    )
    chunk_samples: int = Field(
        16_384,
        ge=2,
        description="Approximate records per chunk, the unit of caching, retry and distribution in preparation. Lower "
        "it where a chunk takes long, so that a retry repeats less.",
    )
    workers: int = Field(
        0, ge=0, description="Processes that prepare chunks at the same time; 0 is one per processor core."
    )
    loader_threads: Positive | Literal["auto"] = Field(
        "auto",
        description="Threads of each rank that decode and prepare images ahead of training. auto begins with the "
        "machine's cores divided by its ranks, at most 8, and doubles them up to that share while training waits for "
        "data more than 5 % of the time.",
    )
    tasks: Positive = Field(
        1, description="Pipeline tasks, each on a machine of its own, that share the chunks between them."
    )
    sequence_length: Positive = Field(description="Tokens of a packed sequence.")
    max_images_per_sequence: Positive = Field(
        64,
        description="Most images in a packed sequence; with sequence_length it bounds memory.",
    )
    pack: bool = Field(True, description="Pack several samples into a sequence; false gives each sample its own.")
    turns: Literal["conversation", "independent"] = Field(
        "conversation",
        description="What a later turn of a record sees: conversation, the turns before it; independent, the images "
        "alone, as each turn becomes a sample of its own. Independent is for questions about an image in any order, "
        "not for dialogues or preference pairs.",
    )
    share_prefix: Literal["auto", "on", "off"] = Field(
        "off",
        description="Compute the tokens of an image, and all others before a sample's first own text, once for all "
        "samples of a packed sequence that begin with them; each sees them and itself alone, so the loss is that of "
        "separate samples; of preference pairs the whole prompt, once for both answers. off computes them for each "
        "sample; auto shares where model and settings allow it. Data is prepared for it, and a shard has an image "
        "once then.",
    )
    max_questions_per_image: int = Field(
        0,
        ge=0,
        description="Most samples of a packed sequence that share a prefix, for steps with more different images; 0 is "
        f"as many as fit, and {AUTO_QUESTIONS} with share_prefix auto. Only with share_prefix.",
    )
    shuffle_shards: Positive = Field(
        SHUFFLE_SHARDS,
        description="Shards that an epoch mixes together; with a cache for twice as many, each is read once.",
    )
    shard_cache_gib: float = Field(
        0.0,
        ge=0,
        description="Disk of each machine for shards from buckets, in GiB; 0 takes up to four fifths of the space "
        "that a checkpoint leaves free.",
    )
    shard_reading: Literal["auto", "whole", "ranges"] = Field(
        "auto",
        description="Reading of training samples from a bucket: whole fetches shards into the cache, ranges reads each "
        "sample alone by one request; auto takes ranges where they are calculated to take at most a third of the time, "
        "or a shard is larger than the cache. Samples are the same.",
    )
    overlong_policy: Literal["reject", "truncate", "split"] = Field(
        "reject",
        description="Handling of a sample longer than sequence_length: reject rejects it; truncate drops its last "
        "turns; split makes further samples of them, each with the images that were shown before.",
    )

    @property
    def fetched_folder(self) -> str:
        """Where images of the web are kept; "" where that is not known, or none is fetched."""
        return self._fetched_folder

    def fetching_into(self, folder: str) -> DataConfig:
        """This section with a known `fetched_folder`."""
        located = self.model_copy()
        located._fetched_folder = folder
        return located

    @property
    def replay(self) -> DataSource | None:
        """The source of the start model's answers, if there is one."""
        return next((source for source in self.sources if source.replay), None)

    @property
    def replay_folder(self) -> str:
        """Where the start model's answers are; "" where that is not known."""
        return self._replay_folder

    def replaying_from(self, folder: str) -> DataConfig:
        """This section with a known `replay_folder`."""
        located = self.model_copy()
        located._replay_folder = folder
        return located

    def without_replay(self) -> DataConfig:
        """This section with the sources that have an address."""
        return self.model_copy(update={"sources": tuple(source for source in self.sources if source.uri)})

    @property
    def all_sources(self) -> tuple[DataSource, ...]:
        """The sources, or `source` as the only one."""
        only = {
            "uri": self.source,
            "arguments": self.source_arguments,
            "image_folder": self.image_folder,
            "max_samples": self.max_samples,
        }
        return self.sources or (DataSource(name="source", **only),)

    def described(self) -> str:
        """The source, or the sources with their names, for people."""
        return ", ".join(f"{source.name} ({source.address})" for source in self.sources) or self.source

    def by_field(self) -> dict[str, DataSource]:
        """The sources by the beginning of their fields in the run file, such as `data.sources.0.`."""
        return {f"data.sources.{n}." if self.sources else "data.": source for n, source in enumerate(self.all_sources)}

    def addresses(self) -> dict[str, str]:
        """Where samples and their image files are, by the field of the run file; image folders only where given.

        Of a function it is the address of its file; an installed module has none.
        """
        found = {}
        for field, source in self.by_field().items():
            module, _ = function_named(source.uri) or (source.uri, "")
            if isinstance(source.replay_prompts, str):
                found[f"{field}replay_prompts"] = source.replay_prompts
            elif source.uri and (module == source.uri or module.endswith(".py")):
                found[field + ("uri" if self.sources else "source")] = module
            if source.image_folder:
                found[f"{field}image_folder"] = source.image_folder
        return found

    def of_source(self, source: DataSource) -> DataConfig:
        """This section with one of its sources alone."""
        alone = {"source": source.uri, "sources": (), "phases": (), "max_samples": source.max_samples}
        if source.replay:  # files of vlmpipe's own, with none of the fields that other records are asked for
            alone["source"] = f"{self._replay_folder}/{REPLAY_SAMPLES}" if self._replay_folder else ""
            own_form = {"columns": Columns(), "split_by": BY_RECORD, "slices": (), "file_splits": "ignored"}
            return self.model_copy(update=alone | own_form | {"source_arguments": {}, "image_folder": ""})
        own = {
            "source_arguments": source.arguments,
            "image_folder": source.image_folder,
            "caption_question": source.caption_question or self.caption_question,
            "columns": self.columns if source.columns == Columns() else source.columns,
        }
        return self.model_copy(update=alone | own)

    def weights(self, epoch: int) -> tuple[float, ...] | None:
        """The weight of each source in an epoch; None where they have numbers of samples or epochs."""
        if self.phases:
            phase, left = self.phases[0], epoch
            for following in self.phases[1:]:
                if left < phase.epochs:
                    break
                phase, left = following, left - phase.epochs
            return tuple(phase.weights.get(source.name, 0.0) for source in self.sources)
        found = [source.weight for source in self.sources if source.weight is not None]
        return tuple(found) or None

    def chat_format(self, model: ModelConfig) -> str:
        """`native`, `vlmpipe` or the address of a template."""
        whole = model.pretrained
        is_chat_model = whole is not None and bool(whole.weights) and not model.tokenizer.startswith("train:")
        return self.chat_template or (NATIVE if is_chat_model else OWN_FORMAT)

    @model_validator(mode="after")
    def _has_sources(self) -> DataConfig:
        if bool(self.source) == bool(self.sources):
            raise ValueError(f"{'has source and sources' if self.source else 'has no source'}: expected one of the two")
        require_function(self.source, "source_arguments", self.source_arguments)
        if self.sources:
            _require_mixture(self)
        elif self.phases:
            raise ValueError("has phases without sources, whose weights they are")
        return self

    @field_validator("share_prefix", mode="before")
    @classmethod
    def _switched(cls, value: object) -> object:
        """The field was true or false, and records of runs from then are read."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("split_by")
    @classmethod
    def _has_such_a_field(cls, split_by: str, info: ValidationInfo) -> str:
        source = info.data.get("source", "")
        if split_by not in (BY_IMAGE, BY_RECORD) and source.startswith("builtin:"):
            raise ValueError(f"names a field of records, which {source} has none of: {BY_IMAGE} or {BY_RECORD}")
        return split_by


def _require_mixture(data: DataConfig) -> None:
    """Raise ValueError for sources that cannot be drawn from together."""
    names = [source.name for source in data.sources]
    if len(set(names)) < len(names):
        raise ValueError(f"has two sources of one name: {', '.join(names)}")
    replayed = [source.name for source in data.sources if source.replay]
    if len(replayed) > 1 or len(replayed) == len(names):
        text = f"has {len(replayed)} sources with replay among {len(names)}: expected one, beside sources with images"
        raise ValueError(text)
    alone = [name for name in ("image_folder", "max_samples", "source_arguments") if getattr(data, name)]
    if alone:
        raise ValueError(f"has {alone[0]} next to sources: set it in each source")
    builtin = [source.uri for source in data.sources if source.uri.startswith("builtin:")]
    if builtin and data.split_by not in (BY_IMAGE, BY_RECORD):
        raise ValueError(f"is split by {data.split_by}, a field of records, which {builtin[0]} has none of")
    counted = [source.name for source in data.sources if source.samples is not None]
    if counted and data.train_share < 1:
        raise ValueError(
            f"has train_share {data.train_share:g} and a source with a number of samples an epoch, {counted[0]}: "
            "expected weights or epochs, or train_share 1"
        )
    weighted = [source.name for source in data.sources if source.weight is not None]
    drawn = [*weighted, *(s.name for s in data.sources if s.samples is not None or s.epochs is not None)]
    if data.phases and drawn:
        raise ValueError(
            f"has phases and a source with a weight or number of its own, {drawn[0]}: expected one of both"
        )
    if weighted and len(weighted) < len(names):
        without = next(name for name in names if name not in weighted)
        raise ValueError(f"has sources with weight, and {without} without: expected a weight for all of them or none")
    for phase in data.phases:
        _require_weights(phase.weights, names)
    if weighted and not any(source.weight for source in data.sources):
        raise ValueError("has weights that sum to nothing: expected at least one above 0")


def _require_weights(weights: dict[str, float], names: Sequence[str]) -> None:
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise ValueError(f"has a phase with a weight for {unknown[0]}: expected the sources {', '.join(names)}")
    if not any(weights.values()):
        raise ValueError("has a phase whose weights sum to nothing: expected at least one above 0")
