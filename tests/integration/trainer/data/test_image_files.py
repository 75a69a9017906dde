"""Pictures in a folder and in a bucket: their bound on bytes, and what they weigh."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sources.image_files import ImageFiles
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage


@pytest.mark.parametrize("kind", ["local", "gcs"])
def test_too_large_image_is_refused_and_its_size_known(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: LocalStorage | GcsStorage = LocalStorage(tmp_path) if kind == "local" else request.getfixturevalue("gcs")
    store.write("large.png", bytes(101))
    store.write("small.png", bytes(100))
    images = ImageFiles(store, max_image_bytes=100)
    assert images.reference("small.png").read() == bytes(100)
    with pytest.raises(RejectedError, match=r"10\d bytes, more than data.max_image_bytes 100") as caught:
        images.reference("large.png").read()
    assert caught.value.code == RejectCode.IMAGE_TOO_LARGE
    weights = [images.reference(name).size_bytes for name in ("small.png", "large.png", "missing.png")]
    assert [weight and weight() for weight in weights] == [100, 101, 0]
