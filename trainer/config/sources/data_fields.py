"""Fields of the run file's `data` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlmpipe.trainer.config.base import Fraction, NonNegative, OfFeature, Positive, Section, StorageUri
from vlmpipe.trainer.config.sources.data_source import Columns, DataSource, SourceUri

BY_IMAGE, BY_RECORD = "image", "record"  # values of data.split_by; every other one is the name of a field
AUTO_QUESTIONS = 4  # about an image in a packed sequence: docs/decisions/0248
SHUFFLE_SHARDS = 64  # 64,000 samples at the default size of shards


class DataPhase(Section):
    """Consecutive epochs of a curriculum."""

    epochs: Positive = Field(1, description="Epochs of the phase. The last phase lasts to the end of the run.")
    weights: dict[str, NonNegative] = Field(
        description="Weight of each source by name; a source without one is not drawn."
    )


class DataFields(Section):
    """Where samples come from, and how they become packed sequences."""

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
