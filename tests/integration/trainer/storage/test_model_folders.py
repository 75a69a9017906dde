"""Models in buckets: staged once a node, checked, identified by their generations, in a bounded cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gcs.faults import Fault
from tests.fakes.gcs.server import FakeGcs
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.storage import gcs, model_folders, open_storage
from vlmpipe.trainer.storage.export_manifest import write_description
from vlmpipe.trainer.storage.file_sums import FileSum, files_below
from vlmpipe.trainer.storage.model_folders import KEPT, local_folder, revision_of

ADDRESS = "gs://bucket/models/llava"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"one" * 100,
    "model-00002-of-00002.safetensors": b"two" * 100,
}
OTHERS = {"README.md": b"words", "pytorch_model.bin": b"pickle", "original/consolidated.safetensors": b"raw"}


@pytest.fixture
def server(gcs_server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.endpoint)
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(model_folders, "_in_use", {})
    store = open_storage(ADDRESS)
    for name, data in {**FILES, **OTHERS}.items():
        store.write(name, data)
    yield gcs_server


def in_processes(call: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Each item in a process of its own, all at once, as the ranks of a node. None shares this one's connections."""
    gcs._client_for.cache_clear()
    with multiprocessing.get_context("fork").Pool(len(items), maxtasksperchild=1) as pool:
        return pool.map(call, items, chunksize=1)


def contents(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {name: path.read_bytes() for name, path in files_below(folder).items() if not name.startswith(".tmp-")}


def test_the_ranks_of_a_node_read_each_file_of_a_bucket_once(server: FakeGcs) -> None:
    folders = in_processes(local_folder, [ADDRESS] * 4)
    assert len(set(folders)) == 1 and contents(folders[0]) == FILES, "only what transformers reads"
    assert len(server.ranges) == len(FILES)
    assert local_folder("/gcs/bucket/models/llava/") == folders[0], "its mount is the same folder"
    revision = revision_of(ADDRESS)
    asked = len(server.arrivals_s)
    assert local_folder(ADDRESS, revision) == folders[0]
    assert len(server.ranges) == len(FILES) and len(server.arrivals_s) == asked, "a known revision asks nothing"


def test_configurations_are_read_without_weights(server: FakeGcs) -> None:
    found = contents(local_folder(ADDRESS, weights=False))
    assert found == {name: data for name, data in FILES.items() if name.endswith(".json")}
    assert contents(local_folder(ADDRESS, revision_of(ADDRESS))) == FILES
    assert len(server.ranges) == len(FILES)


def test_a_small_file_is_read_without_the_weights_beside_it(server: FakeGcs) -> None:
    open_storage(ADDRESS).write("relevance.safetensors", b"small")
    found = contents(local_folder(ADDRESS, weights=False, also="relevance.safetensors"))
    assert found["relevance.safetensors"] == b"small" and not any("of-00002" in name for name in found)
    assert contents(local_folder(ADDRESS)) == FILES | {"relevance.safetensors": b"small"}


def test_a_damaged_download_is_refused_and_tried_again_by_the_next_start(server: FakeGcs) -> None:
    server.faults.append(Fault("corrupt", path="/download/.*00002-of", times=3))
    with pytest.raises(UserError, match=r"00002\.safetensors arrived corrupted") as caught:
        local_folder(ADDRESS)
    assert caught.value.code == ExitCode.DATA
    before = len(server.ranges)
    assert contents(local_folder(ADDRESS)) == FILES
    assert len(server.ranges) == before + 1, "the whole files were kept"


def test_a_file_that_is_written_anew_is_another_revision(server: FakeGcs) -> None:
    first, revision = local_folder(ADDRESS), revision_of(ADDRESS)
    open_storage(ADDRESS).write("model-00001-of-00002.safetensors", b"new")
    with pytest.raises(ConfigError, match=rf"{ADDRESS} has changed: it is at revision [0-9a-f]{{16}}") as caught:
        local_folder(ADDRESS, "0" * 16)
    assert caught.value.expected.startswith("revision 0000000000000000")
    assert contents(local_folder(ADDRESS, revision)) == FILES, "the copy of the first is still here"
    second = local_folder(ADDRESS)
    assert second != first and contents(second)["model-00001-of-00002.safetensors"] == b"new"


def test_files_that_change_while_they_are_copied_are_no_model(server: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_storage(ADDRESS)
    download = type(store).download

    def download_and_change(self: Any, name: str, path: Path) -> None:
        download(self, name, path)
        if name.endswith("00002-of-00002.safetensors"):
            store.write("config.json", b'{"new": 1}')

    monkeypatch.setattr(type(store), "download", download_and_change)
    with pytest.raises(DataError, match="changed while it was copied"):
        local_folder(ADDRESS)
    monkeypatch.undo()


def test_copies_that_nobody_uses_are_deleted_but_the_last(server: FakeGcs, tmp_path: Path) -> None:
    addresses = [f"gs://bucket/models/{number}" for number in range(KEPT + 2)]
    for address in addresses:
        open_storage(address).write("config.json", address.encode())
    held = local_folder(ADDRESS)
    for address in addresses:
        in_processes(local_folder, [address])
    left = {path.read_bytes() for path in (tmp_path / "cache").rglob("config.json")}
    assert held is not None and (held / "config.json").is_file(), "this process uses it"
    assert left - {FILES["config.json"]} == {address.encode() for address in addresses[-KEPT - 1 :]}


@pytest.mark.parametrize("address", ["gs://bucket/nothing", "gs://bucket/models"])
def test_a_folder_without_a_model_is_named(server: FakeGcs, address: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no model in {address}"):
        local_folder(address)


@pytest.mark.parametrize("root", ["folder", "bucket"])
def test_an_export_is_checked_against_its_description_once(
    server: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    uri = str(tmp_path / "run") if root == "folder" else "gs://bucket/runs/one"
    run = open_storage(uri)
    (tmp_path / "files").mkdir()
    for name, data in FILES.items():
        run.write(f"export/{name}", data)
        (tmp_path / "files" / name).write_bytes(data)
    sums = {name: vars(FileSum.of(path)) for name, path in files_below(tmp_path / "files").items()}
    write_description(run, {"files": sums})
    read: list[str] = []
    matches = FileSum.matches
    monkeypatch.setattr(FileSum, "matches", lambda self, *args: read.append("") or matches(self, *args))
    for _ in range(2):
        folder = local_folder(f"{uri}/export")
        assert folder is not None and (folder / "config.json").is_file()
    assert len(read) == len(FILES)
    run.write("export/model-00001-of-00002.safetensors", b"eno" * 100)
    assert local_folder(f"{uri}/export", weights=False), "the planner reads no weights"
    with pytest.raises(DataError, match=r"model-00001-of-00002.safetensors is damaged: .* differs from that in"):
        local_folder(f"{uri}/export")
