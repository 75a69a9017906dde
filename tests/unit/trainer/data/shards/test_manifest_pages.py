"""Manifests of many files, in pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.shards import manifest_pages, prepared_files
from vlmpipe.trainer.data.shards.manifest_pages import FilePages
from vlmpipe.trainer.data.shards.prepared_files import DONE, FORMAT, Manifest, open_prepared
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage.file_sums import FileSum, damaged_files
from vlmpipe.trainer.storage.local import LocalStorage

FILES = {f"shards/train-{number:06d}.tar": f"shard {number}".encode() for number in range(7)}


@pytest.fixture
def paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared data of seven files, listed on pages of three."""
    for module in (manifest_pages, prepared_files):
        monkeypatch.setattr(module, "PAGE_FILES", 3)
    store = LocalStorage(tmp_path)
    for name, content in FILES.items():
        store.write(name, content)
    files = {name: FileSum.of(tmp_path / name) for name in FILES}
    store.write(DONE, Manifest(FORMAT, "f", {"read": 7}, files).in_pages(store).to_bytes())
    return tmp_path


def test_a_long_list_is_read_page_by_page(paged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = LocalStorage(paged), list[str]()
    monkeypatch.setattr(LocalStorage, "read", reading(read, LocalStorage.read))
    manifest = Manifest.read(store)
    assert read == [DONE] and len(manifest.files) == len(FILES) and manifest.counts == {"read": 7}
    name = "shards/train-000004.tar"
    assert manifest.files[name] == FileSum.of(paged / name) and len(read) == 2
    assert list(manifest.files) == sorted(FILES) and len(read) == 4
    assert manifest.page_names == {path.relative_to(paged).as_posix() for path in (paged / "manifest").iterdir()}


def reading(read, plain):  # type: ignore[no-untyped-def]
    def noting(self, name, *more):  # type: ignore[no-untyped-def]
        read.append(name)
        return plain(self, name, *more)

    return noting


def test_a_short_list_stays_in_the_manifest(tmp_path: Path) -> None:
    manifest = Manifest(FORMAT, "f", {}, {"one": FileSum(1, 2)})
    assert manifest.in_pages(LocalStorage(tmp_path)) is manifest and not list(tmp_path.iterdir())


def test_damage_is_found_in_files_and_pages(paged: Path) -> None:
    store = LocalStorage(paged)
    assert not damaged_files(store, Manifest.read(store).files)
    (paged / "shards/train-000005.tar").write_bytes(b"shard 6")
    assert damaged_files(store, Manifest.read(store).files) == ["shards/train-000005.tar"]
    prepared = open_prepared(str(paged))
    with pytest.raises(DataError, match="train-000005"):
        prepared.read("shards/train-000005.tar")
    page = sorted((paged / "manifest").iterdir())[0]
    content = page.read_bytes()
    page.write_bytes(content.replace(b"shards/", b"Shards/", 1))
    with pytest.raises(DataError, match="its checksum"):
        dict(Manifest.read(store).files)
    page.unlink()
    with pytest.raises(DataError, match="is missing"):
        dict(Manifest.read(store).files)


@given(names=st.sets(st.text(min_size=1, max_size=3), max_size=20), asked=st.text(min_size=1, max_size=3))
def test_pages_are_a_dictionary(names: set[str], asked: str) -> None:
    files = {name: FileSum(number, number + 1) for number, name in enumerate(sorted(names))}
    written: dict[str, bytes] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_pages, "PAGE_FILES", 4)
        pages = FilePages.write(Written(written), files)  # type: ignore[arg-type]
    assert dict(pages) == files and len(pages) == len(files) and pages.get(asked) == files.get(asked)
    assert FilePages.of_json(Written(written), pages.as_json()) == files  # type: ignore[arg-type]


@dataclasses.dataclass
class Written:
    """As much of a store as pages need."""

    files: dict[str, bytes]

    def write(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def read(self, name: str) -> bytes:
        return self.files[name]

    def stat(self, name: str) -> object:
        return self.files.get(name)
