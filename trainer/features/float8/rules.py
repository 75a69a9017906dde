"""Rules of products of 8-bit floats."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.trainer.config.job import JobSections
from vlmpipe.trainer.hooks.rules import FeatureRules


class Float8Rules(FeatureRules):
    def problems(self, job: JobSections) -> Iterator[tuple[str, str]]:
        if job.model.lora and job.model.lora.use_dora:
            text = f"found {job.train.float8} with model.lora.use_dora, which measures the weights; expected none"
            yield "train.float8", text

    def warnings(self, job: JobSections, *, has_gpus: bool) -> Iterator[tuple[str, str]]:
        if not has_gpus:
            yield "train.float8", "is emulated without GPUs: slower than bf16, for tests"


RULES = Float8Rules()
