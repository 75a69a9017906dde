"""The commit protocol on a folder: what exists, what is believed, and what is passed over."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.checkpoint.commit import (
    CommitRecord,
    checkpoint_name,
    commit,
    committed,
    delete_old,
    fetch_folder,
    newest_good,
    upload_node_files,
)
from trainer.errors import ExitCode, UserError
from trainer.storage import LocalStorage

RECORD = CommitRecord(
    epoch=0,
    step=1,
    rows_consumed=8,
    world_size=2,
    num_nodes=2,
    strategy="ddp",
    checkpoint_format="dcp",
    plan_sha256="plan",
    model_sha256="model",
    tower_sha256="tower",
    versions={},
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


def save(store: LocalStorage, tmp_path: Path, step: int, *, commits: bool = True) -> str:
    """A checkpoint of two nodes with one file each."""
    name = checkpoint_name(0, step, f"nonce{step}")
    for node in range(2):
        staging = tmp_path / f"staging-{step}-{node}"
        (staging / "deep").mkdir(parents=True)
        (staging / "deep" / f"shard-{node}").write_bytes(bytes([step, node]) * 1000)
        upload_node_files(store, name, node, staging)
    if commits:
        commit(store, name, dataclasses.replace(RECORD, step=step))
    return name


def test_nothing_committed_is_no_checkpoint(store: LocalStorage, tmp_path: Path) -> None:
    save(store, tmp_path, 1, commits=False)
    assert newest_good(store) == (None, [])


def test_the_newest_committed_one_is_taken(store: LocalStorage, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(store, tmp_path, step)
    save(store, tmp_path, 200, commits=False)
    found, passed_over = newest_good(store)
    assert found is not None and found.record.step == 100 and passed_over == []


def test_its_files_come_back_in_their_layout(store: LocalStorage, tmp_path: Path) -> None:
    save(store, tmp_path, 7)
    found, _ = newest_good(store)
    assert found is not None
    folder = fetch_folder(store, found, tmp_path / "scratch")
    assert (folder / "deep" / "shard-1").read_bytes() == bytes([7, 1]) * 1000


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
@pytest.mark.parametrize("file", ["deep/shard-1", "node-0.json", "COMMIT"])
def test_damage_anywhere_falls_back_to_the_one_before(store: LocalStorage, tmp_path: Path, file: str, how: str) -> None:
    save(store, tmp_path, 1)
    newest = save(store, tmp_path, 2)
    damage(store.path(f"checkpoints/{newest}/{file}"), how)
    found, passed_over = newest_good(store)
    assert found is not None and found.record.step == 1
    if (file, how) != ("COMMIT", "remove"):  # without COMMIT it never existed: nothing is passed over
        assert len(passed_over) == 1 and newest in passed_over[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_flipped_bit_of_commit_is_believed(store: LocalStorage, tmp_path: Path, data: st.DataObject) -> None:
    """Also one that leaves it readable: another step number would misplace the run in its data."""
    if not committed(store):
        save(store, tmp_path, 1)
        save(store, tmp_path, 2)
    path = store.path(f"checkpoints/{committed(store)[-1]}/COMMIT")
    whole = path.read_bytes()
    place = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[place // 8] ^= 1 << place % 8
    path.write_bytes(flipped)
    found, passed_over = newest_good(store)
    path.write_bytes(whole)
    assert found is not None and found.record.step == 1 and len(passed_over) == 1


def test_all_damaged_is_an_error_and_deletes_nothing(store: LocalStorage, tmp_path: Path) -> None:
    name = save(store, tmp_path, 1)
    damage(store.path(f"checkpoints/{name}/deep/shard-0"), "flip")
    before = store.list("checkpoints")
    with pytest.raises(UserError, match="no checkpoint of this run verifies") as caught:
        newest_good(store)
    assert caught.value.code == ExitCode.CHECKPOINT_CORRUPT
    assert store.list("checkpoints") == before


def test_old_ones_are_deleted_and_the_newest_kept(store: LocalStorage, tmp_path: Path) -> None:
    names = [save(store, tmp_path, step) for step in (1, 2, 3)]
    assert delete_old(store, keep=2, newest=names[-1]) == names[:1]
    assert committed(store) == names[1:]
    assert not store.list(f"checkpoints/{names[0]}")


def test_checkpoints_of_a_future_that_did_not_happen_never_outlive_the_one_just_saved(
    store: LocalStorage, tmp_path: Path
) -> None:
    resumed_from = save(store, tmp_path, 1)
    save(store, tmp_path, 9)  # passed over as damaged
    newest = save(store, tmp_path, 2)
    delete_old(store, keep=1, newest=newest)
    assert committed(store) == [newest] != [resumed_from]


def test_committing_again_after_a_lost_answer_is_success(store: LocalStorage, tmp_path: Path) -> None:
    name = save(store, tmp_path, 1)
    commit(store, name, RECORD)
    assert committed(store) == [name]
