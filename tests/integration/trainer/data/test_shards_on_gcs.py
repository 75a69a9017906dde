"""Rows from shards in a bucket: the same as from a folder, with a cache that holds only some of the shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.data.prepared import prepare_llava
from tests.support.gcs import QUICK_RETRY
from tests.support.short_form import only_whole
from tests.support.trainer.runs import encode_features, losses, make_run, train_runs
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.disk_cache import CACHE_FOLDER, GIB, files_in, open_shards
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.verified_files import DataShards
from vlmpipe.trainer.dataloading.readers import Readers
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import SQUARES
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

SHUFFLE_SHARDS, EPOCHS = 2, 2


class Fixture:
    """Prepared data of a dozen shards, in a folder and in a bucket."""

    def __init__(self, folder: Path, server: FakeGcs) -> None:
        _, prepared = prepare_llava(folder, count=40, shard_samples=3)
        self.server, self.local = server, LocalStorage(prepared.uri)
        self.remote = GcsStorage("gs://bucket/prepared", client=server.client(), retry=QUICK_RETRY)
        for info in self.local.list():
            self.remote.upload(self.local.path(info.name), info.name)
        self.cache = folder / "cache" / CACHE_FOLDER / "data"
        self.split = Index.load(prepared.uri).split("train")
        self.sizes = {shard: self.local.path(shard).stat().st_size for shard in self.split.shards}

        self.sequence = PackedBatchSampler(
            self.split,
            DataConfig(
                source="unused.json", sequence_length=256, max_images_per_sequence=8, shuffle_shards=SHUFFLE_SHARDS
            ),
            seed=3,
            global_batch_size=1,
        )

    def loader(self, storage: Storage, cache_bytes: int) -> PackedLoader:
        readers = Readers(open_shards(DataShards(storage), cache_gib=cache_bytes / GIB)[0], None)
        ahead = readers.fetch_ahead(self.split, self.sequence, self.sequence.num_steps(EPOCHS), SHUFFLE_SHARDS)
        chat = Chat.load(self.local, SQUARES)
        return PackedLoader(self.split, self.sequence, chat, readers.samples, images=True, ahead=ahead)

    def rows(self, storage: Storage, cache_bytes: int, first_step: int = 0) -> list[Any]:
        loader = self.loader(storage, cache_bytes)
        try:
            steps = range(first_step, self.sequence.num_steps(EPOCHS))
            rows = [row for step in steps for row in loader.sequences_for_step(step, 0, 1)]
        finally:
            loader.close()
        return [(row.sample_ids, row.input_ids.tolist(), row.images) for row in rows]

    def downloads(self) -> Counter[str]:
        """How often each shard was sent."""
        sent = [unquote(line) for line in self.server.requests if "alt=media" in line]
        names = [line.partition("/o/")[2].partition("?")[0].removeprefix("prepared/") for line in sent]
        return Counter(name for name in names if name.endswith(".tar"))


@pytest.fixture
def data(tmp_path: Path, gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return Fixture(tmp_path, gcs_server)


def test_rows_from_a_bucket_are_those_of_a_folder(data: Fixture) -> None:
    assert len(data.split.shards) > 3 * SHUFFLE_SHARDS
    bound = 3 * SHUFFLE_SHARDS * max(data.sizes.values())
    rows = data.rows(data.remote, bound)
    assert rows == data.rows(data.local, bound)
    assert set(data.downloads()) == set(data.split.shards)
    assert data.downloads().total() <= 1.25 * EPOCHS * len(data.split.shards)
    assert sum(file.bytes for file in files_in(data.cache)) <= bound


def test_resuming_in_the_middle_reads_what_would_have_come(data: Fixture) -> None:
    bound = 3 * SHUFFLE_SHARDS * max(data.sizes.values())
    assert data.rows(data.remote, bound, first_step=7) == data.rows(data.local, bound)[7:]


def test_damaged_download_is_repeated(data: Fixture) -> None:
    bound = sum(data.sizes.values())
    data.server.faults.append(Fault("corrupt", path=r"/o/.*\.tar\?alt=media"))
    assert data.rows(data.remote, bound) == data.rows(data.local, bound)
    assert data.server.faults[0].times == 0


def test_a_shard_that_was_changed_in_the_bucket_is_named(data: Fixture) -> None:
    shard = data.split.shards[0]
    content = data.remote.read(shard)
    data.remote.write(shard, content[:-1] + bytes([content[-1] ^ 1]))  # the store's own checksum follows the change
    with pytest.raises(DataError, match=f"{shard} is damaged: .*CRC32C.*fetched 2 times"):
        data.rows(data.remote, sum(data.sizes.values()))


def test_unresponsive_bucket_is_reported(data: Fixture) -> None:
    patience = QUICK_RETRY.with_timeout(0.3)
    remote = GcsStorage(data.remote.root_uri, client=data.server.client(), retry=patience)
    loader = data.loader(remote, sum(data.sizes.values()))
    data.server.faults.append(Fault("status", path="/o/", times=10_000))
    with pytest.raises(UserError, match="did not answer") as caught:
        loader.sequences_for_step(0, 0, 1)
    loader.close()
    assert caught.value.code == ExitCode.UNAVAILABLE


@only_whole
def test_two_processes_train_from_a_bucket_as_from_a_folder(
    tmp_path: Path, gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    changes = {"data.max_samples": 200, "data.shard_samples": 8, "data.shuffle_shards": 2, "train.epochs": 2}
    changes |= {"features.shard_images": 8, "data.shard_cache_gib": 0.0002}  # ten shards of data
    online = [make_run(tmp_path, name, changes, features="off") for name in ("folder", "bucket")]
    changes["data.shard_cache_gib"] = 0.0005  # as many, and ten of features
    cached = [make_run(tmp_path, f"{name}-cached", changes) for name in ("folder", "bucket")]
    encode_features(cached[0])
    prepared, features = (
        copied_to_bucket(uri) for uri in (cached[0].pointers().prepared_uri, cached[0].pointers().features_uri)
    )
    for job in (online[1], cached[1]):
        pointers = job.pointers().model_copy(update={"prepared_uri": prepared, "features_uri": features})
        open_storage(job.run.run_uri).write("prepared.json", pointers.model_dump_json().encode())
    train_runs([*online, *cached], processes=2)
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
