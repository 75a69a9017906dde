"""Warnings about folders like checkpoints that are unfinished and change no more: its program hangs or has died."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

WARN_S = 60.0
_STEP = re.compile(r"(\d+)$")


class Unfinished:
    """Unfinished checkpoints by name. `warn` is told of each once, `WARN_S` after its last change or at the program's
    end. A large one is written for minutes."""

    def __init__(self, warn: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._warn, self._clock = warn, clock
        self._since: dict[str, tuple[float, object]] = {}
        self._why: dict[str, tuple[int, str, object]] = {}
        self._told: set[str] = set()

    def note(self, name: str, step: int, why: str, content: object = None) -> None:
        """Note why a checkpoint is not finished in this look.

        Args:
            step: 0 takes the number in its name.
            content: what changes while it is written.
        """
        match = _STEP.search(name)
        self._why[name] = (step or (int(match[1]) if match else 0), why, content)

    def tell(self, newest_step: int, *, ended: bool) -> None:
        """End a look. Older checkpoints than `newest_step`, of which a copy is committed, are not worth a word."""
        now = self._clock()
        before, self._since = self._since, {}
        for name, (_, _, content) in self._why.items():
            is_same = name in before and before[name][1] == content
            self._since[name] = before[name] if is_same else (now, content)
        for name, (step, why, _) in self._why.items():
            if step and step <= newest_step:
                continue
            if name not in self._told and (ended or now - self._since[name][0] >= WARN_S):
                self._told.add(name)
                self._warn(
                    f"{name} is not committed: {why}. Every process must take part in saving: DeepSpeed's "
                    "save_checkpoint and torch's dcp.save wait for those that do not"
                )
        self._why = {}
