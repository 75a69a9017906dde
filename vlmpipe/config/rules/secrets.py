"""Secrets that a run file holds in plain text."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.secret_detection import known_form


def secret_problems(value: object, path: str = "") -> Iterator[Problem]:
    """Values of a well-known secret's form, in any field. The value is not repeated."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from secret_problems(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str) and (form := _form(value)):
        text = f"holds a secret ({form}), and everybody who may see the pipeline can read it; keep it in Secret Manager"
        yield Problem(path, text)


# Stages and variants of a run file share most texts, each of which is looked through for some 200 keywords.
_form = functools.lru_cache(maxsize=4096)(known_form)
