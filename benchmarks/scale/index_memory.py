"""Part `scale`: memory and seconds of a rank that opens the index, at 0.1, 1 and 10 million samples."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.scale.other_indexes import other_indexes
from benchmarks.scale.private_memory import MIB, PeakMemory, private_mib
from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Clock, Measured
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare.convert import convert
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.index_file import NAME, open_index
from vlmpipe.trainer.data.shards.index_lines import LINES, SCHEMA
from vlmpipe.trainer.data.shards.prepared_files import CONVERTIBLE, DONE, Manifest
from vlmpipe.trainer.data.shards.tar import shard_name
from vlmpipe.trainer.storage.file_sums import FileSum

SIZES = (100_000, 1_000_000, 10_000_000)
MAX_WHOLE = 1_000_000  # samples whose index is read whole beside it
LINES_AT_ONCE, SHARD_SAMPLES, LOOKED_UP = 1 << 16, 1_000, 1_000
COPIED_BYTES = 1 << 20  # at a time
WATCH_S = 0.02  # between two looks at the memory of a short call
ONE_IMAGE = "one image a sample, index only"
# What every step of a run without cached features reads.
STEP_COLUMNS = ("shard", "json_offset", "json_bytes", "tokens", "label_tokens", "image_tokens")
STEP_FIELDS = ("offset", "bytes", "width", "height", "tokens")


def scale(bench: Bench) -> None:
    """Each size in processes of its own: one writes the index of format 13, one converts it, others open it."""
    sizes = [size // (100 if bench.quick else 1) for size in SIZES]
    opened: dict[int, dict[str, float]] = {}
    for number, samples in enumerate(sizes):
        folder, data = bench.scratch / str(samples), f"{samples:,} samples, {ONE_IMAGE}"
        arguments = {"folder": str(folder), "samples": samples}
        bench.at(f"{samples:,} samples: writing lines", number / len(sizes))
        bench.call(f"{__name__}:write_lines", arguments)
        whole = {}
        if samples <= MAX_WHOLE:
            whole = bench.call(f"{__name__}:read_whole", arguments)
        bench.at(f"{samples:,} samples: converting", (number + 0.5) / len(sizes))
        made = bench.call(f"{__name__}:converted", arguments)
        first = bench.call(f"{__name__}:opened", arguments | {"plans": False})
        rank = opened[samples] = bench.call(f"{__name__}:opened", arguments | {"plans": True})
        bench.report.require(rank["samples"] == samples, "every sample is in the index")
        for claim, unit, value in (
            ("bytes that every step needs", "bytes a sample", made["step_bytes"]),
            ("bytes of the file", "bytes a sample", made["file_bytes"]),
            ("converted from format 13", "s", made["seconds"]),
            ("converted from format 13: CPU time", "s", made["cpu_s"]),
            ("the new index copied, and on the disk", "s", made["copy_s"]),
            ("the new index copied, and on the disk: CPU time", "s", made["copy_cpu_s"]),
            ("peak memory of the conversion, mapped pages included", "MiB", made["peak_mib"]),
            ("opened by the machine's first process, which reads the checksum", "s", first["open_s"]),
            ("opened by the others", "s", rank["open_s"]),
            ("the sampler's arrays", "s", rank["arrays_s"]),
            ("private memory of opening and the sampler's arrays", "MiB", rank["private_mib"]),
            (f"a sample looked up, of {LOOKED_UP:,} at random", "us", rank["lookup_us"]),
        ):
            bench.report.figure(claim, data, unit, Side("mapped", [value]))
        for claim, unit, name in (("opened", "s", "open_s"), ("private memory", "MiB", "private_mib")):
            if whole:
                bench.report.figure(f"{claim}, read whole as in format 13", data, unit, Side("whole", [whole[name]]))
        for claim, unit, value in (
            ("an epoch's packing plan", "CPU s", rank["plan_s"]),
            ("an epoch's packing plan", "CPU us a sample", rank["plan_s"] / samples * 1e6),
            ("private memory of planning", "MiB", rank["plan_mib"]),
        ):
            bench.report.figure(claim, data, unit, Side("plan", [value]))
        listed = bench.call(f"{__name__}:images_listed", {"folder": str(folder)})
        bench.report.require(listed["images"] == samples, "every image is in the list of those to encode")
        for claim, unit, value in (
            ("images to encode: private memory of the list", "MiB", listed["held_mib"]),
            ("images to encode: most private memory while it is made", "MiB", listed["peak_mib"]),
            ("images to encode: CPU time", "s", listed["cpu_s"]),
        ):
            bench.report.figure(claim, data, unit, Side("listed", [value]))
        shutil.rmtree(folder)
        bench.at(f"{samples:,} samples: other loaders", (number + 0.9) / len(sizes))
        other_indexes(bench, samples, f"{samples:,} samples", shard_samples=SHARD_SAMPLES)
    for few, many in itertools.pairwise(sizes):
        grown = (opened[many]["private_mib"] - opened[few]["private_mib"]) * MIB / (many - few)
        between = f"{few:,} to {many:,} samples"
        bench.report.figure("slope of private memory", between, "bytes a sample", Side("mapped", [grown]))
        grown = (opened[many]["plan_s"] - opened[few]["plan_s"]) * 1e6 / (many - few)
        bench.report.figure("slope of an epoch's packing plan", between, "CPU us a sample", Side("plan", [grown]))


def write_lines(folder: str, samples: int) -> None:
    """Prepared data of format 13 that has an index and no shards."""
    place = Path(folder)
    place.mkdir()
    with pq.ParquetWriter(place / LINES, SCHEMA) as file:
        for lines in _lines(samples):
            file.write_table(lines)
    manifest = Manifest(CONVERTIBLE, "", {}, {LINES: FileSum.of(place / LINES)})
    (place / DONE).write_bytes(manifest.to_bytes())


def converted(folder: str, samples: int) -> dict[str, float]:
    """Convert it. The lines stay, for who reads them whole."""
    import resource

    clock = Clock()
    made = convert(folder)
    conversion = clock.stop(1)
    assert made.samples == samples
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    copy = _copied(Path(folder, NAME))
    train = open_index(Path(folder, NAME))["train"]
    images = train.column("images")
    fields = {field.name: images.values.field(number) for number, field in enumerate(images.type.value_type)}
    needed = [column.indices if isinstance(column := train.column(name), pa.DictionaryArray) else column
              for name in STEP_COLUMNS] + [fields[name] for name in STEP_FIELDS]  # fmt: skip
    step_bytes = (sum(column.buffers()[1].size for column in needed) + images.buffers()[1].size) / samples
    return {
        "seconds": conversion.wall_s,
        "cpu_s": conversion.cpu_s,
        "copy_s": copy.wall_s,
        "copy_cpu_s": copy.cpu_s,
        "peak_mib": peak_mib,
        "step_bytes": round(step_bytes, 2),
        "file_bytes": Path(folder, NAME).stat().st_size / samples,
    }


def _copied(path: Path) -> Measured:
    """A plain copy of a file, as far as the disk: what a conversion that only writes would take."""
    clock, copy = Clock(), path.with_suffix(".copy")
    with path.open("rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target, COPIED_BYTES)
        os.fsync(target.fileno())
    copied = clock.stop(1)
    copy.unlink()
    return copied


def opened(folder: str, samples: int, plans: bool) -> dict[str, float]:
    """Open the index and take what a sampler takes of it, as a rank does."""
    # A benchmark's processes have temporary folders of their own, a machine's one cache, with the file's checksum.
    os.environ["VLMPIPE_CACHE_DIR"] = str(Path(folder) / "cache")
    gc.collect()
    before, began = private_mib(), time.perf_counter()
    split = Index.load(folder).split("train")
    open_s, began = time.perf_counter() - began, time.perf_counter()
    data = DataConfig(source="unused.json", sequence_length=4096, max_images_per_sequence=16)
    sampler = PackedBatchSampler(split, data, seed=0, global_batch_size=256)
    assert len(split.shard_numbers) == len(sampler.tokens)
    arrays_s, own_mib = time.perf_counter() - began, private_mib() - before
    numbers = np.random.default_rng(0).integers(0, samples, LOOKED_UP).tolist()
    began = time.perf_counter()
    for number in numbers:
        split.sample_location(number), split.image_sizes(number), split.ids[number], split.image_sha256(number)
    figures = {
        "samples": len(split),
        "open_s": open_s,
        "arrays_s": arrays_s,
        "private_mib": own_mib,
        "lookup_us": (time.perf_counter() - began) / LOOKED_UP * 1e6,
    }
    if plans:
        before, clock = private_mib(), Clock()
        sampler.plan(0)
        figures |= {"plan_s": clock.stop(1).cpu_s, "plan_mib": private_mib() - before}
    return figures


def images_listed(folder: str) -> dict[str, float]:
    """List the distinct images, as the step that encodes them does."""
    index = Index.load(folder)
    before, peak, clock = private_mib(), PeakMemory(WATCH_S), Clock()
    images = index.unique_images()
    cpu_s = clock.stop(1).cpu_s
    return {
        "images": len(images),
        "held_mib": private_mib() - before,
        "peak_mib": peak.stop().own_mib - before,
        "cpu_s": cpu_s,
    }


def read_whole(folder: str, samples: int) -> dict[str, float]:
    """What the trainer did up to format 13: all columns in memory, ids as a list, lengths as 64-bit integers."""
    before, began = private_mib(), time.perf_counter()
    table = pq.read_table(Path(folder, LINES))
    table = table.filter(pa.compute.equal(table.column("split"), "train"))
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    del table
    ids = columns["id"].to_pylist()
    lengths = [
        np.asarray(columns[name].to_numpy(), np.int64) for name in ("tokens", "label_tokens", "image_tokens", "turns")
    ]
    assert len(ids) == len(lengths[0]) == samples
    return {"open_s": time.perf_counter() - began, "private_mib": private_mib() - before}


def _lines(samples: int) -> Iterator[pa.Table]:
    """Lines of the training split, with text of log-normal length beside an image of one of three sizes."""
    random = np.random.default_rng(0)
    for first in range(0, samples, LINES_AT_ONCE):
        count = min(LINES_AT_ONCE, samples - first)
        numbers = range(first, first + count)
        ids = [f"sample-{number:09d}" for number in numbers]
        offsets = np.array([number % SHARD_SAMPLES for number in numbers]) * 50_000
        image_tokens = random.choice([144, 256, 576], count).astype(np.int32)
        text = np.clip(random.lognormal(np.log(120), 0.8, count), 10, 1000).astype(np.int32)
        starts = pa.array(np.arange(count + 1, dtype=np.int32))

        def lists(values: Any, kind: pa.DataType, starts: pa.Array = starts) -> pa.Array:
            return pa.ListArray.from_arrays(starts, pa.array(values, kind))

        columns = [
            ids,
            ids,
            ["train"] * count,
            [shard_name("train", number // SHARD_SAMPLES) for number in numbers],
            offsets,
            np.full(count, 400),
            lists(offsets + 1024, pa.int64()),
            lists(np.full(count, 45_000), pa.int64()),
            lists(_hex(random, count, 32), pa.string()),
            lists(np.full(count, 336), pa.int32()),
            lists(np.full(count, 336), pa.int32()),
            lists(image_tokens, pa.int32()),
            image_tokens,
            image_tokens + text,
            text // 2,
            np.full(count, 1),
            lists(["all"] * count, pa.string()),
            _hex(random, count, 16),
        ]
        yield pa.table(
            [
                column if isinstance(column, pa.Array) else pa.array(column, field.type)
                for column, field in zip(columns, SCHEMA, strict=True)
            ],
            SCHEMA,
        )


def _hex(random: np.random.Generator, count: int, width: int) -> list[str]:
    digits = random.bytes(count * width).hex()
    return [digits[start : start + 2 * width] for start in range(0, len(digits), 2 * width)]
