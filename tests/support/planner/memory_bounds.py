"""How far a plan's memory may be from what was measured."""

from __future__ import annotations

COUNTED = 0.02  # largest error of a part that can be counted, relative


PEAK = 0.035  # and of the fullest moment of a step, in which gloo's thread may hold what it has sent a moment longer
