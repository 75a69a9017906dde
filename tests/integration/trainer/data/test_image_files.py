"""Pictures in a folder and in a bucket: their bound on bytes, and what they weigh."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

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


@pytest.mark.parametrize("kind", ["local", "gcs"])
def test_an_address_is_the_file_that_people_mean_or_is_refused(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Absolute paths, addresses of files in each spelling, quoted or not, and ways up that stay inside."""
    folder = tmp_path / "im ages"
    store: LocalStorage | GcsStorage = LocalStorage(folder) if kind == "local" else request.getfixturevalue("gcs")
    for name in ("a b.png", "c%20d.png", "sub/e.png", "x/y/f.png"):
        store.write(name, name.encode())
    root, meant = store.root_uri, {
        "a b.png": ("./a b.png", "sub/../a b.png", "x/y/../../a b.png", "sub/./..//a b.png", "ROOT/a b.png"),
        "c%20d.png": ("c%20d.png", "ROOT/c%20d.png"),
        "sub/e.png": ("sub//e.png", "ROOT/sub/e.png", "ROOT/x/../sub/e.png", "file://sub/e.png", "file://./sub/e.png"),
    }  # fmt: skip
    outside = ["../a b.png", "sub/../../a b.png", "ROOT/../a b.png", "/etc/hostname", ""]
    if kind == "local":
        (tmp_path / "elsewhere/deep").mkdir(parents=True)
        (tmp_path / "elsewhere/g.png").write_bytes(b"not this one")
        (folder / "linked").symlink_to(tmp_path / "elsewhere/deep")
        meant["a b.png"] += (
            "file://ROOT/a b.png", "file://QUOTED/a%20b.png", "file://localhostQUOTED/a%20b.png", "file:ROOT/a b.png",
            "FILE://QUOTED/sub/../a%20b.png",
        )  # fmt: skip
        meant["c%20d.png"] += ("file://QUOTED/c%2520d.png", "file://ROOT/c%20d.png")
        outside += ["linked/../g.png", "linked/../a b.png", "file:///etc/hostname", "file:ROOT/../a b.png"]
    images = ImageFiles(store, max_image_bytes=100)
    for name, addresses in meant.items():
        for address in addresses:
            image = images.named(address.replace("ROOT", root).replace("QUOTED", quote(root)))
            assert (image.name, image.read()) == (name, name.encode()), address
    for address in outside:
        with pytest.raises(RejectedError, match="is outside") as caught:
            images.named(address.replace("ROOT", root))
        assert caught.value.code == RejectCode.REF_UNSAFE_PATH
