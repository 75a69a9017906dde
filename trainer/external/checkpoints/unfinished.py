"""Warnings about what looks like a checkpoint and stays unfinished, which a program that hangs or dies leaves."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

WARN_S = 60.0
_STEP = re.compile(r"(\d+)$")


class Unfinished:
    """Unfinished checkpoints by name. `warn` is told of each once, after `WARN_S` or at the program's end."""

    def __init__(self, warn: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._warn, self._clock = warn, clock
        self._since: dict[str, float] = {}
        self._why: dict[str, tuple[int, str]] = {}
        self._told: set[str] = set()

    def note(self, name: str, step: int, why: str) -> None:
        """Note why a checkpoint is not finished in this look; without its step, that is the number in its name."""
        match = _STEP.search(name)
        self._why[name] = (step or (int(match[1]) if match else 0), why)

    def tell(self, newest_step: int, *, ended: bool) -> None:
        """End a look. Older checkpoints than `newest_step`, of which a copy is committed, are not worth a word."""
        now = self._clock()
        self._since = {name: self._since.get(name, now) for name in self._why}
        for name, (step, why) in self._why.items():
            if step and step <= newest_step:
                continue
            if name not in self._told and (ended or now - self._since[name] >= WARN_S):
                self._told.add(name)
                self._warn(
                    f"{name} is not committed: {why}. Every process must take part in saving: DeepSpeed's "
                    "save_checkpoint and torch's dcp.save wait for those that do not"
                )
        self._why = {}
