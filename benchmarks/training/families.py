"""Part `families`: any model of transformers through its own forward pass (`hf`) beside the family by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.support.suite import Bench
from benchmarks.support.timing import close
from benchmarks.support.workloads import Workload, job_with_data
from benchmarks.training.ready_steps import WARM_UP, SteadySteps, packed_steps
from benchmarks.training.workloads import TOLERANCE
from tests.support.hf import kinds
from tests.support.hf.publish import publish

MODEL_TYPE = "qwen2_5_vl"
WIDER: dict[str, dict[str, Any]] = {
    "text": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    },
    "vision": {
        "hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 256, "depth": 4, "num_heads": 4,
        "patch_size": 8, "window_size": 64, "fullatt_block_indexes": [1, 3],
    },
}  # fmt: skip
PIXELS = 128 * 128
SIZE = {"shortest_edge": PIXELS, "longest_edge": PIXELS}


def families(bench: Bench) -> None:
    """The same model, weights and packed sequences on both sides."""
    folder = _published(bench.scratch / MODEL_TYPE)
    section = {"pretrained": {"weights": str(folder)}, "tokenizer": str(folder), "freeze": []}
    by_hand = section | {"family": MODEL_TYPE, "min_pixels": PIXELS, "max_pixels": PIXELS}
    models = {"hf": section | {"family": "hf", "image_processor": {"size": SIZE}}, "by hand": by_hand}
    sides = {}
    for name, model in models.items():
        load = _load(bench, name, (f"model={json.dumps(model)}", "data.max_samples=200"))
        sides[name] = SteadySteps(load.online, bench.worker, packed_steps(load, _steps(bench), cached=False))
    found = bench.take_turns(MODEL_TYPE, sides, warm_up=False)
    law = f"family hf gives the losses of the family by hand before the rounds repeat (relative {TOLERANCE:g})"
    first = {name: side.losses[: _steps(bench)] for name, side in sides.items()}  # later, rounding has grown
    bench.report.require(close(first["hf"], first["by hand"], TOLERANCE), law, found=MODEL_TYPE)
    bench.report.compare_rates("step: any model or by hand", MODEL_TYPE, "useful tokens", *found.items())


def _load(bench: Bench, name: str, overrides: tuple[str, ...]) -> Workload:
    bench.at(f"data of {name}")
    job = job_with_data("digits", bench.scratch / name.replace(" ", "-"), "off", ("features.cache=off", *overrides))
    return Workload(name, "digits", job, job)


def _steps(bench: Bench) -> int:
    return WARM_UP + (2 if bench.quick else 5)


def _published(folder: Path) -> Path:
    """With layers so wide that products take most of a step."""
    kind = kinds.KINDS[MODEL_TYPE]
    images = kind.images | {"patch_size": WIDER["vision"]["patch_size"], "size": SIZE}
    wider = dataclasses.replace(
        kind, text=kind.text | WIDER["text"], vision=kind.vision | WIDER["vision"], images=images
    )
    with mock.patch.dict(kinds.KINDS, {MODEL_TYPE: wider}):
        return publish(MODEL_TYPE, folder)
