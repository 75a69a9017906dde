"""The `cache_features` job: encode each distinct image that has no features yet, once.

Ranks take every n-th shard of the missing images. A shard is named after its images, so a restarted job only encodes
what is still missing. Reading, preparing, encoding and writing overlap: each has threads of its own, one step ahead.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from vlmpipe.trainer.gc_control import collector_off

with collector_off():
    import numpy as np
    import torch
    from torch import Tensor, nn

    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.data.shards.image_index import ImageLocation, UniqueImages
    from vlmpipe.trainer.data.shards.index import Index
    from vlmpipe.trainer.data.shards.prepared_files import open_prepared
    from vlmpipe.trainer.data.shards.tar import ShardReader
    from vlmpipe.trainer.distributed.agreement import agree, gather, meet, together
    from vlmpipe.trainer.distributed.process import PATIENCE, ProcessContext, run_worker, start_worker
    from vlmpipe.trainer.feature_cache.reader import FeatureShards
    from vlmpipe.trainer.feature_cache.store import (
        DESCRIPTION,
        SHARD,
        SIDECAR,
        features_uri,
        shard_name,
        write_description,
        write_shard,
    )
    from vlmpipe.trainer.models.image_inputs import Images
    from vlmpipe.trainer.models.image_processor import image_preparer
    from vlmpipe.trainer.models.image_threads import use_threads
    from vlmpipe.trainer.models.image_tokens import image_form_of
    from vlmpipe.trainer.models.layers.bf16 import cast_to_bf16, use_tf32
    from vlmpipe.trainer.models.registry import family_of
    from vlmpipe.trainer.progress import Progress
    from vlmpipe.trainer.storage import open_storage
    from vlmpipe.trainer.storage.base import Storage
    from vlmpipe.trainer.storage.outage import patiently
    from vlmpipe.trainer.storage.transfer import in_parallel
    from vlmpipe.trainer.threads import thread_pool
    from vlmpipe.trainer.weights_digest import weights_sha256

READERS = 2  # threads, each of which reads the images of one batch; two batches wait for each
Batch = TypeVar("Batch")


def build(job: JobConfig, worker: ProcessContext) -> int:
    """Encode images without features. Returns the number of images this job encoded, over all ranks. Collective."""
    precision = job.train.precision
    uri = features_uri(job.run.features_root, job.model, precision)
    prepared_uri = job.pointers().prepared_uri
    reader = ShardReader.open(open_prepared(prepared_uri), job.data.shard_cache_gib)
    there = FeatureShards(uri)
    missing = agreed_missing(Index.load(prepared_uri).unique_images(), there)
    size = job.features.shard_images
    shards = (missing.digits(start, start + size) for start in range(0, len(missing), size))
    progress = Progress(job.run.run_uri, "cache-features") if worker.is_first else None
    tower = family_of(job.model).build_tower(job.model)
    tower_sha256 = node_sha256(tower, worker)
    there.require_tower(tower_sha256)  # the key names weights without a revision by their address
    use_tf32(precision, worker.device)
    if precision == "bf16":  # as training without a cache runs it
        cast_to_bf16(tower.parameters())
    tower = tower.to(worker.device)
    store = open_storage(uri)
    if worker.is_first and store.stat(DESCRIPTION) is None:
        write_description(store, job.model, precision)
    rank = OwnShards(shards, worker, store, lost=there.lost)
    locations: dict[str, ImageLocation] = {}  # of images that are not read yet, of the shards that were begun

    def batches() -> Iterator[Sequence[str]]:
        for shard in rank.begin():
            start = rank.begun[-1][0] * size
            locations.update(zip(shard, missing.locations(start, start + size), strict=True))
            yield from batches_of(job, shard)

    made = encode_batches(job, tower, batches(), lambda sha256: reader.image(locations.pop(sha256)), worker.device)
    features: dict[str, Tensor] = {}
    with (
        tempfile.TemporaryDirectory(prefix="vlmpipe-features-") as folder,
        ShardWriter(
            lambda features: patiently(
                "writing features",
                lambda: write_shard(store, Path(folder), features, tower_sha256=tower_sha256),
                limit_s=job.checkpoint.max_s_without_commit,
                step="cache-features",
            )
        ) as writer,
    ):
        for batch in one_behind(made):
            features |= {sha256: of_image.cpu() for sha256, of_image in batch.items()}
            number, shard = rank.begun[0]
            if progress:
                progress.update(min(len(missing), number * size + len(features)), len(missing), unit="images")
            if len(features) == len(shard):
                rank.begun.popleft()
                writer.submit(features)
                features = {}
    meet(worker)
    if progress:
        progress.update(len(missing), len(missing), unit="images")
        progress.finish(message=f"encoded {len(missing)} images into {uri}")
    return len(missing)


def agreed_missing(images: UniqueImages, store: FeatureShards) -> UniqueImages:
    """The images without features, in their order. Collective: listings of different ranks may differ."""
    lacking = agree(np.packbits(images.lacking(store.images.find)))
    return images.only(np.unpackbits(lacking, count=len(images)).view(np.bool_))


def node_sha256(tower: nn.Module, worker: ProcessContext) -> str:
    """`weights_sha256` of the tower, by the first rank of each node for the others, which read the same files.

    Collective.
    """
    hashed = together(
        worker, "hashing the vision encoder", lambda: weights_sha256(tower) if worker.is_node_leader else ""
    )
    return gather(hashed, worker)[worker.node * worker.local_world_size]


class OwnShards:
    """The shards that this rank encodes."""

    def __init__(
        self, shards: Iterable[Sequence[str]], worker: ProcessContext, store: Storage, *, lost: Sequence[str] = ()
    ) -> None:
        """`lost`: shards of which the sidecar alone is there."""
        self._shards, self._worker, self._store, self._lost = shards, worker, store, frozenset(lost)
        self.begun: deque[tuple[int, Sequence[str]]] = deque()  # taken from `begin`, by number among all ranks'

    def begin(self) -> Iterator[Sequence[str]]:
        """Every n-th shard that no other job has written meanwhile."""
        for number, shard in enumerate(self._shards):
            is_own = number % self._worker.world_size == self._worker.rank
            name = shard_name(shard)
            if is_own and (f"{name}{SHARD}" in self._lost or self._store.stat(f"{name}{SIDECAR}") is None):
                self.begun.append((number, shard))
                yield shard


class ShardWriter:
    """Writes one shard in a thread while the next one is encoded. Errors are raised by the next call or at the end."""

    def __init__(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        self._write, self._pool = write, thread_pool(1, name="features")
        self._last: Future[None] | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)
        if self._last and error is None:
            self._last.result()

    def submit(self, features: dict[str, Tensor]) -> None:
        """Wait for the shard before, so that memory holds two at most."""
        if self._last:
            self._last.result()
        self._last = self._pool.submit(self._write, features)


def one_behind(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Each batch once the next one is under way: the device computes that while the host waits for this one."""
    before: list[Batch] = []
    for batch in batches:
        before.append(batch)
        if len(before) > 1:
            yield before.pop(0)
    yield from before


def encode_images(
    job: JobConfig,
    tower: nn.Module,
    images: Sequence[str],
    read: Callable[[str], bytes],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[dict[str, Tensor]]:
    """Encode these images with `encode_batches`."""
    return encode_batches(job, tower, batches_of(job, images), read, device, dtype)


def batches_of(job: JobConfig, images: Sequence[str]) -> Iterator[Sequence[str]]:
    """The images that are encoded at once."""
    size = job.features.batch_images
    if image_form_of(job.model).published:
        size = 1  # how many rows are one image's, only the model knows; an image is hundreds of patches
    return (images[start : start + size] for start in range(0, len(images), size))


def encode_batches(
    job: JobConfig,
    tower: nn.Module,
    batches: Iterable[Sequence[str]],
    read: Callable[[str], bytes],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[dict[str, Tensor]]:
    """Features by image, one dictionary per batch. `read` returns an image's encoded bytes, in several threads.

    While a batch is encoded the next one is prepared, and images of those after it are read.
    """
    family, prepare = family_of(job.model), image_preparer(job.model)

    def load(batch: Sequence[str]) -> tuple[Sequence[str], list[bytes]]:
        return batch, [read(image) for image in batch]

    def made(loaded: tuple[Sequence[str], list[bytes]]) -> tuple[Sequence[str], Images]:
        batch, images = loaded
        pixels = prepare(images)
        return batch, pixels.pinned() if device.type == "cuda" else pixels

    for batch, pixels in in_parallel(made, in_parallel(load, batches, threads=READERS), threads=1):
        on_device = pixels.to(device)
        outputs = family.encode(job.model, tower, on_device.values, on_device.grids, dtype)
        yield dict(zip(batch, outputs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.feature_cache.encode", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    job = JobConfig.load(options.config)
    use_threads(job.data.loader_threads)
    build(job, start_worker(PATIENCE))


if __name__ == "__main__":
    run_worker(main)
