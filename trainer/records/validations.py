"""The best validated step of a run so far, the validations since then, and its checkpoint.

A checkpoint's COMMIT holds it, so that a run that is resumed decides as one that nothing happened to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HIGHER_IS_BETTER = frozenset({"validation_exact_match"})


@dataclass(frozen=True)
class Validations:
    """Validations of one metric on the same label tokens. A value that is not finite is never better."""

    metric: str  # in metrics.jsonl
    label_tokens: int
    step: int = 0  # of the newest one
    best: float | None = None
    best_step: int = 0
    reference: float | None = None  # the last value that was better than the one before it by enough
    reference_step: int = 0
    waited: int = 0  # validations since then
    saved: str = ""  # the best of the committed checkpoints whose step was validated
    saved_value: float | None = None
    pending: tuple[tuple[int, float], ...] = ()  # validated steps whose COMMIT is not known yet, with their values

    def counted(self, step: int, value: float, *, min_improvement: float = 0.0) -> Validations:
        """Return these and the validation after `step`, unless it is counted already."""
        if step <= self.step:
            return self
        if not math.isfinite(value):
            return replace(self, step=step, waited=self.waited + 1)
        state = replace(self, step=step, pending=(*self.pending, (step, value)))
        if self.best is None or self._gain(value, self.best) > 0:
            state = replace(state, best=value, best_step=step)
        if self.reference is None or self._gain(value, self.reference) > min_improvement:
            return replace(state, reference=value, reference_step=step, waited=0)
        return replace(state, waited=self.waited + 1)

    def committed(self, name: str, step: int) -> Validations:
        """Return these once checkpoint `name`, saved after `step`, is known to be the newest committed one."""
        value = dict(self.pending).get(step)
        state = replace(self, pending=tuple(pair for pair in self.pending if pair[0] > step))
        if value is not None and (self.saved_value is None or self._gain(value, self.saved_value) > 0):
            return replace(state, saved=name, saved_value=value)
        return state

    def of_same(self, metric: str, label_tokens: int) -> bool:
        """Return whether values of this metric on `label_tokens` label tokens compare with these."""
        return (self.metric, self.label_tokens) == (metric, label_tokens)

    def _gain(self, value: float, before: float) -> float:
        """By how much a value is better than one before it."""
        return value - before if self.metric in HIGHER_IS_BETTER else before - value
