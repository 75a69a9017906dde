"""The feature store: what a frozen tower outputs, by image content.

`features/<key>/` holds immutable safetensors shards, each with a JSON sidecar that names its images and its checksum,
and a description of what the key stands for.
A shard counts only when its sidecar exists, and its name follows from the images in it, so writing it again is
harmless and new images only add shards. `key` covers what decides the numbers: tower weights, image processing, layer
and dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import ModelConfig
from trainer.errors import DataError
from trainer.models.table import family_of
from trainer.storage import Storage, crc32c_of_file, join_uri, open_storage

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
DTYPE = "bfloat16"
DESCRIPTION = "description.json"


def describe_features(config: ModelConfig) -> dict[str, Any]:
    """All that decides the numbers, as plain JSON. Kept beside them, for people who wonder why they are not found."""
    family = family_of(config)
    description = {
        "format": FORMAT_VERSION,
        "dtype": DTYPE,
        "family": config.family,
        "tower": family.feature_description(config),
        "processor": family.image_processor(config).to_dict(),
    }
    return dict(json.loads(json.dumps(description, default=str)))


def features_key(config: ModelConfig) -> str:
    """Address of the features of this tower: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(describe_features(config), sort_keys=True).encode()).hexdigest()[:32]


def features_uri(features_root: str, config: ModelConfig) -> str:
    """Where the features of this tower are kept."""
    return join_uri(features_root, features_key(config))


def write_description(store: Storage, config: ModelConfig) -> None:
    """Say what this store's key stands for. Equal for all who write it."""
    store.write(DESCRIPTION, json.dumps(describe_features(config), indent=1, sort_keys=True).encode())


def missing_images(uri: str, wanted: Iterable[str]) -> list[str]:
    """The images (sha256) that have no features yet, sorted."""
    return sorted(set(wanted) - set(_shard_of_image(open_storage(uri))))


def shard_name(images: Sequence[str]) -> str:
    """Name of the shard that holds exactly these images."""
    return "shard-" + hashlib.sha256("\n".join(images).encode()).hexdigest()[:32]


def write_shard(store: Storage, scratch: Path, features: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write one shard: {image sha256: (tokens, hidden) bf16}, then the sidecar that makes it count."""
    from safetensors.torch import save_file

    images = sorted(features)
    name = shard_name(images)
    file = scratch / f"{name}.safetensors"
    save_file({image: features[image].contiguous() for image in images}, file)
    store.upload(file, file.name)
    sidecar = {**description, "images": images, "bytes": file.stat().st_size, "crc32c": crc32c_of_file(file)}
    store.write(f"{name}.json", json.dumps(sidecar).encode())
    file.unlink()


class FeatureReader:
    """Random access to cached features by image. A shard is verified once, before its first feature is used."""

    def __init__(self, uri: str) -> None:
        self._store = open_storage(uri)
        self._shard_of_image = _shard_of_image(self._store)
        self._open: dict[str, Any] = {}

    def read(self, image_sha256: str) -> Tensor:
        """Features of one image: (tokens, hidden) bf16. Raises DataError for an image that was never encoded."""
        if image_sha256 not in self._shard_of_image:
            raise DataError(
                f"no cached features for image {image_sha256[:12]}... in {self._store.root_uri}",
                expected="every image of the prepared data encoded by the cache_features step",
                fix="run the pipeline again: it encodes what is missing; or set features.cache=off",
            )
        return self._shard(self._shard_of_image[image_sha256]).get_tensor(image_sha256)

    def tower_sha256(self) -> str | None:
        """Digest of the tower weights that made these features; None for an empty store."""
        for name in sorted(set(self._shard_of_image.values())):
            return str(json.loads(self._store.read(f"{name}.json"))["tower_sha256"])
        return None

    def _shard(self, name: str) -> Any:
        if name not in self._open:
            from safetensors import safe_open

            path = self._store.fetch(f"{name}.safetensors")
            sidecar = json.loads(self._store.read(f"{name}.json"))
            if path.stat().st_size != sidecar["bytes"] or crc32c_of_file(path) != sidecar["crc32c"]:
                raise DataError(
                    f"feature shard {path} is damaged: its size or CRC32C differs from its sidecar",
                    fix="delete the shard and its .json; the next run encodes its images again",
                )
            self._open[name] = safe_open(path, framework="pt")
        return self._open[name]


def _shard_of_image(store: Storage) -> dict[str, str]:
    found = {}
    for info in store.list():
        if info.name.startswith("shard-") and info.name.endswith(".json"):
            for image in json.loads(store.read(info.name))["images"]:
                found[image] = info.name.removesuffix(".json")
    return found
