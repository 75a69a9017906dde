"""Rules of adapters on a base in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.trainer.config.job import JobSections
from vlmpipe.trainer.config.strategies import QUANTIZING
from vlmpipe.trainer.hooks.rules import FeatureRules


class QuantizedBaseRules(FeatureRules):
    def problems(self, job: JobSections) -> Iterator[tuple[str, str]]:
        train, lora = job.train, job.model.lora
        if train.strategy not in QUANTIZING:
            yield (
                "model.lora.quantize_base",
                f"found nf4 with train.strategy {train.strategy}, which cannot shard 4-bit weights; expected one of "
                f"{', '.join(QUANTIZING)}, such as train.strategy ddp: every rank holds the small base whole",
            )
        if train.compile == "on":
            text = "found on with model.lora.quantize_base, whose kernels torch.compile cannot trace; expected auto or "
            yield "train.compile", f"{text}off"
        if train.float8 != "none":
            text = f"found {train.float8} with model.lora.quantize_base, which is not compiled; expected none"
            yield "train.float8", text
        if lora and lora.pretrained:
            text = "found with quantize_base, which starts with new adapters; expected no adapter, or no quantize_base"
            yield "model.lora.pretrained", text


RULES = QuantizedBaseRules()
