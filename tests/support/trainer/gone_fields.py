"""Records of runs that an earlier version made, with the fields that are gone since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpipe.trainer.config.job import ANY_VALUE, GONE


def with_gone(content: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run file as that version wrote it, whose gone fields did nothing."""
    fields = {
        section: {name: 1.0 if value is ANY_VALUE else value for name, value in gone.items()}
        for section, gone in GONE.items()
    }
    return {**content, **{section: {**content.get(section, {}), **gone} for section, gone in fields.items()}}
