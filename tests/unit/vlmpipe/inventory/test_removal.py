"""What is removed, what stays and why, and that nothing which remains points at what is gone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runs_root import DONE, FAILED, STOPPED, register, write_run
from vlmpipe.inventory.listing import read_inventory
from vlmpipe.inventory.removal import Policy, pruning_of, removal_of
from vlmpipe.inventory.tags import change_tags
from vlmpipe.runs.folders.lock import take_lock
from vlmpipe.trainer.errors import ConfigError, UserError

DAY_S = 86_400


def kept(root: Path, policy: Policy, now_s: float = 100.0) -> dict[str, str]:
    return {one.run_id: one.reason for one in pruning_of(read_inventory(str(root)), policy, now_s=now_s).kept}


def test_each_run_that_stays_has_its_reason(tmp_path: Path) -> None:
    write_run(tmp_path, "base")
    write_run(tmp_path, "version", started_s=2)
    write_run(tmp_path, "champion", started_s=3)
    write_run(tmp_path, "stopped", started_s=4, exit_code=STOPPED)
    write_run(tmp_path, "failed", started_s=5, exit_code=FAILED)
    change_tags(write_run(tmp_path, "tagged", started_s=6), ["keep-me"])
    write_run(tmp_path, "free", started_s=7)
    model = {"model": {"pretrained": {"weights": str(tmp_path / "runs/base/export")}}}
    write_run(tmp_path, "tuned", started_s=8, settings=model)
    damaged = write_run(tmp_path, "digits-20260101-000000", started_s=9)
    (damaged / "run_file.json").write_text("{")
    write_run(tmp_path, "newest", started_s=90)
    for run_id in ("version", "champion"):
        register(tmp_path, run_id)
    (tmp_path / "runs/data-inspect/steps").mkdir(parents=True)
    lock = take_lock(write_run(tmp_path, "running", started_s=10, name="other"))
    write_run(tmp_path, "newest-other", started_s=11, name="other")

    plan = pruning_of(read_inventory(str(tmp_path)), Policy(keep=1), now_s=100.0)
    assert [run.run_id for run in plan.runs] == ["base", "free", "tuned"]
    assert {one.run_id: one.reason.partition(" (")[0] for one in plan.kept} == {
        "version": "digits@1 in the registry was made of it",
        "champion": "it is digits@champion, which the gate and predict ask",
        "stopped": "the same command continues it",
        "failed": "the same command continues it",
        "tagged": "it is tagged keep-me",
        damaged.name: f"what it refers to is not known: {damaged}/run_file.json is damaged: Expecting property name "
        "enclosed in double quotes: line 1 column 2",
        "newest": "it is the newest of digits",
        "running": "it is running",
        "newest-other": "it is the newest of other",
    }
    assert plan.notes == (f"{tmp_path}/runs/data-inspect left alone: no records of a run",)
    os.close(lock)


@pytest.mark.parametrize("damaged", ["local.json", "prepared.json", "run_file.json", "tags.json"])
def test_a_run_stays_that_a_damaged_run_starts_from(damaged: str, tmp_path: Path) -> None:
    write_run(tmp_path, "base")
    tuned = write_run(tmp_path, "tuned", started_s=2, settings={"model": {"tokenizer": "run:base"}})
    write_run(tmp_path, "newest", started_s=3)
    record = tuned / damaged
    record.write_text(record.read_text()[:-1] if record.exists() else "{")
    assert read_inventory(str(tmp_path)).runs[-2 if damaged != "local.json" else 0].problem
    assert kept(tmp_path, Policy(keep=1))["base"] == "tuned starts from it"


def test_a_run_that_another_starts_from_goes_with_it_or_stays(tmp_path: Path) -> None:
    write_run(tmp_path, "base")
    write_run(tmp_path, "tuned", started_s=2, settings={"model": {"tokenizer": "run:base"}})
    write_run(tmp_path, "newest", started_s=3)
    assert kept(tmp_path, Policy(keep=2))["base"] == "tuned starts from it"
    inventory = read_inventory(str(tmp_path))
    with pytest.raises(ConfigError, match="run base stays: tuned starts from it"):
        removal_of(inventory, ["base"])
    assert len(removal_of(inventory, ["base", "tuned"]).runs) == 2
    assert set(kept(tmp_path, Policy(keep=1))) == {"newest"}


def test_ages_names_and_unfinished_runs_are_chosen(tmp_path: Path) -> None:
    write_run(tmp_path, "old", started_s=1)
    write_run(tmp_path, "stopped", started_s=2, exit_code=None)
    write_run(tmp_path, "young", started_s=9 * DAY_S)
    write_run(tmp_path, "newest", started_s=10 * DAY_S)
    write_run(tmp_path, "other", started_s=3, name="llava")
    found = kept(tmp_path, Policy(keep=1, older_than_days=2, name="digits", unfinished=True), now_s=10 * DAY_S)
    assert found == {
        "young": "it is not older than 2 days",
        "newest": "it is the newest of digits",
        "other": "it is of llava",
    }


def test_shared_data_goes_with_the_last_run_that_uses_it(tmp_path: Path) -> None:
    write_run(tmp_path, "old", prepared="a")
    write_run(tmp_path, "newest", started_s=2, prepared="b")
    plan = pruning_of(read_inventory(str(tmp_path)), Policy(keep=1))
    assert [one.folder.relative_to(tmp_path).as_posix() for one in plan.shared] == ["prepared/a", "features/a"]
    plan.apply()
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*"))
    assert left == ["features/b", "prepared/b", "runs/newest"]


def test_shared_data_stays_where_the_output_folder_was_moved(tmp_path: Path) -> None:
    write_run(tmp_path / "before", "old", prepared="a")
    write_run(tmp_path / "before", "newest", started_s=2, prepared="b")
    moved = (tmp_path / "before").rename(tmp_path / "after")
    plan = pruning_of(read_inventory(str(moved)), Policy(keep=1))
    assert [one.folder.relative_to(moved).as_posix() for one in plan.shared] == ["prepared/a", "features/a"]


def test_shared_data_stays_while_a_run_has_not_said_what_it_uses(tmp_path: Path) -> None:
    write_run(tmp_path, "old", prepared="a")
    write_run(tmp_path, "newest", started_s=2)
    lock = take_lock(tmp_path / "runs/newest")
    plan = pruning_of(read_inventory(str(tmp_path)), Policy(keep=1))
    os.close(lock)
    assert plan.shared == () and plan.notes == ("prepared data and features stay: what newest uses is not known yet",)


def test_a_removal_that_is_interrupted_leaves_no_half_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "old")
    write_run(tmp_path, "newest", started_s=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            pruning_of(read_inventory(str(tmp_path)), Policy(keep=1)).apply()
    inventory = read_inventory(str(tmp_path))
    assert [run.run_id for run in inventory.runs] == ["newest"]
    again = pruning_of(inventory, Policy(keep=1))
    assert len(again.leftovers) == 1 and again.size_bytes > 0
    again.apply()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["newest"]


def _interrupt(*_arguments: object, **_options: object) -> None:
    raise KeyboardInterrupt


def test_a_run_that_was_started_in_the_meantime_stays(tmp_path: Path) -> None:
    write_run(tmp_path, "old")
    write_run(tmp_path, "newest", started_s=2)
    plan = pruning_of(read_inventory(str(tmp_path)), Policy(keep=1))
    lock = take_lock(tmp_path / "runs/old")
    with pytest.raises(UserError, match="run old is already running"):
        plan.apply()
    os.close(lock)
    assert (tmp_path / "runs/old/local.json").is_file()


def test_shared_data_that_a_run_began_to_use_in_the_meantime_stays(tmp_path: Path) -> None:
    write_run(tmp_path, "old", prepared="a")
    write_run(tmp_path, "newest", started_s=2)
    plan = pruning_of(read_inventory(str(tmp_path)), Policy(keep=1))
    write_run(tmp_path, "later", started_s=3, prepared="a")
    said: list[str] = []
    assert plan.apply(said.append) == plan.shared and len(plan.shared) == 2
    assert said[0] == "prepared/a stays: a run that began in the meantime may use it"
    assert (tmp_path / "prepared/a/data").is_file() and not (tmp_path / "runs/old").exists()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_shared_data_of_a_folder_without_a_runs_records_stays(is_damaged: bool, tmp_path: Path) -> None:
    """Such as of a pipeline of one's own, whose steps ran on this machine."""
    write_run(tmp_path, "newest")
    prepared = tmp_path / "prepared/a"
    for folder in (prepared, tmp_path / "runs/by-steps"):
        folder.mkdir(parents=True)
    record = "{" if is_damaged else json.dumps({"prepared_uri": str(prepared), "features_uri": "", "features": "off"})
    (tmp_path / "runs/by-steps/prepared.json").write_text(record)
    inventory = read_inventory(str(tmp_path))
    assert [one.used_by for one in inventory.shared] == [("by-steps",)]
    assert pruning_of(inventory, Policy()).is_empty


def test_a_run_that_a_folder_without_a_runs_records_starts_from_stays(tmp_path: Path) -> None:
    write_run(tmp_path, "base")
    write_run(tmp_path, "newest", started_s=2)
    steps = tmp_path / "runs/by-steps"
    steps.mkdir()
    settings = {"run": {"run_uri": str(steps)}, "model": {"pretrained": {"weights": "runs/runs/base/export"}}}
    (steps / "run.json").write_text(json.dumps(settings))
    assert kept(tmp_path, Policy(keep=1))["base"] == "by-steps starts from it"


@pytest.mark.parametrize("tags", ["null", "5", "[1]"])
def test_a_run_whose_tags_are_damaged_stays(tags: str, tmp_path: Path) -> None:
    old = write_run(tmp_path, "digits-20260101-000000")
    (old / "tags.json").write_text(f'{{"tags": {tags}}}')
    write_run(tmp_path, "newest", started_s=2)
    assert "tags are no list of words" in kept(tmp_path, Policy(keep=1))[old.name]


def test_a_stage_whose_settings_are_no_text_still_names_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "base")
    stage = write_run(tmp_path, "tuned", started_s=2) / "stages/second"
    stage.mkdir(parents=True)
    (stage / "run_file.json").write_bytes(b'{"name": "\xff", "model": {"tokenizer": "run:base"}}')
    assert read_inventory(str(tmp_path)).referring == {"base": ["tuned"]}


@pytest.mark.parametrize("root", ["runs", "outputs/runs", "."])
@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_run_that_is_named_by_its_path_stays_in_any_root(
    root: str, is_absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / root if is_absolute else Path(root)
    write_run(place, "base")
    write_run(
        place, "tuned", started_s=2, settings={"model": {"pretrained": {"weights": str(place / "runs/base/export")}}}
    )
    assert read_inventory(root).referring["base"] == ["tuned"]


RUNS = st.lists(
    st.tuples(
        st.sampled_from(["digits", "llava"]),
        st.sampled_from([DONE, DONE, STOPPED, FAILED]),
        st.sampled_from(["", "a", "b", "c"]),  # prepared data
        st.integers(-1, 5),  # an earlier run that it starts from
        st.sampled_from(["", "", "version", "champion"]),
    ),
    max_size=6,
)


@given(runs=RUNS, keep=st.integers(1, 2), unfinished=st.booleans())
def test_nothing_that_remains_points_at_what_is_gone(
    runs: list[tuple[str, int, str, int, str]], keep: int, unfinished: bool
) -> None:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="vlmpipe-test-", dir=memory) as folder:
        root = Path(folder)
        for number, (name, code, prepared, base, version) in enumerate(runs):
            settings = {"model": {"tokenizer": f"run:r{base}"}} if 0 <= base < number else {}
            write_run(
                root, f"r{number}", name=name, started_s=number, exit_code=code, prepared=prepared, settings=settings
            )
            if version and code == DONE:
                register(root, f"r{number}", promote=version == "champion")
        before = read_inventory(str(root))
        policy = Policy(keep=keep, unfinished=unfinished)
        plan = pruning_of(before, policy)
        plan.apply()
        after = read_inventory(str(root))
        remaining = {run.run_id for run in after.runs}
        assert remaining == {run.run_id for run in before.runs} - {run.run_id for run in plan.runs}
        assert {run.run_id for run in before.runs if run.champion or run.registered} <= remaining
        for run in after.runs:
            assert {one.folder.name for one in after.shared} >= set(run.uses)
            assert set(run.starts_from) <= remaining
        assert all(one.used_by for one in after.shared)
        assert pruning_of(after, policy).is_empty
