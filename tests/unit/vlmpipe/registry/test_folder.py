"""The folder registry: numbers are given out once, versions are whole, the champion moves only by comparison."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from vlmpipe.registry.folder import Candidate, FolderRegistry
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.storage.base import crc32c_of
from vlmpipe.trainer.storage.local import LocalStorage


def candidate(folder: Path, run_id: str, checkpoint: str = "0001-00000010-aa", exact_match: float = 0.9) -> Candidate:
    export = folder / "runs" / run_id / "export"
    (export / "nested").mkdir(parents=True, exist_ok=True)
    (export / "model.safetensors").write_bytes(run_id.encode() * 100)
    (export / "nested" / "tokenizer.json").write_text("{}")
    return Candidate(run_id=run_id, export_uri=str(export), checkpoint=checkpoint, metrics={"exact_match": exact_match})


def register(folder: str, run_id: str) -> int:
    registry = FolderRegistry(f"{folder}/registry")
    return registry.register("model", candidate(Path(folder), run_id), "# card").version


def test_an_empty_registry_has_no_champion_and_no_versions(tmp_path: Path) -> None:
    registry = FolderRegistry(str(tmp_path))
    assert registry.champion("model") is None
    assert registry.versions("model") == []


def test_a_version_survives_the_deletion_of_its_run(tmp_path: Path) -> None:
    registry = FolderRegistry(str(tmp_path / "registry"))
    entry = registry.register("model", candidate(tmp_path, "a"), "# card")
    registry.promote("model", entry.version, instead_of=None)
    shutil.rmtree(tmp_path / "runs")
    champion = registry.champion("model")
    assert champion == entry
    model = Path(entry.model_uri)
    assert (model / "README.md").read_text() == "# card"
    for file in entry.files:
        data = (model / file.name).read_bytes()
        assert (len(data), crc32c_of(data)) == (file.size_bytes, file.crc32c)
    assert {file.name for file in entry.files} == {"model.safetensors", "nested/tokenizer.json"}


def test_adapters_of_one_base_are_versions_that_name_it(tmp_path: Path) -> None:
    """Beside a version that is a model; each holds its own files."""
    registry, base = FolderRegistry(str(tmp_path / "registry")), "org/model@0123abc"
    for run_id in "ab":
        registry.register("model", candidate(tmp_path, run_id).model_copy(update={"base": base}), "# card")
    register(str(tmp_path), "c")
    versions = registry.versions("model")
    assert [entry.base for entry in versions] == [base, base, ""]
    contents = [Path(entry.model_uri, "model.safetensors").read_bytes() for entry in versions]
    assert contents == [run_id.encode() * 100 for run_id in "abc"]


def test_versions_count_up_from_one(tmp_path: Path) -> None:
    assert [register(str(tmp_path), run_id) for run_id in "abc"] == [1, 2, 3]
    assert [entry.run_id for entry in FolderRegistry(f"{tmp_path}/registry").versions("model")] == ["a", "b", "c"]


def test_registering_a_run_again_returns_its_version(tmp_path: Path) -> None:
    assert [register(str(tmp_path), run_id) for run_id in ("a", "b", "a")] == [1, 2, 1]


def test_a_run_that_has_trained_on_gets_a_version_for_each_checkpoint(tmp_path: Path) -> None:
    registry = FolderRegistry(str(tmp_path / "registry"))
    later = candidate(tmp_path, "a", checkpoint="0001-00000020-bb")
    versions = [registry.register("model", one, "").version for one in (candidate(tmp_path, "a"), later) * 2]
    assert versions == [1, 2, 1, 2]
    assert [entry.checkpoint for entry in registry.versions("model")][1] == "0001-00000020-bb"


def test_an_attempt_that_stopped_half_way_is_completed_under_its_number(tmp_path: Path) -> None:
    registry = FolderRegistry(str(tmp_path / "registry"))
    first = registry.register("model", candidate(tmp_path, "a"), "")
    LocalStorage(tmp_path / "registry").delete("model/versions/000001.json")
    (Path(first.model_uri) / "model.safetensors").unlink()
    assert registry.versions("model") == []  # without an entry there is no version
    assert register(str(tmp_path), "b") == 2  # and its number is not given to another run
    again = registry.register("model", candidate(tmp_path, "a"), "")
    assert (again.version, again.files) == (first.version, first.files)
    assert (Path(again.model_uri) / "model.safetensors").is_file()


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_concurrent_registrations_never_share_a_number(
    tmp_path: Path, pool: type[ThreadPoolExecutor | ProcessPoolExecutor]
) -> None:
    runs = [f"run-{number % 6}" for number in range(12)]  # every run registers twice, at the same time
    with pool(max_workers=6) as workers:
        numbers = list(workers.map(register, [str(tmp_path)] * len(runs), runs))
    version_of = dict(zip(runs, numbers, strict=True))
    assert [version_of[run] for run in runs] == numbers  # one version a run
    assert sorted(version_of.values()) == [1, 2, 3, 4, 5, 6]  # one run a version, no gap
    entries = FolderRegistry(f"{tmp_path}/registry").versions("model")
    assert {entry.run_id: entry.version for entry in entries} == version_of


def test_the_champion_moves_only_from_the_version_it_was_compared_with(tmp_path: Path) -> None:
    for run_id in "abc":
        register(str(tmp_path), run_id)
    registry = FolderRegistry(f"{tmp_path}/registry")
    registry.promote("model", 1, instead_of=None)
    registry.promote("model", 2, instead_of=1)
    with pytest.raises(UserError, match="is version 2, but version 3 was compared with version 1"):
        registry.promote("model", 3, instead_of=1)
    with pytest.raises(UserError, match="compared with none"):
        registry.promote("model", 3, instead_of=None)
    registry.promote("model", 2, instead_of=1)  # repeating a promotion that went through is harmless
    champion = registry.champion("model")
    assert champion is not None
    assert champion.version == 2


def test_of_two_concurrent_promotions_one_wins(tmp_path: Path) -> None:
    for run_id in "abc":
        register(str(tmp_path), run_id)
    registry = FolderRegistry(f"{tmp_path}/registry")
    registry.promote("model", 1, instead_of=None)

    def promote(version: int) -> bool:
        try:
            registry.promote("model", version, instead_of=1)
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(2) as workers:
        won = list(workers.map(promote, [2, 3]))
    champion = registry.champion("model")
    assert champion is not None
    assert sorted(won) == [False, True]
    assert won[champion.version - 2]


def test_aliases_move_independently(tmp_path: Path) -> None:
    register(str(tmp_path), "a")
    staging = FolderRegistry(f"{tmp_path}/registry", alias="staging")
    staging.promote("model", 1, instead_of=None)
    assert FolderRegistry(f"{tmp_path}/registry").champion("model") is None
    assert staging.champion("model") is not None


def test_a_version_that_does_not_exist_cannot_be_promoted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no version 1"):
        FolderRegistry(str(tmp_path)).promote("model", 1, instead_of=None)


def test_a_run_without_an_export_names_the_missing_step(tmp_path: Path) -> None:
    nothing = Candidate(run_id="a", export_uri=str(tmp_path / "export"), metrics={})
    with pytest.raises(ConfigError, match="sync_checkpoint"):
        FolderRegistry(str(tmp_path / "registry")).register("model", nothing, "")


@pytest.mark.parametrize("name", ["", "../other", "a/b", ".hidden", "a" * 129])
def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"register\.model_name"):
        FolderRegistry(str(tmp_path)).versions(name)


def test_a_damaged_entry_is_named(tmp_path: Path) -> None:
    register(str(tmp_path), "a")
    path = tmp_path / "registry" / "model" / "versions" / "000001.json"
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(ConfigError, match=r"000001\.json is not a registry entry"):
        FolderRegistry(f"{tmp_path}/registry").versions("model")


@pytest.mark.parametrize("content", ["{}", '{"version": "one"}', '{"version": 0}', '{"version": null}'])
def test_a_pointer_to_no_version_is_named_and_none_is_in_use_once_it_is_deleted(content: str, tmp_path: Path) -> None:
    version = register(str(tmp_path), "a")
    registry = FolderRegistry(f"{tmp_path}/registry")
    registry.promote("model", version, instead_of=None)
    pointer = tmp_path / "registry/model/CHAMPION"
    pointer.write_text(content)
    with pytest.raises(ConfigError, match="CHAMPION names no version") as caught:
        registry.champion("model")
    assert "delete it" in caught.value.fix
    pointer.unlink()
    assert registry.champion("model") is None
    registry.promote("model", version, instead_of=None)
    champion = registry.champion("model")
    assert champion and champion.version == version
