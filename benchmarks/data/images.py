"""Part `images`: cached features or decoded images of a step; decoding and resizing beside Pillow by hand."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from benchmarks.support.suite import Bench
from benchmarks.support.workloads import Workload, data_workloads
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.feature_cache.store import write_shard
from vlmpipe.trainer.models.image_processor import PixelPreparer
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage

BATCH = 16
PHOTOGRAPHS = "600 x 400 JPEG, 224 pixels"


def images(bench: Bench) -> None:
    """What a step needs of its images: stored features, or pixels, for which the tower then still has to run."""
    loads = data_workloads(bench)
    bench.expect(len(loads) + 2)
    for load in loads:
        of_steps(bench, load)
    photographs(bench, count=BATCH if bench.quick else 4 * BATCH)


def of_steps(bench: Bench, load: Workload) -> None:
    """The images of a data set."""
    loader = load.loader()
    sequences = [each for step in range(load.num_steps) for each in loader.sequences_for_step(step, 0, 1)]
    found = {sha256: image for each in sequences for sha256, image in zip(each.image_sha256, each.images, strict=True)}
    model, features_uri = load.online.model, load.cached.pointers().features_uri
    name, image = next(iter(found.items()))
    family = family_of(model)
    encoded = family.encode(model, family.build_tower(model), PixelPreparer(model)([image]))[0].float()
    stored = FeatureReader.open(features_uri).read(name).float()
    same = torch.allclose(stored, encoded, rtol=0.02, atol=0.02)
    bench.report.require(same, "a stored feature is what the tower gives now")
    cached_or_decoded(bench, load.name, model, features_uri, found)


def photographs(bench: Bench, *, count: int) -> None:
    """Pictures of a usual size: crops of scikit-learn's two photographs, for SigLIP-B/16 at 224 pixels.

    Their features are noise of the right shape: what it costs to read them does not depend on their values.
    """
    tower = {"config": {"model_type": "siglip_vision_model", "hidden_size": 768, "patch_size": 16}}
    language_model = {"config": {"model_type": "qwen2"}}
    parts: dict[str, Any] = {"tower": tower, "language_model": language_model}
    model = ModelConfig(**parts, tokenizer="train:300", image_size=224)
    scenes = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    found = {}
    for number in range(count):
        left, top = number % 40, number % 27
        buffer = io.BytesIO()
        scenes[number % 2].crop((left, top, left + 600, top + 400)).save(buffer, "JPEG", quality=90)
        found[hashlib.sha256(buffer.getvalue()).hexdigest()] = buffer.getvalue()
    features_uri = str(bench.scratch / "features-of-photographs")
    features = {name: torch.randn(196, 768).bfloat16() for name in found}
    write_shard(open_storage(features_uri), bench.scratch, features, tower_sha256="0")
    cached_or_decoded(bench, PHOTOGRAPHS, model, features_uri, found)
    decoding(bench, model, list(found.values()))


def decoding(bench: Bench, model: ModelConfig, found: list[bytes]) -> None:
    """By one core: against the least that anyone must do, and against the usual few lines."""
    pixels = PixelPreparer(model)
    same = torch.allclose(pixels(found), decoded_by_hand(found, model), atol=0.02)
    bench.report.require(same, "our pixels are those of Pillow and NumPy by hand")
    batches = [found[start : start + BATCH] for start in range(0, len(found), BATCH)]
    works = {
        "ours": lambda: sum(len(pixels(batch)) for batch in batches),
        "decoded": lambda: sum(decoded(batch) for batch in batches),
        "by hand": lambda: sum(len(decoded_by_hand(batch, model)) for batch in batches),
    }
    times = bench.take_timed_turns("decoding photographs", works)
    ours = ("decoded, resized, normalized", times["ours"])
    bare, by_hand = ("decoded only (Pillow)", times["decoded"]), ("the same by hand (Pillow, NumPy)", times["by hand"])
    bench.report.compare_rates("images: all or decoding alone", PHOTOGRAPHS, "images", ours, bare)
    bench.report.compare_rates("images: ours or by hand", PHOTOGRAPHS, "images", ours, by_hand)


def cached_or_decoded(bench: Bench, data: str, model: ModelConfig, features_uri: str, found: dict[str, bytes]) -> None:
    """Images in batches: their features read, or their bytes decoded and resized."""
    pixels, reader, names = PixelPreparer(model), FeatureReader.open(features_uri), list(found)
    batches = [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
    works = {
        "cached": lambda: sum(len(torch.stack([reader.read(name) for name in batch])) for batch in batches),
        "online": lambda: sum(len(pixels([found[name] for name in batch])) for batch in batches),
    }
    times = bench.take_timed_turns(f"images of a step, {data}", works)
    same = {measured.units for side in times.values() for measured in side} == {len(found)}
    bench.report.require(same, "as many features are read as images are decoded")
    cached, online = ("cached features", times["cached"]), ("decoded and resized", times["online"])
    bench.report.compare_rates("images of a step", data, "images", cached, online)


def decoded(found: Sequence[bytes]) -> int:
    """Pillow's bare decoding."""
    for data in found:
        Image.open(io.BytesIO(data)).convert("RGB")
    return len(found)


def decoded_by_hand(found: Sequence[bytes], model: ModelConfig) -> Tensor:
    """What a training script on img2dataset's tars does with Pillow and NumPy: (images, 3, side, side) fp32."""
    processor = family_of(model).image_processor(model)
    mean, deviation = np.array(processor.image_mean, np.float32), np.array(processor.image_std, np.float32)
    pixels = []
    for data in found:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        resized = picture.resize((model.image_size, model.image_size), Image.Resampling(processor.resample))
        values = (np.asarray(resized, np.float32) / 255 - mean) / deviation
        pixels.append(torch.from_numpy(values.transpose(2, 0, 1)))
    return torch.stack(pixels)
