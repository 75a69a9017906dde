"""Preparation in chunks with real processes, and with everything in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.data.chunks import CHUNK, RECORDS, ChunkedSet, fixed_tokenizer, progress_of
from tests.support.data.formats import Captioned, captioned, write_parquet, write_tars
from tests.support.data.prepared import job_config, png, prepared_files, record, run_prepare
from vlmpipe.trainer.data.prepare.pipeline import plan_chunks, prepare_share
from vlmpipe.trainer.data.shards.disk_cache import CACHE_FOLDER, GIB
from vlmpipe.trainer.data.sources.file_patterns import SHARE_OF_CACHE, SourceFiles
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage

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


def test_unchanged_objects_of_a_bucket_are_not_read(data: ChunkedSet, bucket: FakeGcs) -> None:
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


@pytest.mark.parametrize("write", [write_tars, pytest.param(write_parquet, marks=pytest.mark.slow)])
def test_a_task_fetches_only_the_files_that_hold_its_chunks(
    write: Callable[[Path, Sequence[Captioned], int], str],
    memory: Path,
    bucket: FakeGcs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    files, tasks, folder = 24, 3, memory / "set"
    pattern = write(folder, captioned(5 * files), files)
    for path in sorted(folder.iterdir()):
        open_storage(BUCKET).upload(path, path.name)
    three_files_gib = 3 * max(path.stat().st_size for path in folder.iterdir()) / GIB
    settings = {"chunk_samples": CHUNK, "workers": 1, "shard_cache_gib": three_files_gib / SHARE_OF_CACHE}
    tokenizer = fixed_tokenizer(memory / "tokenizer")
    remote, local = (
        job_config(memory / name, tokenizer=tokenizer, source=f"{source}/{pattern}".rstrip("/"), **settings)
        for name, source in (("remote", BUCKET), ("local", str(folder)))
    )

    def fetched() -> list[str]:
        sent = [unquote(line).partition("?")[0] for line in bucket.requests if "alt=media" in line]
        bucket.requests.clear()
        return [name.rpartition("/")[2] for name in sent]

    bucket.requests.clear()
    chunks, identity = astuple(plan_chunks(remote, progress_of(remote)))
    assert sorted(fetched()) == sorted(path.name for path in folder.iterdir())
    for task in range(tasks):  # each on a machine of its own, with room for three files
        cache = tmp_path / f"cache-{task}"
        monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(cache))
        mine = prepare_share(remote, identity, task, tasks, progress_of(remote))
        assert 0 < mine < chunks
        names = fetched()
        # About 8 records a chunk, 5 a file: a third of the chunks needs some two thirds of the files at most.
        assert len(names) == len(set(names)) <= 0.8 * files
        kept = sum(path.stat().st_size for path in (cache / CACHE_FOLDER / SourceFiles.kind).glob("*.whole"))
        assert 0 < kept <= three_files_gib * GIB
    made = run_prepare(remote)
    assert made.chunks and made.chunks.prepared == 0
    assert set(fetched()) <= {"train-00000.parquet"}, "which tells whether images are names of files"
    one = {name: data for name, data in prepared_files(run_prepare(local).uri).items() if name != "DONE"}
    assert one == {name: data for name, data in prepared_files(made.uri).items() if name != "DONE"}


def upload(store: Storage, data: ChunkedSet) -> None:
    for path in sorted(data.images.iterdir()):
        store.upload(path, f"images/{path.name}")
    store.upload(data.folder / "set.jsonl", "set.jsonl")
