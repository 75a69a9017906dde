"""What the data path gains: rows, reading, cached features, preparation. `make bench-data`"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.common import Measured, clocked, interleaved, options
from benchmarks.report import Report, Side
from benchmarks.workloads import Workload, job_of, prepare_job, workload
from trainer.config import ModelConfig
from trainer.data.conversation import encode_sample
from trainer.data.index import Index
from trainer.data.rows import plan_rows
from trainer.data.samples import Turn
from trainer.data.shards import FOLDER
from trainer.features.store import FeatureReader, write_shard
from trainer.models.pixels import PixelPreparer
from trainer.models.table import family_of
from trainer.storage import open_storage
from trainer.worker import Worker, start_worker

PADDED_BATCH = 8  # samples that are padded to the longest among them
IMAGE_BATCH = 16
SYNTHETIC = "synthetic VLM mix"
PHOTOGRAPHS = "photographs, 600 x 400 JPEG"

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Mix:
    """Lengths of a data set: what packing depends on."""

    tokens: Lengths  # (samples,)
    images: Lengths  # (samples,)
    row_tokens: int
    row_images: int


def main() -> None:
    chosen = options(__doc__)
    rounds = chosen.rounds or (2 if chosen.quick else 7)
    samples = {"digits": 300, "easy-vqa": 200} if chosen.quick else {"digits": 0, "easy-vqa": 2000}
    report = Report("Data path", {"rounds": rounds, "samples": samples, "padded_batch": PADDED_BATCH})
    worker = start_worker()
    with tempfile.TemporaryDirectory(prefix="vlmpipe-bench-") as scratch:
        root = Path(scratch)
        limits = {name: (f"data.max_samples={count}",) for name, count in samples.items()}
        workloads = [workload(name, root, worker, overrides) for name, overrides in limits.items()]
        for load in workloads:
            split, data = load.split(), load.online.data
            packing(report, load.name, Mix(split.tokens, split.image_count, data.row_tokens, data.row_images), rounds)
        packing(report, SYNTHETIC, synthetic_mix(1000 if chosen.quick else 6000), rounds)
        for load in workloads:
            reading(report, load, rounds)
        for load in workloads:
            encoded_images(report, load, rounds)
        photographs(report, root, rounds, count=IMAGE_BATCH if chosen.quick else 4 * IMAGE_BATCH)
        for name, overrides in limits.items():
            preparation(report, name, root, overrides, rounds)
    report.publish(chosen)


def synthetic_mix(samples: int) -> Mix:
    """Lengths as in a mix of vision-language sets: 1 to 3 images of five sizes, text of log-normal length."""
    random = np.random.default_rng(0)
    images = random.integers(1, 4, samples)
    sizes = random.choice([144, 256, 400, 576, 1024], (samples, 3))
    image_tokens = np.where(np.arange(3) < images[:, None], sizes, 0).sum(1)
    text = np.clip(random.lognormal(np.log(120), 0.8, samples), 10, 1000).astype(np.int64)
    return Mix(image_tokens + text, images, row_tokens=4096, row_images=18)


def packing(report: Report, name: str, mix: Mix, rounds: int) -> None:
    """Fill is useful tokens over slots computed, so a ratio of fills is the inverse ratio of slots."""
    tokens, images = mix.tokens, mix.images
    fills: dict[str, list[float]] = {"ours": [], "padded": [], "first come": []}
    plan_us = []
    for epoch in range(rounds):
        order = np.random.default_rng(epoch).permutation(len(tokens))
        batches = [tokens[order[i : i + PADDED_BATCH]] for i in range(0, len(order), PADDED_BATCH)]
        padded_slots = sum(int(batch.max()) * len(batch) for batch in batches)
        first_come_slots = sum(1 for _ in first_come(order, mix)) * mix.row_tokens
        budget = {"row_tokens": mix.row_tokens, "row_images": mix.row_images}
        plans = []

        def plan(epoch: int = epoch, plans: list[Any] = plans, budget: dict[str, int] = budget) -> float:
            plans.append(plan_rows(tokens, images, **budget, seed=0, epoch=epoch))
            return len(tokens)

        plan_us.append(clocked(plan).cpu_per_unit * 1e6)
        report.require(sorted(plans[0].members) == list(range(len(tokens))), "every sample is in exactly one row")
        fills["ours"].append(100 * plans[0].fill)
        fills["padded"].append(100 * int(tokens.sum()) / padded_slots)
        fills["first come"].append(100 * int(tokens.sum()) / first_come_slots)
    ours = Side(f"packed, {mix.row_tokens}-token rows", fills["ours"])
    padded = Side(f"padded to the longest of {PADDED_BATCH}", fills["padded"])
    report.compare("fill, packed / padded", name, "% of slots", ours, padded, higher_is_better=True)
    greedy = Side("packed first come, first served", fills["first come"])
    report.compare("fill, best fit / first come", name, "% of slots", ours, greedy, higher_is_better=True)
    report.figure("time to plan rows", name, "CPU us/sample", Side("plan_rows", plan_us))


def first_come(order: Sequence[int] | Lengths, mix: Mix) -> Iterator[list[int]]:
    """Rows as a stream packs them: a row is closed when the next sample does not fit."""
    row: list[int] = []
    free_tokens, free_images = mix.row_tokens, mix.row_images
    for sample in order:
        if mix.tokens[sample] > free_tokens or mix.images[sample] > free_images:
            yield row
            row, free_tokens, free_images = [], mix.row_tokens, mix.row_images
        row.append(int(sample))
        free_tokens -= int(mix.tokens[sample])
        free_images -= int(mix.images[sample])
    yield row


def reading(report: Report, load: Workload, rounds: int) -> None:
    """Both sides read the same tars, parse, tokenize and fill rows; then the same with images decoded and resized."""
    pixels = PixelPreparer(load.online.model)
    seen: dict[str, set[str]] = {}
    for with_images in (False, True):
        sides: dict[str, Callable[[], Measured]] = {}
        for name, rows in (("ours", _our_rows), ("webdataset", _webdataset_rows)):

            def work(name: str = name, rows: Any = rows, with_images: bool = with_images) -> float:
                digests = set()
                for ids, images in rows(load):
                    digests |= {sample + hashlib.sha256(image).hexdigest() for sample, image in zip(ids, images, strict=True)}
                    if with_images:
                        pixels(images)
                seen[name] = digests
                return len(digests)

            sides[name] = lambda work=work: clocked(work)  # type: ignore[misc]
        found = interleaved(sides, rounds)
        report.require(seen["ours"] == seen["webdataset"], "loader and webdataset gave the same samples and image bytes")
        _compare_cost(
            report,
            "rows read" + (", images decoded" if with_images else ""),
            load.name,
            "CPU ms/sample",
            ("our loader, shuffled and verified", found["ours"]),
            ("webdataset, in shard order", found["webdataset"]),
            1e3,
        )


def _our_rows(load: Workload) -> Iterator[tuple[Sequence[str], Sequence[bytes]]]:
    """One epoch; (sample ids, encoded images) of each row. Both sets have one image a sample."""
    with load.loader() as loader:
        for step in range(load.sequence().num_steps(1)):
            for row in loader.rows_for_step(step, 0, 1):
                yield row.sample_ids, row.images


def _webdataset_rows(load: Workload) -> Iterator[tuple[Sequence[str], Sequence[bytes]]]:
    """The same from webdataset's own reader, packed as a stream can."""
    job = load.online
    length = job.data.row_tokens
    image_tokens = family_of(job.model).image_tokens(job.model, job.model.image_size, job.model.image_size)
    tokenizer = load.tokenizer()
    shards = sorted(str(path) for path in Path(job.pointers().prepared_uri, FOLDER).glob("train-*.tar"))
    ids: list[str] = []
    images: list[bytes] = []
    arrays = _empty_row(length, tokenizer.pad_token_id)
    start = 0
    for sample in wds.WebDataset(shards, shardshuffle=False):
        record = json.loads(sample["json"])
        image = next(value for name, value in sample.items() if name.startswith("0."))
        encoded = encode_sample([Turn(**turn) for turn in record["turns"]], [image_tokens], tokenizer)
        stop = start + len(encoded.input_ids)
        if stop > length:
            yield ids, images
            ids, images, arrays = [], [], _empty_row(length, tokenizer.pad_token_id)
            start, stop = 0, stop - start
        for array, values in zip(arrays, (encoded.input_ids, encoded.labels, np.arange(stop - start)), strict=True):
            array[start:stop] = values
        ids.append(record["id"])
        images.append(image)
        start = stop
    yield ids, images


def _empty_row(length: int, pad: int) -> list[Lengths]:
    return [np.full(length, value, np.int64) for value in (pad, -100, 0)]  # ids, labels, positions


def encoded_images(report: Report, load: Workload, rounds: int) -> None:
    """What a training step needs of its images: stored features, or pixels (whose tower still has to run)."""
    with load.loader() as loader:
        steps = min(8, load.sequence().num_steps(1))
        rows = [row for step in range(steps) for row in loader.rows_for_step(step, 0, 1)]
    names = [name for row in rows for name in row.image_sha256]
    images = dict(zip(names, (image for row in rows for image in row.images), strict=True))
    family, model = family_of(load.online.model), load.online.model
    uri = load.cached.pointers().features_uri
    name = names[0]
    again = family.encode(model, family.build_tower(model), PixelPreparer(model)([images[name]]))[0]
    report.require(
        torch.allclose(FeatureReader(uri).read(name).float(), again.float(), atol=0.05),
        "a cached feature is what the tower gives for the decoded image",
    )
    _compare_images(report, load.name, model, uri, images, rounds)


def photographs(report: Report, root: Path, rounds: int, *, count: int) -> None:
    """Pictures of a usual size: crops of the two photographs in scikit-learn, for SigLIP-B/16 at 224 pixels.

    The features are noise of the right shape: what they cost to read does not depend on what they say.
    """
    tower = {"model_type": "siglip_vision_model", "hidden_size": 768, "patch_size": 16}
    model = ModelConfig.model_validate(
        {"tower": {"config": tower}, "language_model": {"config": {"model_type": "qwen2"}}}
        | {"tokenizer": "train:300", "image_size": 224}
    )
    images = {}
    for number in range(count):
        scene = Image.fromarray(load_sample_images().images[number % 2])
        crop = scene.crop((number % 40, number % 27, number % 40 + 600, number % 27 + 400))
        buffer = io.BytesIO()
        crop.save(buffer, "JPEG", quality=90)
        images[hashlib.sha256(buffer.getvalue()).hexdigest()] = buffer.getvalue()
    uri = str(root / "photograph-features")
    write_shard(open_storage(uri), root, {name: torch.randn(196, 768).bfloat16() for name in images}, {})
    _compare_images(report, PHOTOGRAPHS, model, uri, images, rounds)


def _compare_images(
    report: Report, data: str, model: ModelConfig, uri: str, images: dict[str, bytes], rounds: int
) -> None:
    pixels, reader = PixelPreparer(model), FeatureReader(uri)
    batches = [list(images)[i : i + IMAGE_BATCH] for i in range(0, len(images), IMAGE_BATCH)]

    def read() -> float:
        return sum(len(torch.stack([reader.read(name) for name in batch])) for batch in batches)

    def decode() -> float:
        return sum(len(pixels([images[name] for name in batch])) for batch in batches)

    found = interleaved({"ours": lambda: clocked(read), "online": lambda: clocked(decode)}, rounds)
    report.require(found["ours"][0].units == found["online"][0].units, "as many features were read as images decoded")
    ours, online = ("cached features", found["ours"]), ("decoded and resized", found["online"])
    _compare_cost(report, "images of a step", data, "CPU us/image", ours, online, 1e6)


def preparation(report: Report, name: str, root: Path, overrides: tuple[str, ...], rounds: int) -> None:
    """Check, tokenize, count and store, with the training of the tokenizer."""
    job = job_of(name, root / "prepare", f"{name}-prepare", overrides)
    values = []
    for _ in range(min(rounds, 3)):
        measured = clocked(lambda: sum(map(len, (Index.load(prepare_job(job)).split(s).ids for s in ("train", "eval")))))  # type: ignore[arg-type]
        values.append(measured.cpu_per_unit * 1e3)
        shutil.rmtree(root / "prepare")
    report.figure("preparation", name, "CPU ms/sample", Side("prepare_data", values))


def _compare_cost(
    report: Report,
    claim: str,
    data: str,
    unit: str,
    ours: tuple[str, list[Measured]],
    baseline: tuple[str, list[Measured]],
    scale: float,
) -> None:
    sides = [Side(label, [scale * each.cpu_per_unit for each in found]) for label, found in (ours, baseline)]
    wall = tuple([each.wall_s / each.units for each in found] for _, found in (ours, baseline))
    report.compare(claim, data, unit, *sides, wall=wall)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
