"""Vectors of distinct images: bits of their pixel hashes, and means of their cached features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.images import search
from vlmpipe.trainer.audit.images.neighbours import Vectors, as_directions
from vlmpipe.trainer.data.near_duplicates.signature import HASH_BYTES, SIGNATURE_BYTES, Signatures
from vlmpipe.trainer.data.near_duplicates.table import NAME
from vlmpipe.trainer.data.shards.image_index import digits_of, hashes_of
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.feature_cache.reader import FeatureReader

WIDTH = 256  # of a vector; wider features are projected at random, which keeps cosines within some 0.06
BITS = 8 * HASH_BYTES
READ_IMAGES = 256  # features at a time


@dataclass(frozen=True)
class ImageVectors:
    """Rows of images that are compared, and their vectors.

    rows: (compared,) rows of Catalogue.images, in order. signatures: (compared, SIGNATURE_BYTES), 0 of an image without
    structure. features: (compared, WIDTH or less), None without cached features. without_structure: rows of blank
    images. left_out: images beyond `max_compared`.
    """

    rows: NDArray[np.int64]
    signatures: Signatures
    features: Vectors | None
    without_structure: frozenset[int]
    left_out: int

    @property
    def bits(self) -> Vectors:
        """(compared, BITS) 1/16 or -1/16 by the bits of the hashes; 0 of an image without structure."""
        bits = np.unpackbits(self.signatures[:, :HASH_BYTES], axis=1).astype(np.float32)
        bits *= 2 / np.sqrt(BITS)
        bits -= 1 / np.sqrt(BITS)
        bits[~self.signatures.any(axis=1)] = 0
        return bits

    def described(self) -> str:
        """Name for people the vectors that images are compared by."""
        by = "pixel hashes" if self.features is None else "cached features and pixel hashes"
        return by if len(self.rows) <= search.MAX_EXACT else f"{by}, by an index that misses some of the nearest"


def image_vectors(catalogue: Catalogue, prepared_uri: str, features: FeatureReader | None) -> ImageVectors:
    """The vectors of the images with the smallest hashes, at most `max_compared`: a choice that no content decides."""
    rows = np.arange(min(len(catalogue.images), search.max_compared()))
    signatures, blank = _signatures(catalogue, prepared_uri, len(rows))
    left_out = len(catalogue.images) - len(rows)
    return ImageVectors(rows, signatures, _pooled(catalogue, rows, features), blank, left_out)


def _signatures(catalogue: Catalogue, prepared_uri: str, compared: int) -> tuple[Signatures, frozenset[int]]:
    signatures, blank = np.zeros((compared, SIGNATURE_BYTES), np.uint8), set[int]()
    places = catalogue.stored.index.unique_images()
    with pq.ParquetFile(open_prepared(prepared_uri).fetch(NAME), pre_buffer=False) as file:
        for lines in file.iter_batches(batch_size=8192, columns=["sha256", "signature"]):
            hashes = hashes_of(lines.column("sha256").to_pylist())
            rows = np.searchsorted(catalogue.images, hashes)
            for image_row, signature in zip(rows.tolist(), lines.column("signature").to_pylist(), strict=True):
                if signature is None:
                    if not places[digits_of(catalogue.images[image_row])].is_video:
                        blank.add(image_row)
                elif image_row < compared:
                    signatures[image_row] = np.frombuffer(signature, np.uint8)
    return signatures, frozenset(blank)


def _pooled(catalogue: Catalogue, rows: NDArray[np.int64], features: FeatureReader | None) -> Vectors | None:
    """(rows, WIDTH or less) means over the tokens of each image; None where not every image has features."""
    if features is None or not len(rows) or len(features.shards.missing(catalogue.images[rows])):
        return None
    pooled = np.zeros((len(rows), 0), np.float32)
    projection: NDArray[np.float32] | None = None
    for start in range(0, len(rows), READ_IMAGES):
        for image_row in range(start, min(start + READ_IMAGES, len(rows))):
            mean = features.read(digits_of(catalogue.images[rows[image_row]])).float().mean(dim=0).numpy()
            if projection is None and len(mean) > WIDTH:
                drawn = np.random.default_rng(0).standard_normal((len(mean), WIDTH))
                projection = (drawn / np.sqrt(WIDTH)).astype(np.float32)
            if not pooled.shape[1]:
                pooled = np.zeros((len(rows), WIDTH if projection is not None else len(mean)), np.float32)
            pooled[image_row] = mean if projection is None else mean @ projection
    return as_directions(pooled)
