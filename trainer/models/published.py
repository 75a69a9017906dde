"""What comes with published models: files beside weights and tokenizers, and image tokens. Imports no torch."""

from __future__ import annotations

from typing import Any

from trainer.config.model import IMAGE_TOKEN


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
