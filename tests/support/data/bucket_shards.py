"""Prepared data of a dozen shards in the stand-in for Cloud Storage, and loaders of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.fakes.gcs.server import FakeGcs
from tests.support.data.prepared import prepare_llava
from tests.support.gcs import QUICK_RETRY
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.disk_cache import CACHE_FOLDER, GIB, open_shards
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.sample_ranges import SampleRanges, shard_versions
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.data.shards.verified_files import DataShards
from vlmpipe.trainer.dataloading.readers import Readers
from vlmpipe.trainer.models.image_tokens import SQUARES
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

SHUFFLE_SHARDS, EPOCHS = 2, 2


class BucketShards:
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
        """A loader of whole shards."""
        readers = Readers(open_shards(DataShards(storage), cache_gib=cache_bytes / GIB)[0], None)
        ahead = readers.fetch_ahead(self.split, self.sequence, self.sequence.num_steps(EPOCHS), SHUFFLE_SHARDS)
        chat = Chat.load(self.local, SQUARES)
        return PackedLoader(self.split, self.sequence, chat, readers.samples, images=True, ahead=ahead)

    def by_range(self, *, images: bool = True, patience_s: float = 5.0) -> PackedLoader:
        """A loader that reads the bucket by range."""
        versions = shard_versions(self.remote, self.split.shards)
        ranges = SampleRanges(self.split, self.remote, versions, images=images, patience_s=patience_s)
        chat, unused = Chat.load(self.local, SQUARES), ShardReader.open(self.local)
        return PackedLoader(self.split, self.sequence, chat, unused, images=images, ranges=ranges)

    def rows(self, storage: Storage, cache_bytes: int, first_step: int = 0) -> list[Any]:
        """What a loader of whole shards reads."""
        return self.rows_of(self.loader(storage, cache_bytes), first_step)

    def rows_of(self, loader: PackedLoader, first_step: int = 0) -> list[Any]:
        """What a loader reads from a step on."""
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
