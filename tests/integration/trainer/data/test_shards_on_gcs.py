"""Rows from shards in a bucket: the same as from a folder, with a cache that holds only some of the shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.data.bucket_shards import EPOCHS, SHUFFLE_SHARDS, BucketShards
from tests.support.gcs import QUICK_RETRY
from tests.support.trainer.runs import encode_features, losses, make_run, train_runs
from vlmpipe.trainer.data.shards.disk_cache import files_in
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage


@pytest.fixture
def data(tmp_path: Path, gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketShards]:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return BucketShards(tmp_path, gcs_server)


def test_rows_from_a_bucket_are_those_of_a_folder(data: BucketShards) -> None:
    assert len(data.split.shards) > 3 * SHUFFLE_SHARDS
    bound = 3 * SHUFFLE_SHARDS * max(data.sizes.values())
    rows = data.rows(data.remote, bound)
    assert rows == data.rows(data.local, bound)
    assert set(data.downloads()) == set(data.split.shards)
    assert data.downloads().total() <= 1.25 * EPOCHS * len(data.split.shards)
    assert sum(file.bytes for file in files_in(data.cache)) <= bound


def test_resuming_in_the_middle_reads_what_would_have_come(data: BucketShards) -> None:
    bound = 3 * SHUFFLE_SHARDS * max(data.sizes.values())
    assert data.rows(data.remote, bound, first_step=7) == data.rows(data.local, bound)[7:]


def test_damaged_download_is_repeated(data: BucketShards) -> None:
    bound = sum(data.sizes.values())
    data.server.faults.append(Fault("corrupt", path=r"/o/.*\.tar\?alt=media"))
    assert data.rows(data.remote, bound) == data.rows(data.local, bound)
    assert data.server.faults[0].times == 0


def test_a_shard_that_was_changed_in_the_bucket_is_named(data: BucketShards) -> None:
    shard = data.split.shards[0]
    content = data.remote.read(shard)
    data.remote.write(shard, content[:-1] + bytes([content[-1] ^ 1]))  # the store's own checksum follows the change
    with pytest.raises(DataError, match=f"{shard} is damaged: .*CRC32C.*fetched 2 times"):
        data.rows(data.remote, sum(data.sizes.values()))


def test_unresponsive_bucket_is_reported(data: BucketShards) -> None:
    patience = QUICK_RETRY.with_timeout(0.3)
    remote = GcsStorage(data.remote.root_uri, client=data.server.client(), retry=patience)
    loader = data.loader(remote, sum(data.sizes.values()))
    data.server.faults.append(Fault("status", path="/o/", times=10_000))
    with pytest.raises(UserError, match="did not answer") as caught:
        loader.sequences_for_step(0, 0, 1)
    loader.close()
    assert caught.value.code == ExitCode.UNAVAILABLE


@pytest.mark.slow
def test_two_processes_train_from_a_bucket_as_from_a_folder(
    tmp_path: Path, gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    changes = {"data.max_samples": 200, "data.shard_samples": 8, "data.shuffle_shards": 2, "train.epochs": 2}
    changes |= {"features.shard_images": 8, "data.shard_cache_gib": 0.0002}  # ten shards of data
    online = [make_run(tmp_path, name, changes, features="off") for name in ("folder", "bucket")]
    no_shard_fits = {"data.shard_reading": "ranges", "data.shard_cache_gib": 1e-6}
    by_range = make_run(tmp_path, "ranges", {**changes, **no_shard_fits}, features="off")
    changes["data.shard_cache_gib"] = 0.0005  # as many, and ten of features
    cached = [make_run(tmp_path, f"{name}-cached", changes) for name in ("folder", "bucket")]
    encode_features(cached[0])
    prepared, features = (
        copied_to_bucket(uri) for uri in (cached[0].pointers().prepared_uri, cached[0].pointers().features_uri)
    )
    for job in (online[1], cached[1], by_range):
        pointers = job.pointers().model_copy(update={"prepared_uri": prepared, "features_uri": features})
        open_storage(job.run.run_uri).write("prepared.json", pointers.model_dump_json().encode())
    train_runs([by_range], processes=2)
    ranges = [line for line in map(unquote, gcs_server.requests) if "/shards/train-" in line and "alt=media" in line]
    lines = [json.loads(line) for line in open_storage(by_range.run.run_uri).read("metrics.jsonl").splitlines()]
    steps = np.diff([0, *(line["step"] for line in lines)])
    counted = sum(count * line["class_b_requests"] for count, line in zip(steps, lines, strict=True))
    assert 300 < len(ranges) <= counted + 1, "two epochs of some 180 samples, each by one request"
    gcs_server.requests.clear()
    train_runs([*online, *cached], processes=2)
    assert losses(by_range) == losses(online[0])
    for folder, bucket in (online, cached):
        assert losses(folder) == losses(bucket) and len(losses(folder)) > 2
    sent = Counter(unquote(line).partition("?")[0] for line in gcs_server.requests if "alt=media" in line)
    for suffix, runs in ((".tar", 2), (".safetensors", 1)):
        counts = [count for name, count in sent.items() if name.endswith(suffix) and "eval" not in name]
        assert len(counts) > 20
        # Two epochs of each run, both processes together: a shard is fetched about once in each of them.
        assert runs * len(counts) <= sum(counts) <= 1.2 * 2 * runs * len(counts)


def copied_to_bucket(uri: str) -> str:
    """A copy of a folder in the bucket."""
    local = LocalStorage(uri)
    remote = open_storage(f"gs://bucket/{local.root.parent.name}/{local.root.name}")
    for info in local.list():
        remote.upload(local.path(info.name), info.name)
    return remote.root_uri
