"""What tests of the planner's time and cost share: published models' sizes, GPUs, machines and round prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.support.trainer.runs import merged
from vlmpipe.catalog.machines import Machine, load_catalog
from vlmpipe.catalog.price_schema import Price, RequestPrices
from vlmpipe.catalog.prices import MonthlyQuote, Quote
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.trainer.sizing.model_shape import ModelShape, Stack

CLIP_L_336 = Stack(24, 1024, 16, 16, 64, 4096, False, 12_596_224)
VICUNA_7B = Stack(32, 4096, 32, 32, 128, 11008, True, 202_383_360)
LLAMA_8B = Stack(32, 4096, 32, 8, 128, 14336, True, 218_112_000)

LLAVA_7B = ModelShape(
    tower=CLIP_L_336,
    tower_tokens=577,
    image_tokens=576,
    feature_width=1024,
    patch_pixels=3 * 14 * 14,
    language=VICUNA_7B,
    vocabulary=32_000,
    tied_head=False,
    parameters={
        "tower": 303_507_456,
        "projector": 20_979_712,
        "embedding": 131_072_000,
        "language_layers": 6_476_271_616,
        "adapters": 0,
        "tower_adapters": 0,
        "projector_adapters": 0,
        "head": 131_072_000,
    },
    frozen=frozenset({"tower"}),
)
TEXT_8B = replace(  # Llama 3.1 8B: the tower is there, but its sequences have no images
    LLAVA_7B,
    language=LLAMA_8B,
    vocabulary=128_256,
    parameters=LLAVA_7B.parameters
    | {"projector": 0, "embedding": 525_336_576, "language_layers": 32 * 218_112_000 + 4096, "head": 525_336_576},
)

# The catalogue's entries with the figures that tests reckon with pinned.
_CATALOG = load_catalog()
A100_80 = replace(_CATALOG.gpus["NVIDIA_A100_80GB"], bf16_tflops=312, fp32_tflops=19.5, memory_gbytes_per_s=2039)
H100 = replace(_CATALOG.gpus["NVIDIA_H100_80GB"], bf16_tflops=989.4, fp32_tflops=66.9, memory_gbytes_per_s=3350)
T4 = replace(_CATALOG.gpus["NVIDIA_TESLA_T4"], bf16_tflops=None, fp32_tflops=8.1, memory_gbytes_per_s=320)


def machine(machine_type: str = "a2-ultragpu-8g", nic_gbps: float = 100, **more: Any) -> Machine:
    return replace(_CATALOG.machines["a2-ultragpu-8g"], machine_type=machine_type, nic_gbps=nic_gbps, **more)


RUN: dict[str, Any] = {
    "name": "planned",
    "model": {
        "tower": {"weights": "openai/clip-vit-large-patch14-336"},
        "language_model": {"weights": "lmsys/vicuna-7b-v1.5"},
        "tokenizer": "lmsys/vicuna-7b-v1.5",
        "feature_layer": -2,
        "feature_select": "drop_cls",
        "image_size": 336,
    },
    "data": {"source": "gs://bucket/data.json", "sequence_length": 4096, "max_images_per_sequence": 7},
    "features": {"cache": "off"},
    "train": {
        "strategy": "zero2",
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "optimizer": {"learning_rate": 2e-5},
        "activation_checkpointing": "full",
        "compile": "off",  # as the published runs that estimates are compared with
    },
    "evaluate": {"max_samples": 1000},
    "cluster": {
        "machine_type": "a2-ultragpu-8g",
        "accelerator_type": "NVIDIA_A100_80GB",
        "accelerator_count": 8,
    },
    "plan": {"samples": 665_000, "sample_tokens": 740, "sample_images": 0.94},
}


def run_config(**changes: Any) -> RunConfig:
    """RUN with dotted keys replaced; `__` stands for a dot."""
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return parse_run_config(merged(RUN, dotted), "test")


@dataclass(frozen=True)
class RoundPrices:
    """Prices that make sums easy: a node costs 40 dollars an hour on demand. `unknown` machines have none."""

    node: float = 40.0
    reducer: float = 0.5
    disk: float = 0.17
    store: float = 0.02
    unknown: frozenset[str] = frozenset()
    is_old: bool = False

    def machine(
        self, machine_type: str, accelerator_type: str, accelerator_count: int, region: str, term: str
    ) -> Quote:
        if machine_type in self.unknown:
            return Quote(None, None, (f"{machine_type} in {region}",), ())
        share = {"standard": 1.0, "spot": 0.4, "flex_start": 0.6}[term]
        return Quote(
            share * (self.node if accelerator_count else self.reducer), "2026-11-01", (), self._old(machine_type)
        )

    def _old(self, name: str) -> tuple[str, ...]:
        return (f"{name} (2026-01-01)",) if self.is_old else ()

    def boot_disk(self, boot_disk_type: str, region: str) -> MonthlyQuote:
        return MonthlyQuote(self.disk, "2026-11-01", (), ())

    def instance(self, cpu: int, memory_gib: int, accelerator_type: str, region: str, *, in_zones: bool) -> Quote:
        return Quote(2.0, "2026-11-01", (), ())

    def storage(self, region: str) -> MonthlyQuote:
        return MonthlyQuote(self.store, "2026-11-01", (), ())

    def requests(self, uri: str) -> RequestPrices | None:
        class_a, class_b = (Price(usd, "2026-11-01", "test") for usd in (0.005, 0.0004))
        return RequestPrices(class_a, class_b)
