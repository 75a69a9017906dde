"""Where the start model's answers are kept: a folder named by weights, images, questions and settings.

A run that resumes, a run of the same data, and a scheduled one whose data has not changed find them there.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.chat.run_chat import format_identity
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.fetching.folder import with_fetched_folder
from vlmpipe.trainer.data.replay.start_data import StartData
from vlmpipe.trainer.data.sources.base import Source
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.image_tokens import image_rule
from vlmpipe.trainer.records.replay import ReplayPointer
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage, join_uri
from vlmpipe.trainer.storage.model_folders import bucket_address, local_folder, revision_of

VERSION = 1  # raise it when the same settings give other questions or answers
FOLDER = "replay"  # under the root of all runs
POINTERS = "of"  # in it: pointers by sections of the run file
MAX_PROMPTS_BYTES = 1 << 20
# Settings of the section data that decide which images are for training, and how they are shown and asked about.
DECIDING = {
    "validation_fraction", "split_by", "file_splits", "max_image_share", "columns", "fetch", "chat_template",
    "answer_end", "allowed_tokens", "max_image_pixels", "max_image_bytes", "max_media_bytes", "min_image_side",
    "max_image_aspect", "animated", "grey_bits", "video", "video_frames", "video_fps", "video_times",
}  # fmt: skip
# Settings of the section model that only training has.
ONLY_TRAINED = {"freeze", "train_parameters", "lora", "pretrained", "tower", "projector", "language_model"}


def with_located_data(config: JobConfig) -> JobConfig:
    """The run with the folders that its sources read and that are not in the run file: of fetched images, and of the
    start model's answers where there are some."""
    config = with_fetched_folder(config)
    if config.data.replay is None:
        return config
    pointer = ReplayPointer.read_if_there(open_storage(config.run.run_uri))
    pointer = pointer or ReplayPointer.read_if_there(_shared_pointer(config))
    data = config.data.replaying_from(pointer.folder) if pointer else config.data
    return config.model_copy(update={"data": data})


def point_to(config: JobConfig, pointer: ReplayPointer) -> None:
    """Make the run, and later ones with its sections data and model, read the answers that `pointer` names."""
    pointer.write(open_storage(config.run.run_uri))
    pointer.write(_shared_pointer(config))


def folder_of(config: JobConfig, others: Source, prompts: tuple[str, ...], about: StartData) -> str:
    """The folder of these answers.

    Args:
        others: the sources with an address, opened.
        about: the start model's own training data, where its questions are asked.
    """
    source, model = config.data.replay, config.model
    assert source
    settings = {
        "version": VERSION,
        "others": others.fingerprint(),
        "of_sources": [source.model_dump(mode="json", include={"name", "columns"}) for source in config.data.sources],
        "data": config.data.model_dump(mode="json", include=DECIDING),
        "exclude": read_exclusions(config.data.exclude).digest,
        "format": format_identity(model, config.data),
        "image_tokens": image_rule(model),
        "model": model.model_dump(mode="json", exclude=ONLY_TRAINED),
        "start": {name: part and _identity(part) for name, part in model.sources.items()},
        "adapter": _identity_of(model.lora.pretrained, "") if model.lora and model.lora.pretrained else "",
        "tokenizer": _identity(model.tokenizer_source),
        "precision": config.train.precision,
        **({"about": about.fingerprint} if about.uri else {}),
        "asked": [source.replay, source.replay_images, prompts, source.replay_max_new_tokens, source.replay_seed],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    return join_uri(config.run.root_uri, FOLDER, digest)


def prompts_of(data: DataConfig) -> tuple[str, ...]:
    """The questions for the start model. Raises ConfigError for a file that has none."""
    assert data.replay
    prompts = data.replay.replay_prompts
    if not isinstance(prompts, str):
        return prompts
    folder, _, name = prompts.rpartition("/")
    storage = open_storage(folder or ("/" if prompts.startswith("/") else "."))
    text = storage.read(name, MAX_PROMPTS_BYTES).decode("utf-8", "replace") if storage.stat(name) else ""
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines or "<image>" in text:
        raise ConfigError(
            f"replay_prompts {prompts!r} " + ("has <image>" if lines else "has no questions, or is no file"),
            expected="a text file with one question a line; the image's mark is added",
        )
    return lines


def _shared_pointer(config: JobConfig) -> Storage:
    sections = config.model_dump(mode="json", include={"data", "model"})
    digest = hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:32]
    return open_storage(join_uri(config.run.root_uri, FOLDER, POINTERS, digest))


def _identity(part: WeightsConfig) -> object:
    return _identity_of(part.weights, part.revision) if part.weights else part.config


def _identity_of(weights: str, revision: str) -> object:
    """Identity of weights: their revision, which those in a bucket have, or the files of a folder on this machine."""
    if revision:
        return [weights, revision]
    if address := bucket_address(weights):  # a copy on this machine has its own times
        return [weights, revision_of(address)]
    folder = local_folder(weights, weights=False)
    return [weights, _files_of(folder) if folder else []]


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    stats = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
