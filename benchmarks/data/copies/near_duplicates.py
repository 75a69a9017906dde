"""Part `near-duplicates`: shipped images that are alike by nature, copies that are found, the cost of a signature."""

from __future__ import annotations

import hashlib
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from benchmarks.data.pictures import photographs
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.near_duplicates.search import as_signatures
from vlmpipe.trainer.data.near_duplicates.signature import (
    MAX_COLOUR_DISTANCE,
    MAX_HASH_DISTANCE,
    colour_distance,
    hash_distance,
    image_signature,
)
from vlmpipe.trainer.data.near_duplicates.table import NAME, SignatureWriter, like_train, validation_images
from vlmpipe.trainer.data.sample import Sample, split_of
from vlmpipe.trainer.data.sources import open_source

SOURCES = ("builtin:digits", "builtin:easy-vqa", "builtin:openmoji", "builtin:digit-mosaics")
COPIED = 100  # images of a source
MAX_ALIKE = 0.08  # of validation images that no copy was made of; what docs/reference/data-formats.md states is less
MIN_FOUND = 0.75  # of the copies below that are encoded or resized again, in the mean of the sources


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def _scaled(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def _cropped(image: Image.Image, share: float) -> Image.Image:
    across, down = round(image.width * share), round(image.height * share)
    return image.crop((across, down, image.width - across, image.height - down))


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG, quality 75": lambda image: _jpeg(image, 75),
    "half the size": lambda image: _scaled(image, 0.5),
    "1.3 times the size, JPEG": lambda image: _jpeg(_scaled(image, 1.3), 75),
    "JPEG, quality 30": lambda image: _jpeg(image, 30),
    "contrast 0.8": lambda image: ImageEnhance.Contrast(image).enhance(0.8),
    "brightness 1.2": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "cropped by 2 %": lambda image: _cropped(image, 0.02),
    "cropped by 5 %": lambda image: _cropped(image, 0.05),
    "mirrored": ImageOps.mirror,
}
MUST_BE_FOUND = 3  # of COPIES, the first ones


def near_duplicates(bench: Bench) -> None:
    sources = SOURCES[:1] if bench.quick else SOURCES
    bench.expect(len(sources) + 1)
    found: dict[str, list[float]] = {name: [] for name in COPIES}
    for source in sources:
        images = source_images(source)
        alike_by_nature(bench, source, images)
        for name, share in copies(bench, source, images).items():
            found[name].append(share)
    for name in list(COPIES)[:MUST_BE_FOUND]:
        share = fmean(found[name])
        bench.report.require(share >= MIN_FOUND, "copies are found", found=f"{name}: {share:.2f}")
    scenes = [Image.open(io.BytesIO(data)).convert("RGB") for data in photographs(8 if bench.quick else 64)]
    started = time.process_time()
    for scene in scenes:
        image_signature(scene)
    cost_ms = 1000 * (time.process_time() - started) / len(scenes)
    bench.report.figure("signature of a photograph", "600 x 400", "CPU ms", Side("signature", [cost_ms]))


def source_images(source: str) -> list[Image.Image]:
    """Distinct images of a shipped source."""
    found: dict[bytes, None] = {}
    for sample in open_source(DataConfig(source=source, sequence_length=256)):
        assert isinstance(sample, Sample)
        found |= {image.read(): None for image in sample.images}
    return [Image.open(io.BytesIO(data)).convert("RGB") for data in found]


def alike_by_nature(bench: Bench, source: str, images: Sequence[Image.Image]) -> None:
    """A tenth of the images searched among the others: none of them is a copy."""
    writer = SignatureWriter()
    for number, image in enumerate(images):
        name = hashlib.sha256(image.tobytes()).hexdigest()
        writer.add(split_of(name, 0.1), str(number), 0, name, image_signature(image))
    with tempfile.TemporaryDirectory() as folder:
        writer.write(Path(folder))
        table = Path(folder) / NAME
        result = like_train(table, {name: one for name, (*_, one) in validation_images(table).items()})
    share = len(result.nearest) / result.images
    bench.report.require(share <= MAX_ALIKE, "few images that are no copies look alike", found=f"{source}: {share:.3f}")
    bench.report.figure(
        "look like a training image, no copies", f"{source}, {result.images} images", "share", Side("search", [share])
    )


def copies(bench: Bench, source: str, images: Sequence[Image.Image]) -> dict[str, float]:
    """The share of each kind of copies that is found."""
    chosen = np.random.default_rng(0).permutation(len(images))[:COPIED].tolist()
    own = as_signatures([image_signature(images[number]) for number in chosen])
    shares = {}
    for name, change in COPIES.items():
        copied = as_signatures([image_signature(change(images[number])) for number in chosen])
        near = hash_distance(own, copied) <= MAX_HASH_DISTANCE
        shares[name] = float((near & (colour_distance(own, copied) <= MAX_COLOUR_DISTANCE)).mean())
        bench.report.figure(f"copies found: {name}", source, "share", Side("signature", [shares[name]]))
    return shares
