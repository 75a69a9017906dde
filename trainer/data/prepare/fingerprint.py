"""The name of prepared data, derived from all that decides its bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vlmpipe.trainer.config.data import OWN_FORMAT, DataConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.run_chat import format_identity
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.prefixes.sharing import stores_prefixes
from vlmpipe.trainer.data.replay.place import with_located_data
from vlmpipe.trainer.data.shards.prepared_files import DONE
from vlmpipe.trainer.data.sources import Source, open_source
from vlmpipe.trainer.data.tokenize import LARGEST_TOKENIZER_BYTES
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import image_rule
from vlmpipe.trainer.models.published import stop_token_ids
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.model_folders import local_folder
from vlmpipe.trainer.storage.regular_files import read_regular

SAMPLES_VERSION = 13  # raise it when the same input gives other samples; of their files, `prepared_files.FORMAT`
# Settings that do not change the prepared bytes, and the source, whose own fingerprint covers its content.
NOT_IN_FINGERPRINT = {
    "source", "source_arguments", "sources", "stopping_strategy", "phases", "max_source_passes", "image_folder",
    "exclude", "pack", "shuffle_shards", "shard_cache_gib", "shard_reading", "train_share",
    "workers", "loader_threads", "tasks", "max_fetched_images", "max_fetched_gib", "max_fetch_hours",
    "share_prefix", "max_questions_per_image",
}  # fmt: skip
# Weights, and texts for people, beside a tokenizer.
NOT_TOKENIZER = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".md", ".png", ".jpg"}
# Fields that came later: at their defaults they leave the fingerprints of data prepared before as they were.
LATER_FIELDS = {
    "allowed_tokens", "columns", "slices", "fetch", "grey_bits", "file_splits", "max_image_share",
    "max_split_error", "max_media_bytes", "video", "video_frames", "video_fps", "video_times", "turns",
}  # fmt: skip


def fingerprint(config: JobConfig) -> str:
    """Name of this run's prepared data, 32 hexadecimal digits, derived from all that decides its bytes."""
    config = with_located_data(config)
    return fingerprint_of(config, open_source(config.data))


def find_prepared(config: JobConfig) -> str:
    """The run's prepared data. Raises UserError (66) where there is none."""
    uri = join_uri(config.run.prepared_root, fingerprint(config))
    if open_storage(uri).stat(DONE) is None:
        raise UserError(
            f"this data is not prepared yet: there is none in {uri}",
            expected="prepared data, which also has the tokenizer where one is trained on the texts",
            fix="run the run file once; vlmpipe data inspect RUN_FILE --prepare makes the data alone",
            code=ExitCode.NOT_FOUND,
        )
    return uri


def fingerprint_of(config: JobConfig, source: Source) -> str:
    published = config.model.tokenizer_source
    tokenizer = local_folder(published.weights, published.revision, weights=False)
    files = sorted(filter(_decides_tokens, tokenizer.iterdir())) if tokenizer else []
    own_format = config.data.chat_format(config.model) == OWN_FORMAT  # which ends with the tokenizer's own token
    settings = {
        "format": SAMPLES_VERSION,
        "source": source.fingerprint(),
        "data": config.data.model_dump(exclude=NOT_IN_FINGERPRINT | (LATER_FIELDS - changed_fields(config.data))),
        "tokenizer": config.model.tokenizer,
        **({"tokenizer_revision": published.revision} if published.revision else {}),
        "chat_template": format_identity(config.model, config.data),
        "stop_tokens": [] if own_format else stop_token_ids(config.model.pretrained or config.model.language_model),
        "tokenizer_files": [hashlib.sha256(read_regular(path, LARGEST_TOKENIZER_BYTES)).hexdigest() for path in files],
        "image_tokens": image_rule(config.model),
        **({"pairs": True} if config.train.in_pairs else {}),
        **({"prefixes": True} if stores_prefixes(config) else {}),
        **({"exclude": excluded} if (excluded := read_exclusions(config.data.exclude).digest) else {}),
        **({"caption_questions": questions} if (questions := _caption_questions(config)) else {}),
        **({"source_columns": columns} if (columns := _columns(config)) else {}),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _decides_tokens(path: Path) -> bool:
    """Return whether a file of a tokenizer's folder may decide tokens: all but weights and texts for people."""
    return path.is_file() and path.suffix.lower() not in NOT_TOKENIZER


def _caption_questions(config: JobConfig) -> dict[str, str]:
    """By source, where it has its own: it is written into each of the source's conversations."""
    return {
        str(source.name): source.caption_question for source in config.data.sources or () if source.caption_question
    }


def _columns(config: JobConfig) -> dict[str, dict[str, Any]]:
    """By source, where it has its own: what is read under which name."""
    named = {str(source.name): source.columns.model_dump(exclude_defaults=True) for source in config.data.sources}
    return {name: columns for name, columns in named.items() if columns}


def changed_fields(data: DataConfig) -> set[str]:
    """Names of the fields that are not at their defaults."""
    return {name for name, field in DataConfig.model_fields.items() if getattr(data, name) != field.default}
