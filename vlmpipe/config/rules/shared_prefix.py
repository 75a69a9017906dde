"""Rules of samples that share the prefix of their images (`data.share_prefix`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmpipe.config.validation_errors import Problem
from vlmpipe.trainer.data.prefixes.sharing import MEASURED, obstacles

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields


def shared_prefix_problems(config: RunFields) -> Iterator[Problem]:
    """Yield the settings with which samples cannot share a prefix."""
    for obstacle in obstacles(config) if config.data.share_prefix == "on" else ():
        text = f"found on with {obstacle.found}; expected {obstacle.expected}. With off, {MEASURED}"
        yield Problem("data.share_prefix", text)
