"""Preparation in chunks with real processes, and with everything in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chunk_fixture import RECORDS, ChunkedSet, fixed_tokenizer
from tests.data_fixture import png, prepared_files, record, run_prepare
from tests.fakes.gcs import FakeGcs
from trainer.storage import Storage, open_storage

BUCKET = "gs://bucket/data"


@pytest.fixture
def data(memory: Path) -> ChunkedSet:
    return ChunkedSet(memory, fixed_tokenizer(memory / "tokenizer"))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGcs]:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    with FakeGcs(buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


@pytest.mark.timeout(300)
def test_processes_give_the_bytes_of_one(data: ChunkedSet) -> None:
    data.spoil()
    alone = run_prepare(data.config("alone"))
    together = run_prepare(data.config("together", workers=2))
    assert together.chunks == alone.chunks and alone.chunks and alone.chunks.prepared > 3
    assert prepared_files(together.uri) == prepared_files(alone.uri)


def test_in_a_bucket_nothing_is_read_that_did_not_change(data: ChunkedSet, bucket: FakeGcs) -> None:
    store = open_storage(BUCKET)

    def prepared() -> tuple[dict[str, bytes], int, list[str]]:
        """Files, chunks that were prepared, and the requests of this preparation."""
        config = data.config(image_folder=BUCKET + "/images")
        upload(store, data)
        bucket.requests.clear()
        made = run_prepare(
            config.model_copy(
                update={
                    "run": config.run.model_copy(update={"root_uri": "gs://bucket/root"}),
                    "data": config.data.model_copy(update={"source": BUCKET + "/set.jsonl"}),
                }
            )
        )
        files = open_storage(made.uri)
        requests = list(bucket.requests)
        return {info.name: files.read(info.name) for info in files.list()}, made.chunks.prepared, requests

    before, _, _ = prepared()
    data.records.append(record(RECORDS))
    (data.images / f"{RECORDS}.png").write_bytes(png(RECORDS))
    after, chunks, requests = prepared()
    assert chunks == 1
    assert {n for n in before if n.endswith(".tar")} <= {n for n in after if n.endswith(".tar")}
    fetched = [r for r in requests if r.startswith("GET /download") and "images" in r]
    assert 0 < len(fetched) <= 17  # those of the last chunk
    shards = [r for r in requests if ".tar" in r]
    assert sum("rewriteTo" in r for r in shards) == sum(name.endswith(".tar") for name in after)
    assert not [r for r in shards if r.startswith("GET /download")]
    local = run_prepare(data.config("local"))
    same = {n: b for n, b in prepared_files(local.uri).items() if n != "DONE"}
    assert same == {n: b for n, b in after.items() if n != "DONE"}


def upload(store: Storage, data: ChunkedSet) -> None:
    for path in sorted(data.images.iterdir()):
        store.upload(path, f"images/{path.name}")
    store.upload(data.folder / "set.jsonl", "set.jsonl")
