"""Rules of training on pairs of a preferred and a rejected answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from vlmpipe.trainer.config.job import JobSections
from vlmpipe.trainer.hooks.rules import FeatureRules, Use


class PreferenceRules(FeatureRules):
    obstacles: ClassVar[Mapping[Use, str]] = {
        "quantized_export": "train.objective dpo or simpo; expected sft, or null here",
        "replay": "found self with train.objective dpo or simpo, which needs rejected answers; expected sft",
    }

    def problems(self, job: JobSections) -> Iterator[tuple[str, str]]:
        if job.data.turns == "independent":
            text = f"found independent with train.objective {job.train.objective}, whose pairs end a conversation"
            yield "data.turns", f"{text}; expected conversation, or sft"

    def warnings(self, job: JobSections, *, has_gpus: bool) -> Iterator[tuple[str, str]]:
        if job.data.slices:
            text = f"compares generated answers, not the preferences of {job.train.objective}: preference_accuracy has "
            yield "data.slices", f"{text}no slices"


RULES = PreferenceRules()
