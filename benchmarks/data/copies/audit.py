"""Part `audit`: recall and precision of the audit's search for copies, on shipped images with planted copies."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.data.copies.planted_faults import ASKED, KINDS, plant
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.audit.images.image_groups import CANDIDATES, MAX_BITS
from vlmpipe.trainer.audit.images.image_vectors import BITS
from vlmpipe.trainer.audit.images.likeness import are_alike, look_of
from vlmpipe.trainer.audit.images.neighbours import nearest
from vlmpipe.trainer.data.near_duplicates.search import as_signatures
from vlmpipe.trainer.data.near_duplicates.signature import HASH_BYTES, image_signature

SAMPLES = 800
MIN_RECALL, MIN_PRECISION = 0.9, 0.75  # of pairs: easy-vqa has drawings that are equal by nature


def audit(bench: Bench) -> None:
    sources = list(ASKED)[:1] if bench.quick else list(ASKED)
    bench.expect(len(sources))
    for source in sources:
        with tempfile.TemporaryDirectory() as folder:
            planted = plant(source, Path(folder) / "set", SAMPLES // 4 if bench.quick else SAMPLES)
            records = json.loads(planted.records.read_text(encoding="utf-8"))
            images = [_opened(planted.records.parent / "images" / record["image"]) for record in records]
        rows = {record["id"]: row for row, record in enumerate(records)}
        true = {frozenset((rows[copy], rows[of])): kind for copy, (kind, of) in planted.copies.items()}
        found = pairs_of(images)
        recall, precision = len(found & true.keys()) / len(true), len(found & true.keys()) / max(1, len(found))
        size = f"{source}, {len(images)} images, {len(true)} copies"
        bench.report.figure("copies found, recall", size, "share", Side("audit", [recall]))
        bench.report.figure("pairs that are copies, precision", size, "share", Side("audit", [precision]))
        kinds, missed = Counter(true.values()), Counter(true[pair] for pair in true.keys() - found)
        for kind in KINDS:
            share = 1 - missed[kind] / kinds[kind]
            bench.report.figure(f"copies found: {kind}", f"{source}, {kinds[kind]}", "share", Side("audit", [share]))
        is_good = recall >= MIN_RECALL and precision >= MIN_PRECISION
        bench.report.require(is_good, "planted copies are found", found=f"{source}: {recall:.2f}, {precision:.2f}")


def pairs_of(images: list[Image.Image]) -> set[frozenset[int]]:
    """Pairs that the audit takes for copies, with pixel hashes alone for candidates."""
    signatures = as_signatures([image_signature(image) for image in images])
    bits = (np.unpackbits(signatures[:, :HASH_BYTES], axis=1).astype(np.float32) * 2 - 1) / np.sqrt(BITS)
    looks = [look_of(image) for image in images]
    return {
        frozenset((one, other))
        for one, other, cosine in nearest(bits.astype(np.float32), CANDIDATES).pairs()
        if BITS * (1 - cosine) / 2 <= MAX_BITS and are_alike(looks[one], looks[other])
    }


def _opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")
