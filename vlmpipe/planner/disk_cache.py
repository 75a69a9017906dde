"""Disk cache of model analyses that need torch and transformers, whose import takes longer than the rest of a plan.

A result is a pure function of the model's configuration, the arguments and the code. All three are in its file name, so
it is never out of date.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

import vlmpipe.trainer
from vlmpipe import planner
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.models.grid_images import MAX_CONFIG_BYTES
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.model_folders import CONFIG, local_folder
from vlmpipe.trainer.storage.regular_files import read_regular
from vlmpipe.trainer.storage.user_folders import cache_of_user, expanded

P = ParamSpec("P")
R = TypeVar("R")

FOLDER = "planner"  # under VLMPIPE_CACHE_DIR, else under the user's own cache
LIBRARIES = ("torch", "transformers", "peft")
LONGEST_CAUSE_CHARS = 400
OTHER_CODE_KEPT_S = 30 * 24 * 3600.0  # the answers of other versions, since the last new one


def disk_cached(find: Callable[Concatenate[str, P], R]) -> Callable[Concatenate[str, P], R]:
    """Cache a pure function of (the model section as JSON, ...) in memory and on disk.

    pydantic must be able to serialize the return type, and the `repr` of arguments must identify them. A damaged file
    is written again. What `find` raises becomes a ConfigError: the model could not be built or run.
    """

    @functools.cache
    @functools.wraps(find)
    def answer(model: str, *args: P.args, **kwargs: P.kwargs) -> R:
        configurations = _configurations(model)
        store = _store()
        if configurations is None or store is None:
            return _analysed(find, model, *args, **kwargs)
        asked = (find.__module__, find.__qualname__, model, configurations, args, sorted(kwargs.items()))
        name = f"{hashlib.sha256(repr(asked).encode()).hexdigest()}.json"
        form: TypeAdapter[R] = TypeAdapter(get_type_hints(find)["return"])
        if store.stat(name):
            with contextlib.suppress(ValidationError):
                return form.validate_json(store.read(name))
        answered = _analysed(find, model, *args, **kwargs)
        with contextlib.suppress(UserError):  # a full or read-only disk only makes the next plan slower
            store.write(name, form.dump_json(answered))
        return answered

    return answer  # type: ignore[return-value]


def _analysed(find: Callable[Concatenate[str, P], R], model: str, *args: P.args, **kwargs: P.kwargs) -> R:
    try:
        with collector_off():
            return find(model, *args, **kwargs)
    except UserError:
        raise
    except Exception as error:  # whatever torch and transformers raise where a configuration makes no model
        cause = " ".join(str(error).split())[:LONGEST_CAUSE_CHARS]
        raise ConfigError(
            f"no model can be built and run from this model section: {type(error).__name__}: {cause}",
            expected="configurations and weights of which transformers makes a model that takes images and text",
            fix="correct model.tower, model.language_model or model.pretrained",
        ) from error


def _store() -> Storage | None:
    """The folder of results of this code; None if it cannot be created."""
    try:
        chosen = os.environ.get("VLMPIPE_CACHE_DIR")
        folder = expanded(chosen) if chosen else cache_of_user()
        if folder is None:
            return None
        root = folder / FOLDER
        of_code = root / _code()
        if not of_code.is_dir():
            of_code.mkdir(parents=True)
            for other in root.iterdir():
                if other.stat().st_mtime < time.time() - OTHER_CODE_KEPT_S:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError:
        return None
    return LocalStorage(of_code)


def _configurations(model: str) -> str | None:
    """A digest of the configuration files of the model section; None if they are not on this machine yet, or if an
    adapter is started from, whose weights count too."""
    section = ModelConfig.model_validate_json(model)
    if section.lora and section.lora.pretrained:
        return None
    digest = hashlib.sha256()
    for part in section.sources.values():
        if part and part.weights:
            folder = _folder(part)
            if folder is None:
                return None
            for file in sorted(folder.glob("*config*.json")):
                content = read_regular(file, MAX_CONFIG_BYTES)
                digest.update(f"{len(file.name)} {file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _folder(part: WeightsConfig) -> Path | None:
    local = local_folder(part.weights, part.revision, weights=False)
    if local:  # without config.json the model is defined elsewhere, where a change would go unnoticed
        return local if (local / CONFIG).is_file() else None
    return hub_cache_folder(part)


def hub_cache_folder(part: WeightsConfig) -> Path | None:
    """The folder of a hub id's configuration in the Hugging Face cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(part.weights, "config.json", revision=part.revision or None)
    return Path(cached).parent if isinstance(cached, str) else None


@functools.cache
def _code() -> str:
    """A digest of the code: ours by its text, libraries by their versions."""
    digest = hashlib.sha256(json.dumps([importlib.metadata.version(name) for name in LIBRARIES]).encode())
    for package in (vlmpipe.trainer, planner):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            digest.update(json.dumps([str(file.relative_to(root)), file.read_text(encoding="utf-8")]).encode())
    return digest.hexdigest()
