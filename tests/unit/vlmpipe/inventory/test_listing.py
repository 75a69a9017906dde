"""Whatever record of a run or of the registry is damaged, and however: all runs are listed, and none is removed that
the record may name."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs_root import register, write_run
from tests.support.short_form import WHOLE
from vlmpipe.inventory.listing import newest_runs, read_inventory
from vlmpipe.inventory.page import build_page
from vlmpipe.inventory.removal import Policy, pruning_of
from vlmpipe.inventory.tags import change_tags
from vlmpipe.trainer.storage.records import seal

CONTENTS = (
    b"", b"{", b"{}", b"[]", b"null", b"\xff\xfe\x00", b'{"version": "one"}', b'{"version": -1}', b'{"run_id": 3}',
    seal({"version": 99, "run_id": "none"}), seal({"started_s": "yesterday", "exit_code": "x", "model": 5}),
)  # fmt: skip
RUNS = ("version", "champion", "free", "newest")


def write_root(root: Path) -> None:
    for number, run_id in enumerate(RUNS, 1):
        write_run(root, run_id, started_s=number, prepared="a", losses=(2.0, 1.0), exact_match=0.9)
    change_tags(root / "runs/free", ["mine"])
    change_tags(root / "runs/free", [], ["mine"])
    for run_id in ("version", "champion"):
        register(root, run_id)


def records(root: Path) -> list[Path]:
    """All files but those of models."""
    return sorted(path for path in root.rglob("*") if path.is_file() and "model" not in path.relative_to(root).parts)


def test_all_runs_are_listed_whatever_is_damaged_and_none_goes_that_is_registered(tmp_path: Path) -> None:
    write_root(tmp_path)
    whole = read_inventory(str(tmp_path))
    assert not whole.problems and whole.runs[1].champion and whole.runs[0].registered
    damaged = records(tmp_path)
    assert {path.name for path in damaged} >= {"CHAMPION", "CLAIM", "000001.json", "registered.json", "run_file.json"}
    for number, path in enumerate(damaged):
        before = path.read_bytes()
        contents = (*CONTENTS, before[: len(before) // 2])
        for content in contents if WHOLE else {contents[-1], contents[number % len(CONTENTS)]}:
            path.write_bytes(content)
            listing, inventory = newest_runs(str(tmp_path)), read_inventory(str(tmp_path))
            assert {run.run_id for run in listing.runs} == {run.run_id for run in inventory.runs} == set(RUNS), path
            gone = {run.run_id for run in pruning_of(inventory, Policy(keep=1)).runs}
            assert gone <= {"free"}, (path, content)
        build_page(listing, tmp_path / "runs.html")
        path.write_bytes(before)
