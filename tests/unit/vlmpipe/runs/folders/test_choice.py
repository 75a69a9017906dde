"""Which run a command continues, also where settings have changed since."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.trainer.gone_fields import with_gone
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.runs.folders import choice
from vlmpipe.runs.folders.choice import Choice, choose_run, new_run, open_run
from vlmpipe.runs.folders.marker import Marker
from vlmpipe.runs.folders.stages import RUN_FILE_COPY
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import read_record, write_record

NOW = datetime(2026, 11, 20, 15, 30, 0)
NEW = Choice("digits-20261120-153000")
CHECKPOINT = "checkpoints/0001-00000004-ab/COMMIT"


@cache
def of(*overrides: str) -> RunConfig:
    return load_run_file(ROOT / "configs/digits.yaml", overrides)


class Runs:
    """A folder of runs of the quickstart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, run_id: str, *overrides: str, saved: Sequence[str] = (CHECKPOINT,), **changes: Any) -> Marker:
        """A run that was stopped, with checkpoints."""
        config, store = of(*overrides), LocalStorage(self.folder / run_id)
        one = Marker(run_id, config.digest(), ("c.yaml", *overrides), **{"started_s": 0.0, "exit_code": 130, **changes})
        one.write(self.folder / run_id)
        write_record(store, RUN_FILE_COPY, config.to_dict())
        for name in saved:
            store.write(name, b"{}")
        return one

    def choose(self, *overrides: str, run_id: str = "", fresh: bool = False) -> Choice:
        return choose_run(self.folder, of(*overrides), run_id=run_id, fresh=fresh, now=NOW)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.parametrize("exit_code", [None, 130, 65])
def test_the_newest_unfinished_run_is_continued(exit_code: int | None, runs: Runs) -> None:
    new = runs.add("new", started_s=2, exit_code=exit_code)
    runs.add("old", started_s=1)
    assert runs.choose() == Choice("new", new)


def test_an_unfinished_run_whose_place_a_finished_one_has_taken_is_continued_by_name_only(runs: Runs) -> None:
    """Stopped, then begun again with --fresh: the same command starts a third one, and says how to go on with the
    first. One that was continued after that is the newest again."""
    runs.add("stopped", started_s=1, exit_code=130)
    runs.add("whole", started_s=2, exit_code=0)
    notes = ["Run stopped was not finished, and whole, which began after it, was", "To continue it: --run-id stopped"]
    assert runs.choose() == Choice(NEW.run_id, notes=notes)
    assert runs.choose(run_id="stopped").earlier is not None
    again = runs.add("stopped", started_s=3, exit_code=130)
    assert runs.choose() == Choice("stopped", again)


def test_a_finished_run_is_followed_by_a_new_one(runs: Runs) -> None:
    runs.add("old", started_s=1, exit_code=0)
    assert runs.choose() == NEW
    assert runs.choose("notify.email=[a@example.com]") == Choice(f"{NEW.run_id}-2")


@pytest.mark.parametrize(
    "override", ["notify.email=[a@example.com]", "evaluate.batch_questions=8", "train.micro_batch_size=1"]
)
def test_a_setting_that_cannot_change_the_weights_goes_with_the_same_command(override: str, runs: Runs) -> None:
    there = runs.add("mine")
    found = runs.choose(override)
    assert found.earlier == there and found.run_id == "mine"
    (note,) = found.notes
    assert note.startswith(f"Since then: {override.partition('=')[0]} changed from ")


def test_a_setting_that_changes_what_is_learned_needs_the_runs_name_and_the_command_says_it(runs: Runs) -> None:
    there = runs.add("mine")
    found = runs.choose("train.optimizer.learning_rate=1e-4")
    assert (found.run_id, found.earlier) == (NEW.run_id, None)
    assert "train.optimizer.learning_rate changed from 0.002 to 0.0001" in found.notes[0]
    assert "--run-id mine" in found.notes[1]
    assert runs.choose("train.optimizer.learning_rate=1e-4", run_id="mine").earlier == there


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.seed=5",), r"such as 0001-00000004-ab.*: train\.seed changed from 0 to 5"),
        (("name=other",), r'name changed from "digits" to "other"'),
        (
            ("train.global_batch_size=8", "notify.email=[a@example.com]"),
            r"train\.global_batch_size changed from 4 to 8\n",
        ),
    ],
)
def test_a_setting_that_a_checkpoint_does_not_survive_is_refused_by_name(
    overrides: tuple[str, ...], said: str, runs: Runs
) -> None:
    runs.add("mine")
    assert runs.choose(*overrides).earlier is None
    with pytest.raises(ConfigError, match=said):
        runs.choose(*overrides, run_id="mine")
    assert runs.choose(*overrides, "train.resume=never", run_id="mine").earlier


def test_without_a_checkpoint_a_named_run_goes_on_with_any_settings(runs: Runs) -> None:
    there = runs.add("mine", saved=())
    assert runs.choose("train.seed=5", "data.max_reject_fraction=0.5", run_id="mine").earlier == there


def test_what_a_program_of_ones_own_has_saved_counts_too(runs: Runs) -> None:
    runs.add("mine", saved=[f"trainer/{CHECKPOINT}"])
    with pytest.raises(ConfigError, match=r"train\.seed changed"):
        runs.choose("train.seed=5", run_id="mine")


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_another_number_of_processes_continues_a_run(runs: Runs, strategy: str) -> None:
    chosen = f"train.strategy={strategy}"
    runs.add("mine", chosen)
    two = ("cluster.processes_per_replica=2", "train.micro_batch_size=1")
    assert runs.choose(chosen, *two).run_id == "mine"
    assert runs.choose(chosen, *two, "cluster.replica_count=1").run_id == "mine"


def test_a_finished_run_that_is_named_trains_on_for_more_epochs(runs: Runs) -> None:
    there = runs.add("mine", exit_code=0)
    with pytest.raises(ConfigError, match="is finished") as caught:
        runs.choose(run_id="mine")
    assert "train.epochs" in caught.value.fix
    assert runs.choose("train.epochs=9", run_id="mine").earlier == there


def test_of_stages_only_one_that_has_saved_refuses(tmp_path: Path) -> None:
    stages = "stages=[{name: one}, {name: two}]"
    one, two = (
        f"stages=[{{name: one{first}}}, {{name: two{second}}}]"
        for first, second in ((", train: {seed: 3}", ""), ("", ", train: {seed: 3}"))
    )
    runs = Runs(tmp_path)
    runs.add("mine", stages, saved=[f"stages/one/{CHECKPOINT}"])
    with pytest.raises(ConfigError, match=r"stage one of run mine .*train\.seed changed from 0 to 3"):
        runs.choose(one, run_id="mine")
    assert runs.choose(two, run_id="mine").earlier


def test_of_many_unfinished_runs_the_newest_are_compared_and_an_equal_one_is_found(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "MAX_COMPARED", 2)
    equal = runs.add("equal", started_s=1.0)
    runs.add("older", "gate.max_loss=1", started_s=2.0)
    for number in range(2):
        runs.add(f"newer-{number}", "train.seed=5", started_s=3.0 + number)
    assert runs.choose().earlier == equal
    assert runs.choose("gate.max_loss=2").run_id == NEW.run_id


def test_fresh_starts_a_new_run(runs: Runs) -> None:
    runs.add("old")
    assert runs.choose(fresh=True) == NEW


def test_two_runs_of_the_same_second_have_different_names(runs: Runs) -> None:
    runs.add(NEW.run_id, exit_code=0)
    assert runs.choose() == Choice(f"{NEW.run_id}-2")


def test_a_named_run_is_started_or_continued(runs: Runs) -> None:
    assert runs.choose(run_id="mine") == Choice("mine")
    there = runs.add("mine")
    assert runs.choose(run_id="mine") == Choice("mine", there)


def test_a_run_of_a_version_that_is_not_read_is_not_continued(runs: Runs) -> None:
    there = runs.add("mine", "train.seed=5")
    write_record(LocalStorage(runs.folder / "mine"), RUN_FILE_COPY, {"name": "digits", "of_old": 1})
    assert runs.choose() == NEW
    with pytest.raises(ConfigError, match="does not read"):
        runs.choose(run_id="mine")
    assert runs.choose("train.seed=5").earlier == there, "the same settings need no comparison"


def test_a_run_of_an_earlier_version_is_continued_where_its_gone_fields_did_nothing(runs: Runs) -> None:
    there = runs.add("mine", "evaluate.batch_questions=5")
    copy = LocalStorage(runs.folder / "mine")
    write_record(copy, RUN_FILE_COPY, with_gone(read_record(copy, RUN_FILE_COPY)))
    assert runs.choose("evaluate.batch_questions=5").earlier == there
    found = runs.choose(run_id="mine")
    assert (found.earlier, found.notes) == (there, ["Since then: evaluate.batch_questions changed from 5 to 64"])


@pytest.mark.parametrize(
    ("run_id", "fresh", "said"), [("mine", True, "exists already"), ("../mine", False, "--run-id is")]
)
def test_a_run_id_that_cannot_be_used_is_refused(run_id: str, fresh: bool, said: str, runs: Runs) -> None:
    runs.add("mine")
    with pytest.raises(ConfigError, match=said) as caught:
        runs.choose(run_id=run_id, fresh=fresh)
    assert "--run-id" in caught.value.text()


def test_the_first_lines_name_what_has_changed(tmp_path: Path) -> None:
    root = f"output.root_uri={tmp_path}"
    first = open_run(of(root), ["c.yaml"])
    first.close(130)
    again = open_run(of(root, "gate.min_exact_match=0.5"), ["c.yaml"])
    lines = again.introduction()
    again.close(0)
    assert lines[0] == f"Continuing run {first.folder.name}, which was stopped (--fresh starts a new one)"
    assert lines[1] == "Since then: gate.min_exact_match changed from 0.75 to 0.5"
    longer = open_run(of(root, "train.epochs=9"), ["c.yaml"], run_id=first.folder.name)
    assert longer.introduction()[0].endswith("which was finished"), "--run-id and --fresh exclude each other"
    longer.close(0)


def test_commands_of_one_second_get_runs_of_their_own(tmp_path: Path) -> None:
    """Seeds of a loop: each has its folder before another looks for one."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_run(tmp_path / "runs", "digits", NOW), range(24)))
    assert len(set(made)) == 24 and {path.name for path in (tmp_path / "runs").iterdir()} == set(made)


def test_an_id_with_a_final_newline_is_refused(runs: Runs) -> None:
    with pytest.raises(ConfigError, match="--run-id is"):
        runs.choose(run_id="mine\n")
