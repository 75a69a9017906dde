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
from vlmpipe.trainer.audit.image_vectors import BITS, ImageVectors
from vlmpipe.trainer.audit.likeness import Look, are_alike, look_of
from vlmpipe.trainer.audit.neighbours import nearest
from vlmpipe.trainer.data.shards.image_index import UniqueImages, digits_of

CANDIDATES = 6  # nearest images of each, by either vector
MAX_BITS = 112  # of 256 that differ, unrelated images in some 128: images further apart are not opened
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
    places = catalogue.index.unique_images()
    met: set[int] = set()

    @lru_cache(HELD_LOOKS)
    def look(row: int) -> Look | None:
        met.add(row)
        return _look(catalogue, places, row)

    parents = np.arange(len(catalogue.images))
    pairs = _candidates(vectors)
    for done, (one, other) in enumerate(pairs, 1):
        progressed(done, len(pairs))
        first, second = look(one), look(other)
        if first and second and are_alike(first, second):
            smaller, larger = sorted((_root(parents, one), _root(parents, other)))
            parents[larger] = smaller
    roots = np.array([_root(parents, row) for row in range(len(parents))], np.int64)
    return ImageGroups(_numbered(roots), len(met))


def _candidates(vectors: ImageVectors) -> list[tuple[int, int]]:
    """Pairs of rows that may be alike, by their first row."""
    found: set[tuple[int, int]] = set()
    for some in (vectors.bits, vectors.features):
        if some is not None:
            for one, other, _ in nearest(some, CANDIDATES).pairs():
                if _bits_apart(vectors, one, other) <= MAX_BITS:
                    found.add((int(vectors.rows[one]), int(vectors.rows[other])))
    return sorted(found)


def _bits_apart(vectors: ImageVectors, one: int, other: int) -> float:
    return BITS * (1 - float(vectors.bits[one] @ vectors.bits[other])) / 2


def _look(catalogue: Catalogue, places: UniqueImages, row: int) -> Look | None:
    """The look of an image; None of a video and of an image that Pillow does not read here."""
    place = places[digits_of(catalogue.images[row])]
    if place.is_video:
        return None
    with Image.open(io.BytesIO(catalogue.shards.image(place)), formats=["PNG", "JPEG", "WEBP"]) as image:
        image.draft("RGB", (128, 128))  # a JPEG decodes straight to about this size
        return look_of(image.convert("RGB"))


def _root(parents: NDArray[np.int64], row: int) -> int:
    while parents[row] != row:
        parents[row] = parents[parents[row]]
        row = int(parents[row])
    return row


def _numbered(roots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers from 1 of roots that occur several times, 0 of the others."""
    _, inverse, counts = np.unique(roots, return_inverse=True, return_counts=True)
    numbers = np.cumsum(counts > 1) * (counts > 1)
    return numbers[inverse].astype(np.int64)
