"""Models and adapters that vLLM opens, from `vllm.yaml`: read in its source, or tried."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.trainer.config.weights.origin import ModelPart

FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Vllm:
    """A version of vLLM. `date` is ISO 8601."""

    version: str
    transformers: str  # that it was tried with
    date: str
    source: str
    lora_ranks: tuple[int, ...]
    min_bf16_capability: float
    llava_towers: tuple[str, ...]  # model types
    pads_vision_heads: tuple[str, ...]  # model types whose vision encoder any number of GPUs can share
    tried_adapters: tuple[str, ...]  # model types
    adapters: Mapping[str, tuple[ModelPart, ...] | None]

    @property
    def name(self) -> str:
        return f"vLLM {self.version}"

    def max_lora_rank(self, rank: int) -> int | None:
        """The smallest --max-lora-rank that is enough; None if there is none."""
        return next((value for value in self.lora_ranks if value >= rank), None)

    def takes(self, model_type: str) -> str:
        """Support for models of this type: native; other, the implementation of transformers; or unknown."""
        if model_type not in self.adapters:
            return "unknown"
        return "other" if self.adapters[model_type] is None else "native"


@functools.cache
def load_vllm() -> Vllm:
    content: dict[str, object] = packaged_yaml(FILE.read_text(encoding="utf-8"))
    return TypeAdapter(Vllm).validate_python(content | {"date": str(content["date"])})
