"""The `cache_features` job: encode each distinct image that has no features yet, once.

Ranks take every n-th shard of the missing images. A shard is named after its images, so a restarted job only encodes
what is still missing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.distributed.agreement import agree, meet
from vlmpipe.trainer.distributed.process import PATIENCE, ProcessContext, run_worker, start_worker
from vlmpipe.trainer.feature_cache.reader import FeatureShards
from vlmpipe.trainer.feature_cache.store import DESCRIPTION, features_uri, shard_name, write_description, write_shard
from vlmpipe.trainer.models.image_processor import image_preparer, images_within
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.bf16 import cast_to_bf16, use_tf32
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.weights_digest import weights_sha256


def build(job: JobConfig, worker: ProcessContext) -> int:
    """Encode what is missing. Returns the number of images this job encoded, over all ranks. Collective."""
    precision = job.train.precision
    uri = features_uri(job.run.features_root, job.model, precision)
    prepared_uri = job.pointers().prepared_uri
    places = Index.load(prepared_uri).unique_images()
    reader = ShardReader.open(open_prepared(prepared_uri), job.data.shard_cache_gib)
    there = FeatureShards(uri)
    missing = agree(there.missing(places))  # listings of different ranks may differ
    size = images_within(job.model, job.features.shard_images)
    shards = [missing[start : start + size] for start in range(0, len(missing), size)]
    progress = Progress(job.run.run_uri, "cache-features") if worker.is_first else None
    tower = family_of(job.model).build_tower(job.model)
    tower_sha256 = weights_sha256(tower)
    there.require_tower(tower_sha256)  # the key names weights without a revision by their address
    use_tf32(precision, worker.device)
    if precision == "bf16":  # as training without a cache runs it
        cast_to_bf16(tower.parameters())
    tower = tower.to(worker.device)
    store = open_storage(uri)
    if worker.is_first and store.stat(DESCRIPTION) is None:
        write_description(store, job.model, precision)
    with tempfile.TemporaryDirectory(prefix="vlmpipe-features-") as scratch:
        for number, shard in enumerate(shards):
            if number % worker.world_size != worker.rank or store.stat(f"{shard_name(shard)}.json"):
                continue
            features: dict[str, Tensor] = {}
            for batch in encode_images(job, tower, shard, lambda sha256: reader.image(places[sha256]), worker.device):
                features |= {sha256: made.cpu() for sha256, made in batch.items()}
                if progress:
                    done = min(len(missing), number * size + len(features))
                    progress.update(done, len(missing), unit="images")
            write_shard(store, Path(scratch), features, tower_sha256=tower_sha256)
    meet(worker)
    if progress:
        progress.update(len(missing), len(missing), unit="images")
        progress.finish(message=f"encoded {len(missing)} images into {uri}")
    return len(missing)


def encode_images(
    job: JobConfig, tower: nn.Module, images: Sequence[str], read: Callable[[str], bytes], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Features by image, one dictionary per batch. `read` returns an image's encoded bytes."""
    family, prepare = family_of(job.model), image_preparer(job.model)
    size = images_within(job.model, job.features.batch_images)
    if image_form_of(job.model).published:
        size = 1  # how many rows are one image's, only the model knows; an image is hundreds of patches
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        pixels = prepare([read(image) for image in batch]).to(device)
        outputs = family.encode(job.model, tower, pixels.values, pixels.grids)
        yield dict(zip(batch, pixels.features_of_each(outputs), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="vlmpipe.trainer.feature_cache.encode", description=__doc__)
    parser.add_argument("--config", required=True, help="URI of the run's run.json")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    build(JobConfig.load(options.config), start_worker(PATIENCE))


if __name__ == "__main__":
    run_worker(main)
