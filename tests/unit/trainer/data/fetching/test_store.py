"""The store keeps one image for each address, identified and verified by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data.prepared import png
from vlmpipe.trainer.data.fetching.store import FetchedImages, key_of
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import content_of
from vlmpipe.trainer.errors import DataError

ADDRESS = "https://example.com/a/1.PNG?X-Signature=secret"


def store(folder: Path, max_image_bytes: int = 10_000) -> FetchedImages:
    return FetchedImages(str(folder), max_image_bytes)


def test_what_was_added_is_read_by_another_process(tmp_path: Path) -> None:
    store(tmp_path).add(key_of(ADDRESS), png(1))
    image = store(tmp_path).reference(ADDRESS)
    assert image.read() == png(1) and image.content() == content_of(png(1))
    assert image.size_bytes and image.size_bytes() == len(png(1))
    assert image.name.endswith(".png") and "secret" not in image.name and image.address == ADDRESS
    assert key_of(ADDRESS) == key_of(f"{ADDRESS}#part") != key_of(ADDRESS.replace("secret", "other"))


def test_an_image_that_is_not_there_yet_rejects_its_sample_only(tmp_path: Path) -> None:
    for uri in ("", str(tmp_path)):
        image = FetchedImages(uri, 100).reference(ADDRESS)
        for ask in (image.read, image.content):
            with pytest.raises(RejectedError, match=r"https://example.com/a/1.PNG is not fetched") as found:
                ask()
            assert found.value.code == RejectCode.REF_MISSING and "secret" not in str(found.value)


def test_a_failure_is_kept_with_its_reason_until_it_is_deleted(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.add_failure(key_of(ADDRESS), "404 Not Found")
    for found in (first, store(tmp_path)):
        with pytest.raises(RejectedError, match=r"1.PNG was not fetched: 404 Not Found"):
            found.reference(ADDRESS)
    (tmp_path / "failed" / key_of(ADDRESS)).unlink()
    store(tmp_path).reference(ADDRESS)


def test_other_bytes_than_were_downloaded_end_the_step(tmp_path: Path) -> None:
    store(tmp_path).add(key_of(ADDRESS), png(1))
    (path,) = (tmp_path / "images").rglob("*-*")
    path.write_bytes(png(1)[:-1] + b"x")
    with pytest.raises(DataError, match="is damaged: it has other bytes than were downloaded"):
        store(tmp_path).reference(ADDRESS).read()


def test_a_smaller_bound_than_when_it_was_fetched_rejects(tmp_path: Path) -> None:
    store(tmp_path).add(key_of(ADDRESS), png(1))
    with pytest.raises(RejectedError, match=r"more than data.max_image_bytes 100"):
        store(tmp_path, 100).reference(ADDRESS).read()


@pytest.mark.parametrize("part", ["#page=2", "#t=1.5"])
def test_parts_of_files_of_the_web_are_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(RejectedError, match="pages and frames of files of the web are not read"):
        store(tmp_path).reference(f"https://example.com/a.pdf{part}")
