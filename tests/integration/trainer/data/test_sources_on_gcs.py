"""Data sets in a bucket are read file by file and row by row: neither memory nor disk holds a whole set."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vlmpipe
from tests.fakes.gcs.server import FakeGcs
from tests.support.data.prepared import conversation, job_config, llava_folder, png, prepared_files, run_prepare
from tests.support.data.videos import frame_in, write_video
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare import pipeline
from vlmpipe.trainer.data.prepare.chunks.witness import SourceChangedError
from vlmpipe.trainer.data.rejects import RejectedError
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.shards.disk_cache import GIB
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.storage.gcs import GcsStorage

FILES, ROWS, IMAGE_BYTES = 3, 128, 32 << 10
FILE_BYTES = ROWS * IMAGE_BYTES
FRAMES = 16  # of an allocation: the way from pyarrow or http back to this package


@pytest.fixture
def bucket(gcs_server: FakeGcs, gcs: GcsStorage, monkeypatch: pytest.MonkeyPatch) -> GcsStorage:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    return gcs


def batches(file: int) -> list[pa.RecordBatch]:
    """Eight of random bytes, as large as images."""
    found = []
    for start in range(0, ROWS, ROWS // 8):
        rows = range(start, start + ROWS // 8)
        images = [{"bytes": os.urandom(IMAGE_BYTES), "path": f"{n}.png"} for n in rows]
        found.append(
            pa.RecordBatch.from_pylist([{"image": i, "text": f"{file} {n}"} for n, i in zip(rows, images, strict=True)])
        )
    return found


def write(path: Path, content: list[pa.RecordBatch]) -> Path:
    """Parquet with a row group for each batch, or what `save_to_disk` of Hugging Face's datasets writes."""
    schema = content[0].schema
    if path.suffix == ".parquet":
        with pq.ParquetWriter(path, schema) as parquet:
            for batch in content:
                parquet.write_table(pa.Table.from_batches([batch]))
        return path
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for batch in content:
            stream.write_batch(batch)
    return path


def allocated_by_the_product() -> int:
    """Bytes; the bucket's threads in this process, which may be late to drop what they sent, do not count."""
    package = Path(vlmpipe.__file__).parent
    product = tracemalloc.Filter(True, f"{package}/*", all_frames=True)
    bucket = tracemalloc.Filter(False, f"{package}/rehearsal/*", all_frames=True)
    traces = tracemalloc.take_snapshot().filter_traces([product, bucket]).traces
    return sum(trace.size for trace in traces)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_rows_are_read_within_the_memory_of_a_part_of_a_file(bucket: GcsStorage, tmp_path: Path, suffix: str) -> None:
    for number in range(FILES):
        path = write(tmp_path / f"data-{number:05}.{suffix}", batches(number))
        bucket.upload(path, f"set/train/{path.name}")
        path.unlink()
    config = DataConfig(
        source=bucket.uri("set"), sequence_length=100, shard_cache_gib=2.5 * FILE_BYTES / GIB  # half of it for sources
    )  # fmt: skip
    source = open_source(config)
    tracemalloc.start(FRAMES)
    before = pa.total_allocated_bytes()
    read = held = on_disk = 0
    for sample in source:
        assert isinstance(sample, Sample) and len(sample.images[0].read()) == IMAGE_BYTES
        read += 1
        if read % (ROWS // 2) == 0:
            held = max(held, pa.total_allocated_bytes() - before + allocated_by_the_product())
            on_disk = max(
                on_disk, sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
            )
    tracemalloc.stop()
    assert read == FILES * ROWS
    assert held < FILE_BYTES
    assert on_disk < 2 * FILE_BYTES * 1.01


def test_an_image_that_is_rewritten_while_data_is_prepared_is_noticed(
    bucket: GcsStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing that names the set and the one that its images are known by."""
    _, records = llava_folder(tmp_path, count=12)
    for path in (tmp_path / "images").iterdir():
        bucket.upload(path, f"set/images/{path.name}")
    bucket.write("set/data.json", json.dumps(records).encode())
    addresses = {"source": bucket.uri("set/data.json"), "image_folder": bucket.uri("set/images")}
    config = job_config(tmp_path / "root", **addresses)
    build = pipeline._build

    def rewritten(*arguments: Any) -> Any:
        bucket.write("set/images/3.png", png(99))
        return build(*arguments)

    monkeypatch.setattr(pipeline, "_build", rewritten)
    with pytest.raises(SourceChangedError):
        run_prepare(config)
    monkeypatch.setattr(pipeline, "_build", build)
    prepared = run_prepare(config)
    assert not prepared.reused and prepared.counts["accepted"] == 12
    assert any(png(99) in content for content in prepared_files(prepared.uri).values())


def test_videos_in_a_bucket_are_named_by_their_whole_address(bucket: GcsStorage, tmp_path: Path) -> None:
    bucket.upload(write_video(tmp_path / "a.mp4"), "clips/a.mp4")
    part = {"fileData": {"mimeType": "video/mp4", "fileUri": bucket.uri("clips/a.mp4")}}
    said: list[dict[str, Any]] = [{"role": "user", "parts": [part, {"text": "What?"}]}]
    said.append({"role": "model", "parts": [{"text": "Columns."}]})
    elsewhere = {"image": "gs://other/a.png", "conversations": conversation("<image>", "x")}
    bucket.write("records.jsonl", "\n".join(map(json.dumps, [{"contents": said}, elsewhere])).encode())
    config = DataConfig(
        source=bucket.uri("records.jsonl"), image_folder=bucket.uri("clips"), sequence_length=100, video_frames=2
    )
    clip, other = open_source(config)
    assert isinstance(clip, Sample) and [frame_in(image) for image in clip.images] == [10, 30]
    assert isinstance(other, Sample)  # within the folder there is none of this name
    with pytest.raises(RejectedError, match="gs:"):
        other.images[0].read()
