"""Files beside pretrained weights or tokenizers, on the hub or in a folder. Imports no torch."""

from __future__ import annotations


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
