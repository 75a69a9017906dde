"""Plans that the processes of a machine share: made once, equal to those of memory, whatever happens to their files."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.data.shard_splits import sequence_of, split_of
from vlmpipe.trainer.data import machine_plans, packing
from vlmpipe.trainer.data.machine_plans import MachinePlans
from vlmpipe.trainer.data.packing import PackingPlan, plan_packing

LENGTHS = np.random.default_rng(0).integers(1, 64, 300).astype(np.int32)


def made(epoch: int) -> PackingPlan:
    images = np.ones(len(LENGTHS), np.int64)
    return plan_packing(LENGTHS, images, sequence_length=64, max_images_per_sequence=9, seed=3, epoch=epoch)


def is_mapped(array: object) -> bool:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return not array.flags.writeable
        array = array.base
    return False


def test_processes_that_start_together_make_each_epoch_once(tmp_path: Path) -> None:
    ranks, epochs, makes = 4, 6, Counter[int]()
    together = threading.Barrier(ranks)

    def make(epoch: int) -> PackingPlan:
        makes[epoch] += 1
        time.sleep(0.01)  # so that others ask meanwhile
        return made(epoch)

    def rank(_: int) -> tuple[list[int], str]:
        plans = MachinePlans(tmp_path / "plans", [LENGTHS], make)
        together.wait()
        return plans.sequences(range(epochs)), plans.plan(1).digest()

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(rank, range(ranks)))
    assert found == ranks * [([len(made(epoch)) for epoch in range(epochs)], made(1).digest())]
    assert makes == Counter({0: 1, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}), "counted once, and epoch 1 also planned once"


def test_a_mapped_plan_is_the_one_in_memory(tmp_path: Path) -> None:
    plans = MachinePlans(tmp_path / "plans", [LENGTHS], made)
    for _ in range(2):  # made, then found
        found = plans.plan(2)
        assert found.digest() == made(2).digest() and found.fill == made(2).fill
        assert is_mapped(found.members) and is_mapped(found.offsets)


def test_a_killed_process_leaves_its_lock_and_its_part_to_the_next(tmp_path: Path) -> None:
    """The kernel ends the lock; the part is written anew."""
    folder = tmp_path / "plans"

    def killed() -> None:
        machine_plans._mapped = lambda path: None
        plan = MachinePlans(folder, [LENGTHS], made)
        part = plan._path(0, "plan").with_name(plan._path(0, "plan").name + ".part")

        def die(epoch: int) -> PackingPlan:
            part.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        plan._make = die
        plan.plan(0)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join(20)
    assert child.exitcode == -signal.SIGKILL and list(folder.glob("*.part"))
    assert MachinePlans(folder, [LENGTHS], made).plan(0).digest() == made(0).digest()
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    plans = MachinePlans(tmp_path / "plans", [LENGTHS], made)
    plans.sequences(range(1))
    plans.plan(0)
    for path in (plans._path(0, "plan"), plans._path(0, "count")):
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 40)):
            changed = bytearray(whole)
            changed[place] ^= 4
            spoiled = {
                "flipped": bytes(changed),
                "cut": whole[:place],
                "empty": b"",
                "longer": whole + bytes(place + 1),
            }
            path.write_bytes(spoiled[damage])
            again = MachinePlans(tmp_path / "plans", [LENGTHS], made)
            assert again.sequences(range(1)) == [len(made(0))] and again.plan(0).digest() == made(0).digest()
            assert path.read_bytes() == whole


def test_other_data_settings_or_code_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = MachinePlans(tmp_path, [b"seed 1", LENGTHS], made)._key
    assert key == MachinePlans(tmp_path, [b"seed 1", LENGTHS.copy()], made)._key
    others = [[b"seed 2", LENGTHS], [b"seed 1", LENGTHS + 1], [b"seed 1", LENGTHS[:-1]], [b"seed 1", LENGTHS, LENGTHS]]
    keys = {MachinePlans(tmp_path, other, made)._key for other in others}
    changed = tmp_path / "packing.py"
    changed.write_bytes(Path(str(packing.__file__)).read_bytes() + b"\n")
    monkeypatch.setattr(packing, "__file__", str(changed))
    keys.add(MachinePlans(tmp_path, [b"seed 1", LENGTHS], made)._key)
    assert len(keys | {key}) == 6


def test_files_of_a_machine_are_few_and_a_mapped_one_may_go(tmp_path: Path) -> None:
    plans = MachinePlans(tmp_path / "plans", [LENGTHS], made)
    first = plans.plan(0)
    for epoch in range(1, 7):
        plans.plan(epoch)
    assert len(list((tmp_path / "plans").glob("*.plan*"))) == machine_plans.KEPT["plan"]
    assert not plans._path(0, "plan").exists() and first.digest() == made(0).digest()


def test_runs_beside_this_one_take_neither_its_plan_nor_the_part_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newer plans of several runs may take a file's place before its maker has mapped it."""
    folder, write = tmp_path / "plans", machine_plans.write
    folder.mkdir()
    young, old = folder / "young-0.plan.part", folder / "old-0.plan.part"
    for part in (young, old):
        part.touch()
    hours_ago_s = time.time() - 3 * 3600
    os.utime(young, (hours_ago_s + 3 * 3600 - 60,) * 2)
    os.utime(old, (hours_ago_s,) * 2)

    def written_and_taken(path: Path, arrays: list[packing.Int64Array]) -> None:
        write(path, arrays)
        if path.suffix == ".plan":
            path.unlink()

    plans = MachinePlans(folder, [LENGTHS], made)
    with monkeypatch.context() as patch:
        patch.setattr(machine_plans, "write", written_and_taken)
        assert plans.plan(0).digest() == made(0).digest()
    assert all(is_mapped(plans.plan(epoch).members) for epoch in range(6)) and not capsys.readouterr().err
    assert young.exists() and not old.exists()


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.ENOLCK, errno.EROFS])
def test_without_room_or_locks_plans_stay_in_memory_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: int
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(machine_plans, "alone" if problem == errno.ENOLCK else "write", refused)
    plans = MachinePlans(tmp_path / "plans", [LENGTHS], made)
    assert plans.sequences(range(3)) == [len(made(epoch)) for epoch in range(3)]
    assert plans.plan(1).digest() == made(1).digest()
    said = capsys.readouterr().err
    assert said.count("cannot keep packing plans") == 1 and os.strerror(problem) in said


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("max_steps", [0, 1, 7, 1000])
def test_an_order_with_shared_plans_is_the_order_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int, max_steps: int
) -> None:
    split = split_of([number // 9 for number in range(100)], [f"{number}.tar" for number in range(12)])
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path))
    alone, shared = sequence_of(split, 2), sequence_of(split, 2, share_from=1)
    assert shared.num_steps(epochs, max_steps=max_steps) == alone.num_steps(epochs, max_steps=max_steps) > 0
    for step in range(alone.num_steps(epochs, max_steps=max_steps)):
        assert shared.batch(step) == alone.batch(step)
        assert (shared.members(shared.batch(step)) == alone.members(alone.batch(step))).all()
    assert list((tmp_path / machine_plans.CACHE_FOLDER).glob("*.plan"))


def test_without_a_cache_folder_of_its_own_a_process_plans_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    split = split_of([0] * 9, ["0.tar"])
    shared = sequence_of(split, 2, share_from=1)
    assert shared.plan(0).digest() == sequence_of(split, 2).plan(0).digest()
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "written by every user" in said and not list((tmp_path / "cache").iterdir())
