"""What comes with published models: files beside weights and tokenizers, and image tokens. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from trainer.config.model import IMAGE_TOKEN, WeightsConfig
from trainer.storage.regular_files import read_regular

MAX_JSON_BYTES = 16 << 20


def image_token_in(tokenizer: Any, published: str) -> str:
    """The tokenizer's image token, found as transformers' processors find it. published: that of the family."""
    named = getattr(tokenizer, "image_token", None)
    is_known = tokenizer.backend_tokenizer.token_to_id(published) is not None
    return str(named) if named else published if is_known else IMAGE_TOKEN


def published_file(name: str, revision: str, file: str) -> str | None:
    """Path of a file of a folder or, fetched, of a hub repository; None where it has none."""
    from transformers.utils import cached_file

    path: str | None = cached_file(
        name,
        file,
        revision=revision or None,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path


def published_json(name: str, revision: str, file: str) -> dict[str, Any]:
    """A JSON file of a folder or a hub repository; {} where there is none."""
    path = published_file(name, revision, file)
    content = json.loads(read_regular(path, MAX_JSON_BYTES)) if path else {}
    return content if isinstance(content, dict) else {}


def stop_token_ids(part: WeightsConfig) -> list[int]:
    """The tokens at which a published model stops, beside its tokenizer's end token."""
    stated = published_json(part.weights, part.revision, "generation_config.json") if part.weights else {}
    stops = stated.get("eos_token_id")
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
