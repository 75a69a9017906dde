"""Groups of images that are one image encoded, resized, brightened or cropped again."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.images.image_vectors import ImageVectors
from vlmpipe.trainer.audit.images.likeness import MAX_COLOURS, Look, are_alike, look_of
from vlmpipe.trainer.audit.images.search import search
from vlmpipe.trainer.data.near_duplicates.signature import colour_distance
from vlmpipe.trainer.data.shards.image_index import UniqueImages, digits_of

CANDIDATES = 6  # nearest images of each, by either vector
SLACK = 2.0  # of 255, between colours of a signature and of an image that a decoder made smaller
PAIRS_AT_ONCE = 1 << 16
HELD_LOOKS = 4096  # of images, some 16 KiB each


@dataclass(frozen=True)
class ImageGroups:
    """of_image: (images,) number of each image's group, from 1; 0 by itself. opened: images that were looked at."""

    of_image: NDArray[np.int64]
    opened: int

    @property
    def count(self) -> int:
        return int(self.of_image.max(initial=0))


def image_groups(
    catalogue: Catalogue, vectors: ImageVectors, progressed: Callable[[int, int], None] = lambda *_: None
) -> ImageGroups:
    """Group the images. Candidates are the nearest by hash and by feature; their pixels decide."""
    places = catalogue.stored.index.unique_images()
    met: set[int] = set()

    @lru_cache(HELD_LOOKS)
    def look(image_row: int) -> Look | None:
        met.add(image_row)
        return _look(catalogue, places, image_row)

    parents = np.arange(len(catalogue.images))
    pairs = candidates(vectors)
    for done, (first_row, second_row) in enumerate(map(tuple, pairs.tolist()), 1):
        progressed(done, len(pairs))
        first, second = look(first_row), look(second_row)
        if first and second and are_alike(first, second):
            smaller, larger = sorted((_root(parents, first_row), _root(parents, second_row)))
            parents[larger] = smaller
    roots = np.array([_root(parents, image_row) for image_row in range(len(parents))], np.int64)
    return ImageGroups(_numbered(roots), len(met))


def candidates(vectors: ImageVectors) -> NDArray[np.int64]:
    """(pairs, 2) rows of images that may be copies, in order: near ones whose colours are those of copies."""
    near = [search(some, CANDIDATES).pairs() for some in (vectors.bits, vectors.features) if some is not None]
    pairs = np.unique(np.concatenate(near), axis=0)
    blocks = np.split(pairs, range(PAIRS_AT_ONCE, len(pairs), PAIRS_AT_ONCE))
    return vectors.rows[np.concatenate([block[_may_be_copies(vectors, block)] for block in blocks])]


def _may_be_copies(vectors: ImageVectors, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
    signatures = vectors.signatures
    return colour_distance(signatures[pairs[:, 0]], signatures[pairs[:, 1]]) <= MAX_COLOURS + SLACK


def _look(catalogue: Catalogue, places: UniqueImages, image_row: int) -> Look | None:
    """The look of an image; None of a video and of an image that Pillow does not read here."""
    place = places[digits_of(catalogue.images[image_row])]
    if place.is_video:
        return None
    with Image.open(io.BytesIO(catalogue.shards.image(place)), formats=["PNG", "JPEG", "WEBP"]) as image:
        image.draft("RGB", (128, 128))  # a JPEG decodes straight to about this size
        return look_of(image.convert("RGB"))


def _root(parents: NDArray[np.int64], image_row: int) -> int:
    while parents[image_row] != image_row:
        parents[image_row] = parents[parents[image_row]]
        image_row = int(parents[image_row])
    return image_row


def _numbered(roots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers from 1 of roots that occur several times, 0 of the others."""
    _, inverse, counts = np.unique(roots, return_inverse=True, return_counts=True)
    numbers = np.cumsum(counts > 1) * (counts > 1)
    return numbers[inverse].astype(np.int64)
