"""Part `hf-threads`: images of family hf, which the library's processor prepares, in two threads beside one."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data.preparing import COUNT, MAX_PIXELS, SIDES, counted, photographs
from benchmarks.support.suite import Bench
from tests.support.hf.publish import publish
from vlmpipe.trainer.config.model import WeightsConfig
from vlmpipe.trainer.models.hf.processor import published_images
from vlmpipe.trainer.models.image_processor import published_inputs

PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}, "patch_size": 14, "merge_size": 2},
    "gemma3": {"size": {"height": 896, "width": 896}},
}


def hf_threads(bench: Bench) -> None:
    """By CPU time, which a second thread must not raise, and by wall time."""
    sides, kinds = (SIDES[:1], ["gemma3"]) if bench.quick else (SIDES, list(PROCESSORS))
    bench.expect(len(sides) * len(kinds))
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        for kind in kinds:
            weights = WeightsConfig(weights=str(publish(kind, Path(scratch, kind))))
            prepare = functools.partial(published_inputs, published_images(weights, PROCESSORS[kind]))
            for side in sides:
                data, found = f"{side} x {side} JPEG", photographs(side, 2 if bench.quick else COUNT)
                works = {name: counted(prepare, found, threads=threads) for name, threads in (("one", 1), ("two", 2))}
                times = bench.take_timed_turns(f"{kind}, {data}", works)
                two, one = ("two threads", times["two"]), ("one thread", times["one"])
                bench.report.compare_rates(f"family hf: images of {kind}", data, "images", two, one)
