"""Part `audit-scale`: memory, time and copies found when the audit compares vectors of images, by their number.

Exact and by the index of the extra, on the same drawn vectors, and on the hashes of images of the shipped sets.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.data.copies.planted_faults import ASKED, plant
from benchmarks.scale.private_memory import PeakMemory, private_mib
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.audit.images import search
from vlmpipe.trainer.audit.images.image_groups import CANDIDATES, candidates
from vlmpipe.trainer.audit.images.image_vectors import BITS, WIDTH, ImageVectors
from vlmpipe.trainer.audit.images.neighbours import as_directions, nearest
from vlmpipe.trainer.audit.images.search import nearly_nearest
from vlmpipe.trainer.data.near_duplicates.search import as_signatures
from vlmpipe.trainer.data.near_duplicates.signature import HASH_BYTES, SIGNATURE_BYTES, image_signature

SIZES = (10_000, 100_000)
QUICK = 50  # times fewer images
COPIED, FLIPPED, NOISE = 0.03, 0.08, 0.15  # of images; of bits of their hashes; of features, next to a spread of 1
RANK = 32  # of the drawn features: those of images fill few of their dimensions
MIN_RECALL = 0.95  # of exact pairs of hashes of images


def audit_scale(bench: Bench) -> None:
    """Drawn hashes and features, each size and search in a process of its own; then hashes of images."""
    sizes = sorted({min(size, bench.size or size) // (QUICK if bench.quick else 1) for size in SIZES})
    bench.expect(2 * len(sizes) + 1)
    for images in sizes:
        for by_index in (False, True):
            label = "index" if by_index else "exact"
            bench.at(f"{images:,} images, {label}")
            measured = bench.call(f"{__name__}:compared", {"images": images, "by_index": by_index})
            data = f"{images:,} images, {WIDTH} numbers each of hash and feature"
            for name, unit in UNITS.items():
                bench.report.figure(name, data, unit, Side(label, [measured[name]]))
    bench.at("images of shipped sets")
    _report_images(bench, 100 if bench.quick else 10_000)


UNITS = {
    "vectors": "MiB",
    "comparing, beyond vectors": "MiB",
    "CPU time": "s",
    "time": "s",
    "pairs that are opened": "pairs an image",
    "copies among the pairs": "share",
}


def compared(images: int, by_index: bool) -> dict[str, float]:
    """Private MiB of the vectors and, at most, of the comparison; CPU and wall seconds; pairs, and copies in them."""
    before = private_mib()
    vectors, copies = _drawn(images)
    if by_index:
        search.MAX_EXACT = 0
    held, peak = private_mib(), PeakMemory(0.05)
    cpu_s, wall_s = _cpu_s(), time.monotonic()
    pairs = candidates(vectors)
    seconds = {"CPU time": _cpu_s() - cpu_s, "time": time.monotonic() - wall_s}
    memory = {"vectors": held - before, "comparing, beyond vectors": peak.stop().own_mib - held}
    is_planted = (pairs[:, 0] < copies) & (pairs[:, 1] == pairs[:, 0] + images - copies)
    counts = {"pairs that are opened": len(pairs) / images, "copies among the pairs": is_planted.sum() / copies}
    return {**memory, **seconds, **counts}


def _drawn(images: int) -> tuple[ImageVectors, int]:
    """Vectors of grey images, the last of which are copies of the first; and the number of copies."""
    draw, copies = np.random.default_rng(0), round(COPIED * images)
    signatures = np.full((images, SIGNATURE_BYTES), 128, np.uint8)
    signatures[:, :HASH_BYTES] = draw.integers(0, 256, (images, HASH_BYTES), np.uint8)
    flips = np.packbits(draw.random((copies, BITS)) < FLIPPED, axis=1)
    signatures[-copies:, :HASH_BYTES] = signatures[:copies, :HASH_BYTES] ^ flips
    spread = draw.standard_normal((RANK, WIDTH), np.float32) / np.float32(np.sqrt(RANK))
    features = draw.standard_normal((images, RANK), np.float32) @ spread
    features[-copies:] = features[:copies] + np.float32(NOISE) * draw.standard_normal((copies, WIDTH), np.float32)
    return ImageVectors(np.arange(images), signatures, as_directions(features), frozenset(), 0), copies


def _report_images(bench: Bench, samples: int) -> None:
    signatures, copies = _signatures(samples)
    total = len(signatures)
    bits = ImageVectors(np.arange(total), signatures, None, frozenset(), 0).bits
    exact, indexed = nearest(bits, CANDIDATES), nearly_nearest(bits, CANDIDATES)
    data = f"hashes of {total:,} images of {len(ASKED)} sets, {len(copies)} of them copies"
    for label, neighbours in (("exact", exact), ("index", indexed)):
        shares = {"copies among the pairs": _share(copies, neighbours.pairs(), total)}
        if label == "index":
            shares["of the exact pairs"] = _share(exact.pairs(), neighbours.pairs(), total)
            shares["of the exact cosines"] = float((neighbours.cosines.clip(-1) >= exact.cosines - 1e-3).mean())
        for name, share in shares.items():
            bench.report.figure(name, data, "share", Side(label, [share]))
    recall = _share(copies, indexed.pairs(), total) / max(1e-9, _share(copies, exact.pairs(), total))
    bench.report.require(recall >= MIN_RECALL, "the index finds the copies that are found exactly", found=f"{recall}")


def _signatures(samples: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Signatures of images of all shipped sets, blank ones left out, and (copies, 2) rows of planted copies."""
    values: list[bytes] = []
    copies: list[tuple[int, int]] = []
    for source in ASKED:
        with tempfile.TemporaryDirectory() as folder:
            planted = plant(source, Path(folder) / "set", samples)
            rows: dict[str, int] = {}
            for identity, signature in _signed(planted.records):
                if signature:
                    rows[identity] = len(values)
                    values.append(signature)
        pairs = [(rows[of], rows[copy]) for copy, (_, of) in planted.copies.items() if {of, copy} <= rows.keys()]
        copies += pairs
    return as_signatures(values), np.array(copies, np.int64)


def _signed(records: Path) -> Iterator[tuple[str, bytes]]:
    for record in json.loads(records.read_text(encoding="utf-8")):
        with Image.open(records.parent / "images" / record["image"]) as image:
            yield record["id"], image_signature(image.convert("RGB"))


def _share(pairs: NDArray[np.int64], of: NDArray[np.int64], total: int) -> float:
    """The share of pairs of rows that are among others."""
    numbers = [some.min(axis=1) * total + some.max(axis=1) for some in (pairs, of)]
    return float(np.isin(*numbers).mean())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
