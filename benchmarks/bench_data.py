"""What the data path gains: rows, reading, cached features, preparation. `make bench-data`"""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.common import Clock, Measured, clocked, interleaved, interleaved_work, options
from benchmarks.data_baselines import (
    Lengths,
    RowContent,
    decoded,
    decoded_by_hand,
    first_come_rows,
    first_fit_rows,
    padded_slots,
    webdataset_rows,
)
from benchmarks.prepare_million import write_tars
from benchmarks.report import Report, Side
from benchmarks.workloads import Workload, job_of, prepare_job, workload
from trainer.config.model import ModelConfig
from trainer.data.loader import PackedLoader
from trainer.data.packing import plan_packing
from trainer.data.sample import SPLITS
from trainer.data.shards.index import Index
from trainer.distributed.process import start_worker
from trainer.feature_cache.reader import FeatureReader
from trainer.feature_cache.store import write_shard
from trainer.models.image_processor import PixelPreparer
from trainer.models.registry import family_of
from trainer.storage import open_storage

PADDED_BATCH = 8  # samples that are padded to the longest among them
IMAGE_BATCH = 16
GREEDY_WINDOW = 1024  # samples, as many as ours looks at at once
PREPARATIONS = 3
RECORDS, PIECES = 20_000, 8  # prepared by two processes and by one
PHOTOGRAPHS = "600 x 400 JPEG, 224 pixels"


def main() -> None:
    chosen = options(__doc__)
    rounds = chosen.rounds or (2 if chosen.quick else 9)
    samples = {"digits": 300, "easy-vqa": 200} if chosen.quick else {"digits": 0, "easy-vqa": 2000}
    report = Report("Data path", {"rounds": rounds, **{f"{name} samples": n or "all" for name, n in samples.items()}})
    worker = start_worker()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        root = Path(scratch)
        workloads = [workload(name, root, worker, (f"data.max_samples={n}",)) for name, n in samples.items()]
        for load in workloads:
            packing(report, load.name, lengths_of(load), rounds)
        packing(report, "synthetic VLM mix", synthetic_lengths(1000 if chosen.quick else 6000), rounds)
        for load in workloads:
            reading(report, load, rounds)
        for load in workloads:
            images_of_steps(report, load, rounds)
        photographs(report, root, rounds, count=IMAGE_BATCH if chosen.quick else 4 * IMAGE_BATCH)
        for load in workloads:
            preparation(report, load, root / "again")
        if not chosen.quick:
            processes(report, root / "processes")
    report.publish(chosen)


def lengths_of(load: Workload) -> Lengths:
    split, data = load.split(), load.online.data
    return Lengths(split.tokens, split.image_count, data.sequence_length, data.max_images_per_sequence)


def synthetic_lengths(samples: int) -> Lengths:
    """Lengths as in a mix of vision-language sets: 1 to 3 images of five sizes, and text of log-normal length."""
    random = np.random.default_rng(0)
    images = random.integers(1, 4, samples)
    sizes = random.choice([144, 256, 400, 576, 1024], (samples, 3))
    image_tokens = np.where(np.arange(3) < images[:, None], sizes, 0).sum(1)
    text = np.clip(random.lognormal(np.log(120), 0.8, samples), 10, 1000).astype(np.int64)
    return Lengths(image_tokens + text, images, sequence_length=4096, max_images_per_sequence=18)


def packing(report: Report, name: str, lengths: Lengths, epochs: int) -> None:
    """Fill is useful tokens over slots computed: a ratio of fills is the other way round a ratio of slots."""
    useful = int(lengths.tokens.sum())
    best_fit, padded, first_come, first_fit = [], [], [], []
    planned: list[Measured] = []
    greedy: list[Measured] = []
    for epoch in range(epochs):
        clock = Clock()
        plan = plan_packing(
            lengths.tokens,
            lengths.images,
            sequence_length=lengths.sequence_length,
            max_images_per_sequence=lengths.max_images_per_sequence,
            seed=0,
            epoch=epoch,
        )
        planned.append(clock.stop(len(lengths.tokens)))
        report.require(sorted(plan.members) == list(range(len(lengths.tokens))), "every sample is in exactly one row")
        order = np.random.default_rng(epoch).permutation(len(lengths.tokens))
        best_fit.append(100 * plan.fill)
        padded.append(100 * useful / padded_slots(order, lengths, PADDED_BATCH))
        first_come.append(100 * useful / (first_come_rows(order, lengths) * lengths.sequence_length))
        clock = Clock()
        rows = first_fit_rows(order, lengths, GREEDY_WINDOW)
        greedy.append(clock.stop(len(lengths.tokens)))
        first_fit.append(100 * useful / (rows * lengths.sequence_length))
    ours, unit = Side(f"rows of {lengths.sequence_length} tokens, best fit", best_fit), "% of slots"
    baseline = Side(f"padded to the longest of {PADDED_BATCH}", padded)
    report.compare("fill: packed or padded", name, unit, ours, baseline)
    report.compare("fill: best fit or first come", name, unit, ours, Side("first come, first served", first_come))
    report.compare("fill: best fit or first fit", name, unit, ours, Side(f"first fit of {GREEDY_WINDOW}", first_fit))
    plan_us = [1e6 * each.cpu_per_unit for each in planned]
    report.figure("time to plan an epoch", name, "CPU us / sample", Side("plan_packing", plan_us))
    baseline_rates = (f"first fit of {GREEDY_WINDOW}", greedy)
    report.compare_rates("samples planned", name, "samples", ("shuffled, best fit", planned), baseline_rates)


def reading(report: Report, load: Workload, rounds: int) -> None:
    """An epoch of rows from the same tars: parsed, tokenized and packed; then also decoded and resized."""
    ours = {pair for ids, images in our_rows(load.loader(), load) for pair in zip(ids, images, strict=True)}
    theirs = {pair for ids, images in webdataset_rows(load) for pair in zip(ids, images, strict=True)}
    report.require(ours == theirs, "our loader and webdataset give the same samples with the same image bytes")
    pixels = PixelPreparer(load.online.model)

    for decode in (False, True):

        def consume(rows: Iterable[RowContent], decode: bool = decode) -> float:
            return sum(len(pixels(images) if decode else images) for _, images in rows)

        def our_epoch(consume: Callable[[Iterable[RowContent]], float] = consume) -> Measured:
            rows = our_rows(load.loader(), load)  # a new loader: each round verifies the shards' checksums
            return clocked(lambda: consume(rows))

        def their_epoch(consume: Callable[[Iterable[RowContent]], float] = consume) -> Measured:
            return clocked(lambda: consume(webdataset_rows(load)))

        found = interleaved({"ours": our_epoch, "webdataset": their_epoch}, rounds)
        claim = "rows read, images decoded" if decode else "rows read"
        baseline = ("webdataset, in shard order", found["webdataset"])
        report.compare_rates(claim, load.name, "samples", ("loader, shuffled, verified", found["ours"]), baseline)


def our_rows(loader: PackedLoader, load: Workload) -> Iterator[RowContent]:
    """One epoch."""
    for step in range(load.num_steps):
        for row in loader.sequences_for_step(step, 0, 1):
            yield row.sample_ids, row.images


def images_of_steps(report: Report, load: Workload, rounds: int) -> None:
    """What a step needs of its images: stored features, or pixels, for which the tower then still has to run."""
    loader = load.loader()
    rows = [row for step in range(load.num_steps) for row in loader.sequences_for_step(step, 0, 1)]
    images = {sha256: image for row in rows for sha256, image in zip(row.image_sha256, row.images, strict=True)}
    model, features_uri = load.online.model, load.cached.pointers().features_uri
    name, image = next(iter(images.items()))
    family = family_of(model)
    encoded = family.encode(model, family.build_tower(model), PixelPreparer(model)([image]))[0].float()
    stored = FeatureReader.open(features_uri).read(name).float()
    report.require(
        torch.allclose(stored, encoded, rtol=0.02, atol=0.02), "a stored feature is what the tower gives now"
    )
    compare_images(report, load.name, model, features_uri, images, rounds)


def photographs(report: Report, root: Path, rounds: int, *, count: int) -> None:
    """Pictures of a usual size: crops of scikit-learn's two photographs, for SigLIP-B/16 at 224 pixels.

    Their features are noise of the right shape: what it costs to read them does not depend on what they say.
    """
    tower = {"config": {"model_type": "siglip_vision_model", "hidden_size": 768, "patch_size": 16}}
    language_model = {"config": {"model_type": "qwen2"}}
    parts: dict[str, Any] = {"tower": tower, "language_model": language_model}
    model = ModelConfig(**parts, tokenizer="train:300", image_size=224)
    scenes = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    images = {}
    for number in range(count):
        left, top = number % 40, number % 27
        buffer = io.BytesIO()
        scenes[number % 2].crop((left, top, left + 600, top + 400)).save(buffer, "JPEG", quality=90)
        images[hashlib.sha256(buffer.getvalue()).hexdigest()] = buffer.getvalue()
    features_uri = str(root / "features-of-photographs")
    write_shard(open_storage(features_uri), root, {name: torch.randn(196, 768).bfloat16() for name in images}, {})
    compare_images(report, PHOTOGRAPHS, model, features_uri, images, rounds)
    decoding(report, model, list(images.values()), rounds)


def decoding(report: Report, model: ModelConfig, images: list[bytes], rounds: int) -> None:
    """Decoding with resizing, by one core, against the least that anyone must do and against the usual few lines."""
    pixels = PixelPreparer(model)
    same = torch.allclose(pixels(images), decoded_by_hand(images, model), atol=0.02)
    report.require(same, "our pixels are those of Pillow and NumPy by hand")
    batches = [images[start : start + IMAGE_BATCH] for start in range(0, len(images), IMAGE_BATCH)]
    works = {
        "ours": lambda: sum(len(pixels(batch)) for batch in batches),
        "decoded": lambda: sum(decoded(batch) for batch in batches),
        "by hand": lambda: sum(len(decoded_by_hand(batch, model)) for batch in batches),
    }
    found = interleaved_work(works, rounds)
    ours = ("decoded, resized, normalized", found["ours"])
    bare, by_hand = ("decoded only (Pillow)", found["decoded"]), ("the same by hand (Pillow, NumPy)", found["by hand"])
    report.compare_rates("images: all or decoding alone", PHOTOGRAPHS, "images", ours, bare)
    report.compare_rates("images: ours or by hand", PHOTOGRAPHS, "images", ours, by_hand)


def compare_images(
    report: Report, data: str, model: ModelConfig, features_uri: str, images: dict[str, bytes], rounds: int
) -> None:
    """Images in batches: their features read, or their bytes decoded and resized."""
    pixels, reader, names = PixelPreparer(model), FeatureReader.open(features_uri), list(images)
    batches = [names[start : start + IMAGE_BATCH] for start in range(0, len(names), IMAGE_BATCH)]
    works = {
        "cached": lambda: sum(len(torch.stack([reader.read(name) for name in batch])) for batch in batches),
        "online": lambda: sum(len(pixels([images[name] for name in batch])) for batch in batches),
    }
    found = interleaved_work(works, rounds)
    same = {measured.units for side in found.values() for measured in side} == {len(images)}
    report.require(same, "as many features are read as images are decoded")
    cached, online = ("cached features", found["cached"]), ("decoded and resized", found["online"])
    report.compare_rates("images of a step", data, "images", cached, online)


def preparation(report: Report, load: Workload, root: Path) -> None:
    """Check, tokenize, count and store, the training of the tokenizer included."""
    job = job_of(load.name, root, "prepare", (f"data.max_samples={load.online.data.max_samples}",))
    values = []
    for _ in range(PREPARATIONS):
        measured = clocked(lambda: _samples(prepare_job(job)))
        values.append(1e3 * measured.cpu_per_unit)
        shutil.rmtree(root)
    report.figure("preparation", load.name, "CPU ms / sample", Side("prepare_data", values))


def processes(report: Report, root: Path) -> None:
    """The same on two processes. It is wall time that they save: other work on the machine tells at once.

    Many small records, in pieces of which a process takes whole ones. To start the second process is part of it.
    """
    root.mkdir()
    write_tars(root / "set", RECORDS)
    source = (f"data.source={root / 'set'}", "data.image_folder=", f"data.chunk_samples={RECORDS // PIECES}")

    def prepared(workers: int) -> float:
        job = job_of("llava-local", root / "prepared", "prepare", (*source, f"data.workers={workers}"))
        measured = clocked(lambda: _samples(prepare_job(job)))
        shutil.rmtree(root / "prepared")
        return 1 / measured.wall_per_unit

    found = interleaved({"two": partial(prepared, 2), "one": partial(prepared, 1)}, PREPARATIONS, warm_up=False)
    sides = [Side(f"{name} process{'es' * (name == 'two')}", found[name]) for name in ("two", "one")]
    report.compare("preparation: two processes or one", f"{RECORDS:,} tiny pictures", "samples / s", *sides)


def _samples(prepared_uri: str) -> float:
    index = Index.load(prepared_uri)
    return sum(len(index.split(name)) for name in SPLITS)


if __name__ == "__main__":
    main()
