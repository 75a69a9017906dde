"""Reads features by image from verified shards of the feature store."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.data.packing import Int64Array
from vlmpipe.trainer.data.prefetch import Needs
from vlmpipe.trainer.data.shards.disk_cache import open_shards
from vlmpipe.trainer.data.shards.image_index import digits_of, hashes_of
from vlmpipe.trainer.data.shards.index import SplitIndex
from vlmpipe.trainer.data.shards.verified_files import ShardFiles, Sidecar
from vlmpipe.trainer.errors import ConfigError, DataError, os_errors
from vlmpipe.trainer.feature_cache.image_places import HeldImages, open_places
from vlmpipe.trainer.feature_cache.store import SHARD, SIDECAR, shard_name
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import ObjectInfo, Storage
from vlmpipe.trainer.storage.records import unseal
from vlmpipe.trainer.threads import thread_pool

if TYPE_CHECKING:
    from torch import Tensor

READS = 16  # sidecars at a time
SIDECAR_FIELDS = {"bytes", "crc32c", "tower_sha256"}  # beside the images
HEADER_BYTES = 8  # of the length that a safetensors file begins with (its documentation, "Format")


class FeatureShards:
    """The complete shards of a store and the shard of each image, from the sidecars.

    A shard whose file is gone or has another size than was written does not count, so that its images are encoded
    again: a rule of the bucket, a clean-up or half a copy may have taken the file alone.
    """

    kind = "features"

    def __init__(self, uri: str) -> None:
        self.storage: Storage = open_storage(uri)
        files = self.storage.list()
        places, self.images = open_places(uri, files, lambda: self._complete({info.name: info for info in files}))
        # Digest of the weights of the tower that made all features; None for an empty store.
        self.tower_sha256 = places.tower_sha256
        self.lost = places.lost  # shards that do not count
        self.names = [sidecar.shard for sidecar in places.sidecars]
        self._sidecars = dict(zip(self.names, places.sidecars, strict=True))

    def sizes(self) -> dict[str, int]:
        return {name: sidecar.bytes for name, sidecar in self._sidecars.items()}

    def sidecar(self, shard: str) -> Sidecar:
        if self.storage.stat(shard) is None:
            raise self.damaged(shard, f"{self.storage.uri(shard)} is missing")
        return self._sidecars[shard]

    def damaged(self, shard: str, how: str) -> DataError:
        return DataError(
            f"feature shard {shard} is damaged: {how}",
            expected="the bytes that cache_features wrote",
            fix=f"delete {self.storage.uri(shard)} and its {SIDECAR}; the next run encodes its images again",
        )

    def missing(self, images: NDArray[np.bytes_]) -> NDArray[np.bytes_]:
        """The images without features, in the order of `images`: hashes, as of `hashes_of`."""
        return images[self.images.find(images) < 0]

    def require_tower(self, tower_sha256: str) -> None:
        """Raise ConfigError where a tower of other weights has made the features that are there."""
        if self.tower_sha256 in (None, tower_sha256):
            return
        raise ConfigError(
            f"the cached features in {self.storage.root_uri} come from another tower ({self.tower_sha256})",
            expected=f"the weights of this run's tower ({tower_sha256})",
            fix="pin model.tower.revision, or delete that folder to encode again",
        )

    def _mixed(self, first: HeldImages, other: HeldImages) -> DataError:
        return DataError(
            f"the features in {self.storage.root_uri} come from two towers: {first.sidecar.shard} from the weights "
            f"{first.tower_sha256}, {other.sidecar.shard} from {other.tower_sha256}",
            expected="features of one tower: the weights behind an address without a revision may have changed",
            fix="pin model.tower.revision, and delete that folder to encode again",
        )

    def needs(self, split: SplitIndex) -> Needs:
        """The shards with the features of each sample's images."""
        places = self.images.find(split.images())
        owners = np.repeat(np.arange(len(split)), split.image_count)[places >= 0]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(split)))])
        return Needs(offsets, self.images.shards[places[places >= 0]])

    def _complete(self, files: Mapping[str, ObjectInfo]) -> Iterator[HeldImages | str]:
        """The images of each complete shard, and the names of the others."""
        first: HeldImages | None = None
        for sidecar in self._read_sidecars(files):
            if not _is_whole(files.get(sidecar["shard"]), sidecar):
                yield str(sidecar["shard"])
                continue
            images = sidecar["images"]
            shard = Sidecar(sidecar["shard"], len(images), sidecar["bytes"], sidecar["crc32c"])
            held = HeldImages(shard, sidecar["tower_sha256"], images)
            first = first or held
            if held.tower_sha256 != first.tower_sha256:
                raise self._mixed(first, held)
            yield held

    def _read_sidecars(self, files: Iterable[str]) -> Iterator[dict[str, Any]]:
        names = sorted(name for name in files if name.startswith("shard-") and name.endswith(SIDECAR))
        with thread_pool(READS, name="sidecars") as pool:
            for name, content in zip(names, pool.map(self.storage.read, names), strict=True):
                shard = name.removesuffix(SIDECAR)
                try:
                    sidecar = unseal(content, required=True)
                    is_whole = shard_name(sidecar["images"]) == shard and sidecar.keys() >= SIDECAR_FIELDS
                except (ValueError, TypeError, KeyError):
                    is_whole = False
                if not is_whole:
                    raise self.damaged(shard + SHARD, f"{self.storage.uri(name)} is not the sidecar that was written")
                yield sidecar | {"shard": shard + SHARD}


def _is_whole(file: ObjectInfo | None, sidecar: Mapping[str, object]) -> bool:
    """Return whether a shard's file is there with the size, and where the store keeps one the checksum, of the
    sidecar.
    """
    return (
        file is not None
        and file.size_bytes == sidecar["bytes"]
        and (file.crc32c is None or file.crc32c == sidecar["crc32c"])
    )


@dataclass(frozen=True)
class Layout:
    """Locations of a shard's bf16 tensors, all of one width, in its file."""

    offsets: Int64Array  # (images,) in the order of their hashes
    tokens: Int64Array  # (images,) how many each image has
    width: int


class FeatureReader:
    """Random access to features by image. Files are closed between reads, so that evicting them frees disk space."""

    def __init__(self, shards: FeatureShards, files: ShardFiles) -> None:
        self.shards, self.files = shards, files
        self._layout = functools.cache(self._read_layout)

    @classmethod
    def open(cls, uri: str, cache_gib: float = 0.0) -> FeatureReader:
        """A reader of the store at `uri`; see `open_shards`."""
        shards = FeatureShards(uri)
        return cls(shards, *open_shards(shards, cache_gib=cache_gib))

    def read(self, image_sha256: str) -> Tensor:
        """Features of one image: (tokens, width) bf16. Raises DataError for an image that was never encoded."""
        return self.read_all([image_sha256])

    def read_all(self, images: Sequence[str]) -> Tensor:
        """Concatenated features of one or more images. Opens each shard once."""
        import torch

        places = self.shards.images.find(images)
        for image, place in zip(images, places.tolist(), strict=True):
            if place < 0:
                raise self._absent(image)
        numbers, within = self.shards.images.shards[places], self.shards.images.places[places]
        layouts = {number: self._layout(number) for number in dict.fromkeys(numbers.tolist())}
        pairs = zip(numbers.tolist(), within.tolist(), strict=True)
        counts = [int(layouts[number].tokens[image]) for number, image in pairs]
        width = next(iter(layouts.values())).width
        features = torch.empty(sum(counts), width, dtype=torch.bfloat16)
        parts = features.split(counts)
        for number, layout in layouts.items():
            shard = self.shards.names[number]
            if layout.width != width:
                raise self.shards.damaged(shard, f"its features are {layout.width} wide, those of others {width}")
            with self.files.opened(shard) as handle, os_errors(f"reading {shard}"):
                for index in np.flatnonzero(numbers == number).tolist():
                    target: Any = parts[index].view(torch.uint8).numpy()  # shares the tensor's memory
                    read = os.preadv(handle, [target], int(layout.offsets[within[index]]))
                    if read != target.nbytes:
                        how = f"features of image {images[index][:12]}... end after {read} bytes"
                        raise self.shards.damaged(shard, how)
        return features

    def _absent(self, image: str) -> DataError:
        return DataError(
            f"no cached features for image {image[:12]}... in {self.shards.storage.root_uri}",
            expected="every image of the prepared data encoded by the cache_features step",
            fix="run the pipeline again: it encodes what is missing; or set features.cache=off",
        )

    def _read_layout(self, number: int) -> Layout:
        shard = self.shards.names[number]
        with self.files.opened(shard) as handle, os_errors(f"reading {shard}"):
            size_bytes = int.from_bytes(os.pread(handle, HEADER_BYTES, 0), "little")
            header = json.loads(os.pread(handle, size_bytes, HEADER_BYTES))
        header.pop("__metadata__", None)
        tensors = [header[image] for image in sorted(header)]
        kinds = {(tensor["dtype"], *tensor["shape"][1:]) for tensor in tensors}
        kind = next(iter(kinds))
        if len(kinds) != 1 or kind[0] != "BF16" or len(kind) != 2:
            raise self.shards.damaged(shard, f"it holds {sorted(kinds)}, not one width in BF16")
        offsets = [HEADER_BYTES + size_bytes + tensor["data_offsets"][0] for tensor in tensors]
        return Layout(np.array(offsets), np.array([tensor["shape"][0] for tensor in tensors]), kind[1])


def missing_images(uri: str, images: Iterable[str]) -> list[str]:
    """The images (sha256) without features, in the order of `images`."""
    return [digits_of(image) for image in FeatureShards(uri).missing(hashes_of(images))]
