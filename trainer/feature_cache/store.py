"""The feature store: outputs of a frozen vision tower by image content.

`features/<key>/` holds immutable safetensors shards, each with a JSON sidecar that names its images and checksum, and a
description of the key, which covers tower weights, image processing, layer and dtype. A shard exists once its sidecar
does. Shards are named after their images, so that writing one again is harmless and new images only add shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.train_options import Precision
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage.base import Storage, crc32c_of_file, join_uri
from vlmpipe.trainer.storage.records import write_record

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 2
DTYPE = "bfloat16"
DESCRIPTION = "description.json"
SHARD = ".safetensors"
SIDECAR = ".json"


def describe_features(config: ModelConfig, precision: Precision) -> dict[str, object]:
    """All that decides the features, as plain JSON. Stored beside them to explain cache misses.

    The tower encodes in bf16 for runs in bf16, and else in fp32.
    """
    family = family_of(config)
    description = {
        "format": FORMAT_VERSION,
        "dtype": DTYPE,
        "family": config.family,
        "tower": family.feature_description(config),
        "processor": family.image_processor(config).to_dict(),
    }
    if precision == "bf16":
        description["compute"] = "bfloat16"
    return dict(json.loads(json.dumps(description, default=str)))


def features_key(config: ModelConfig, precision: Precision) -> str:
    """Address of the features of this tower: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(describe_features(config, precision), sort_keys=True).encode()).hexdigest()[:32]


def features_uri(features_root: str, config: ModelConfig, precision: Precision) -> str:
    """URI of the features of this tower."""
    return join_uri(features_root, features_key(config, precision))


def write_description(store: Storage, config: ModelConfig, precision: Precision) -> None:
    """Write the description of this store's key."""
    write_record(store, DESCRIPTION, describe_features(config, precision), indent=1)


def shard_name(images: Sequence[str]) -> str:
    """Name of the shard that holds exactly these images."""
    return "shard-" + hashlib.sha256("\n".join(images).encode()).hexdigest()[:32]


def write_shard(store: Storage, scratch: Path, features: dict[str, Tensor], *, tower_sha256: str) -> None:
    """Write one shard, {image sha256: (tokens, hidden) bf16}, then the sidecar that makes it exist.

    `tower_sha256`: digest of the weights of the tower that made the features.
    """
    from safetensors.torch import save_file

    images = sorted(features)
    name = shard_name(images)
    file = scratch / f"{name}{SHARD}"
    save_file({image: features[image].contiguous() for image in images}, file)
    store.upload(file, file.name)
    sums = {"bytes": file.stat().st_size, "crc32c": crc32c_of_file(file)}
    sidecar = {"tower_sha256": tower_sha256, "images": images, **sums}
    write_record(store, f"{name}{SIDECAR}", sidecar)
    file.unlink()
