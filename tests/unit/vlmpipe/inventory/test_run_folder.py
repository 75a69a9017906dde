"""An output folder of many runs: what commands open, by the number of runs, and what a bounded list says it leaves out.

No times: files that are opened and folders that are listed are counted.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs_root import FAILED, STOPPED, register, write_run
from vlmpipe.inventory import removal
from vlmpipe.inventory.listing import Filter, newest_runs, read_inventory
from vlmpipe.inventory.removal import Policy, pruning_of
from vlmpipe.inventory.run_folder import BULK, ListedRun, RunFolder
from vlmpipe.inventory.tags import change_tags
from vlmpipe.platforms.short_names import full_name
from vlmpipe.registry.folder import FolderRegistry
from vlmpipe.runs.folders.lock import take_lock
from vlmpipe.runs.folders.marker import Marker, all_markers
from vlmpipe.runs.folders.summary import find_run

FEW, MANY = 5, 9
SHOWN = 3
_opened: list[str] = []  # paths, while they are counted
_counting: list[str] = []  # the root below which they are


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _counting and event in ("open", "os.scandir", "os.listdir") and str(arguments[0]).startswith(_counting[0]):
        _opened.append(str(arguments[0]))


sys.addaudithook(_note)  # which cannot be taken away again


def opened(work: Callable[[], object], root: Path) -> int:
    """Files and folders under `root` that `work` opens."""
    _opened.clear()
    _counting.append(str(root))
    try:
        work()
    finally:
        _counting.clear()
    return len(_opened)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    """Folders of FEW and of MANY runs of every outcome, a quarter versions, with files that no listing opens."""
    made = {}
    for count in (FEW, MANY):
        root = made[count] = tmp_path_factory.mktemp(f"runs-{count}")
        for number in range(count):
            code = {1: STOPPED, 2: FAILED}.get(number % 4, 0)
            folder = write_run(root, f"r{number:03d}", started_s=number + 1.0, exit_code=code, exact_match=0.9)
            for name in BULK:
                (folder / name / "deep/deeper").mkdir(parents=True)
            if number % 4 == 0:
                register(root, folder.name)
    yield made


# What each takes for a run, at most: its marker; to decide on removals also its folder, settings, data and versions.
LAWS: dict[str, tuple[Callable[[Path], object], float]] = {
    "list": (lambda root: newest_runs(str(root), last=SHOWN), 1.0),
    "a tag": (lambda root: newest_runs(str(root), chosen=Filter(tag="none")), 1.0),
    "an outcome": (lambda root: newest_runs(str(root), last=1, chosen=Filter(outcome="failed")), 1.5),
    "@last": (lambda root: full_name("@last", str(root)), 1.0),
    "@last:NAME": (lambda root: full_name("@last:digits", str(root)), 1.0),
    "a beginning": (lambda root: full_name("x", str(root)), 1.0),
    "an id": (lambda root: find_run(str(root), full_name("r003", str(root))), 0.0),
    "markers": (lambda root: all_markers(root / "runs"), 1.0),
    "prune": (lambda root: pruning_of(read_inventory(str(root)), Policy(keep=1)), 3.25),
}


@pytest.mark.parametrize("name", LAWS)
def test_what_is_opened_for_each_further_run_is_bounded(
    name: str, roots: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "MAX_SIZED", 1)
    work, most = LAWS[name]
    few, many = (opened(lambda root=root: work(root), root) for root in roots.values())
    assert few > 0 and many - few <= most * (MANY - FEW), f"{(many - few) / (MANY - FEW):.2f} a run"


def test_a_run_that_may_go_is_asked_for_its_status_once(
    roots: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its folder is a link; that it is there still follows from its files."""
    monkeypatch.setattr(removal, "MAX_SIZED", 1)
    asked: list[object] = []

    def counting(work: Callable[..., object]) -> Callable[..., object]:
        return lambda path, *arguments, **named: (asked.append(path), work(path, *arguments, **named))[1]

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    counts = {}
    for count, root in roots.items():
        asked.clear()
        pruning_of(read_inventory(str(root)), Policy(keep=1))
        counts[count] = sum(str(path).startswith(f"{root}/runs/") for path in asked)
    assert counts[FEW] and counts[MANY] - counts[FEW] <= MANY - FEW


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (Filter(tag="mine"), ["r0", "r4"]),
        (Filter(outcome="failed"), ["r1", "r4"]),
        (Filter(outcome="damaged"), ["r2"]),
        (Filter(outcome="running"), ["r3"]),
        (Filter(outcome="done"), ["r0"]),
        (Filter(name="r2"), ["r2"]),
        (Filter(name="digits", outcome="failed", tag="mine"), ["r4"]),
    ],
    ids=str,
)
def test_a_filter_chooses_by_what_is_listed(chosen: Filter, expected: list[str], tmp_path: Path) -> None:
    """Also a run that its marker says is done, but is running again or damaged in another record."""
    codes = {"r0": 0, "r1": FAILED, "r2": FAILED, "r3": 0, "r4": FAILED}
    folders = [write_run(tmp_path, run_id, exit_code=code) for run_id, code in codes.items()]
    (folders[2] / "run_file.json").write_text("{")
    lock = take_lock(folders[3])
    for number in (0, 4):
        change_tags(folders[number], ["mine"])
    assert [run.run_id for run in newest_runs(str(tmp_path), chosen=chosen).runs] == expected
    assert [run.run_id for run in newest_runs(str(tmp_path)).runs if chosen.chooses(run)] == expected
    os.close(lock)


def test_a_run_whose_start_is_not_known_is_listed_whatever_its_age(tmp_path: Path) -> None:
    for number in range(4):
        write_run(tmp_path, f"r{number}", started_s=number + 1.0)
    (tmp_path / "runs/r1/local.json").write_bytes(b"{")
    found = newest_runs(str(tmp_path), last=2)
    assert [(run.run_id, run.outcome) for run in found.runs] == [("r1", "damaged"), ("r2", "done"), ("r3", "done")]
    assert found.left_out == 1


def test_a_run_that_is_continued_is_running_and_the_newest(tmp_path: Path) -> None:
    for number in range(3):
        write_run(tmp_path, f"r{number}", started_s=number + 1.0)
    lock = take_lock(write_run(tmp_path, "r0", started_s=9.0, exit_code=None))
    assert [(run.run_id, run.outcome) for run in newest_runs(str(tmp_path), last=1).runs] == [("r0", "running")]
    os.close(lock)


def test_a_run_that_is_removed_while_runs_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_run(tmp_path, f"r{number}", started_s=number + 1.0)
    has_run = RunFolder.has_run

    def then_removed(run: RunFolder) -> bool:
        assert has_run.fget
        found: bool = has_run.fget(run)
        if run.run_id == "r1":
            shutil.rmtree(run.folder)
        return found

    for read in (newest_runs, read_inventory):
        monkeypatch.setattr(RunFolder, "has_run", property(then_removed))
        assert [run.run_id for run in read(str(tmp_path)).runs] == ["r0", "r2"]
        write_run(tmp_path, "r1", started_s=2.0)


def test_a_run_that_is_removed_after_a_filter_chose_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_run(tmp_path, f"r{number}", started_s=number + 1.0)
    chooses = Filter.chooses

    def then_removed(chosen: Filter, run: ListedRun) -> bool:
        if run.run_id == "r2":
            shutil.rmtree(tmp_path / "runs/r1")
        return chooses(chosen, run)

    monkeypatch.setattr(Filter, "chooses", then_removed)
    found = newest_runs(str(tmp_path), chosen=Filter(outcome="done"))
    assert [run.run_id for run in found.runs] == ["r0", "r2"]


def test_a_folder_that_this_user_may_not_read_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lost+found, where runs is a disk of its own."""
    for number in range(2):
        write_run(tmp_path, f"r{number}", started_s=number + 1.0)
    (tmp_path / "runs/lost+found").mkdir()

    def refusing(work: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *arguments: Any, **named: Any) -> Any:
            if "lost+found" in str(path):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return work(path, *arguments, **named)

        return called

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    assert full_name("@last", str(tmp_path)) == "r1" and len(newest_runs(str(tmp_path)).runs) == 2
    removal = pruning_of(read_inventory(str(tmp_path)), Policy(keep=1))
    assert [run.run_id for run in removal.runs] == ["r0"] and "lost+found" in removal.notes[0]


@pytest.mark.parametrize("place", ["stages/export", "variants/logs/0", "trial-1", "mine/deep/folder"])
def test_references_are_found_wherever_a_part_of_a_run_has_records(place: str, tmp_path: Path) -> None:
    """Also where a stage or a variant has the name of a folder that is not looked into beside records."""
    base, run = write_run(tmp_path, "base"), write_run(tmp_path, "tuned", started_s=2, prepared="a")
    part = write_run(run, "x", settings={"model": {"tokenizer": "run:base"}}, prepared="b")
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    (run / "runs/x").rename(run / place)
    found = read_inventory(str(tmp_path))
    assert found.referring == {base.name: ["tuned"]} and found.runs[1].uses == ("a", "b"), part


def test_runs_of_earlier_versions_are_grouped_by_their_run_file(tmp_path: Path) -> None:
    """Their markers have no name."""
    for number, (run_id, name) in enumerate({"mine": "digits", "digits-20260101-000000": "llava"}.items(), 1):
        write_run(tmp_path, run_id, name=name)
        Marker(run_id, "digest", (), started_s=float(number), exit_code=0).write(tmp_path / "runs" / run_id)
    assert [run.name for run in read_inventory(str(tmp_path)).runs] == ["digits", "llava"]
    assert full_name("@last:digits", str(tmp_path)) == "mine"


def test_a_version_of_an_older_registry_keeps_its_run(tmp_path: Path) -> None:
    """Whose claims have no names, and whose run has lost its record."""
    for number in range(3):
        register(tmp_path, write_run(tmp_path, f"r{number}", started_s=number + 1.0).name, promote=False)
        (tmp_path / f"runs/r{number}/registered.json").unlink()
    shutil.rmtree(tmp_path / "registry/digits/claims")
    assert not pruning_of(read_inventory(str(tmp_path)), Policy(keep=1)).runs
    assert FolderRegistry(str(tmp_path / "registry")).run_ids("digits") == {1: "r0", 2: "r1", 3: "r2"}


def test_tags_are_read_where_there_are_some(tmp_path: Path) -> None:
    change_tags(write_run(tmp_path, "r0"), ["mine"])
    write_run(tmp_path, "r1", started_s=2.0)
    chosen = newest_runs(str(tmp_path), last=1, chosen=Filter(tag="mine"))
    assert [run.run_id for run in chosen.runs] == ["r0"] and chosen.num_runs == 2
