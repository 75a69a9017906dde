"""Part `audit-scale`: memory and time in which the audit compares vectors of images, by their number."""

from __future__ import annotations

import resource
import time

import numpy as np

from benchmarks.scale.private_memory import PeakMemory, private_mib
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.audit.images.image_groups import candidates
from vlmpipe.trainer.audit.images.image_vectors import BITS, WIDTH, ImageVectors
from vlmpipe.trainer.audit.images.neighbours import as_directions

SIZES = (10_000, 100_000)
QUICK = 50  # times fewer images


def audit_scale(bench: Bench) -> None:
    """Drawn hashes and features, of which no two are near: each size in a process of its own."""
    for images in sorted({min(size, bench.size or size) // (QUICK if bench.quick else 1) for size in SIZES}):
        bench.at(f"{images:,} images")
        found = bench.call(f"{__name__}:compared", {"images": images})
        data = f"{images:,} images, {WIDTH} numbers each of hash and feature"
        for name, unit in (("vectors", "MiB"), ("comparing, beyond vectors", "MiB"), ("CPU time", "s"), ("time", "s")):
            bench.report.figure(name, data, unit, Side("audit", [found[name]]))
        pairs = Side("audit", [found["pairs"] / images])
        bench.report.figure("pairs of images that are opened", data, "pairs an image", pairs)


def compared(images: int) -> dict[str, float]:
    """Private MiB of the vectors and, at most, of the comparison; CPU and wall seconds; and the pairs to be opened."""
    draw, before = np.random.default_rng(0), private_mib()
    bits = (draw.integers(0, 2, (images, BITS), np.int8).astype(np.float32) * 2 - 1) / np.float32(np.sqrt(BITS))
    features = as_directions(draw.standard_normal((images, WIDTH), np.float32))
    vectors = ImageVectors(np.arange(images), bits, features, frozenset(), 0)
    held, peak = private_mib(), PeakMemory(0.05)
    cpu_s, wall_s = _cpu_s(), time.monotonic()
    pairs = len(candidates(vectors))
    seconds = {"CPU time": _cpu_s() - cpu_s, "time": time.monotonic() - wall_s}
    return {"vectors": held - before, "comparing, beyond vectors": peak.stop() - held, "pairs": pairs, **seconds}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
