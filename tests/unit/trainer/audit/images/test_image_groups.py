"""Images are looked at where they are near and have the colours of copies."""

from __future__ import annotations

import numpy as np

from vlmpipe.trainer.audit.images.image_groups import candidates
from vlmpipe.trainer.audit.images.image_vectors import ImageVectors
from vlmpipe.trainer.audit.images.neighbours import as_directions
from vlmpipe.trainer.data.near_duplicates.signature import HASH_BYTES, SIGNATURE_BYTES


def test_near_images_of_other_colours_are_not_opened() -> None:
    draw = np.random.default_rng(0)
    signatures = np.zeros((4, SIGNATURE_BYTES), np.uint8)
    signatures[:, :HASH_BYTES] = draw.integers(0, 256, HASH_BYTES)
    signatures[:, HASH_BYTES:] = np.array([128, 130, 128, 160])[:, None]
    features = as_directions(draw.standard_normal((4, 8)))
    rows = np.array([3, 5, 8, 9])
    for some in (None, features):
        vectors = ImageVectors(rows, signatures, some, frozenset(), 0)
        assert candidates(vectors).tolist() == [[3, 5], [3, 8], [5, 8]]


def test_a_single_image_has_no_candidates() -> None:
    vectors = ImageVectors(np.arange(1), np.ones((1, SIGNATURE_BYTES), np.uint8), None, frozenset(), 0)
    assert not len(candidates(vectors))


def test_bits_are_directions_and_zero_without_a_hash() -> None:
    signatures = np.random.default_rng(0).integers(1, 256, (3, SIGNATURE_BYTES), np.uint8)
    signatures[1] = 0
    bits = ImageVectors(np.arange(3), signatures, None, frozenset(), 0).bits
    np.testing.assert_allclose(np.linalg.norm(bits, axis=1), [1, 0, 1], rtol=1e-6)
