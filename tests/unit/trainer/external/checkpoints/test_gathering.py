"""A checkpoint of which two nodes hold parts: committed with all of them, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import MEMORY
from tests.support.clock import replace_time
from tests.support.short_form import WHOLE
from tests.support.trainer.checkpoints import ARCHIVE, record
from tests.support.trainer.external_runs import ExternalRun, external_run
from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.external.checkpoints import gathering, states
from vlmpipe.trainer.external.checkpoints.gathering import NodeParts
from vlmpipe.trainer.external.checkpoints.states import SavedStates, states_of
from vlmpipe.trainer.storage.base import Storage


@dataclass
class Job:
    """Two nodes with one process each, which save ZeRO's shards below `disks`, and their launchers."""

    run: ExternalRun
    chief: SavedStates
    other: NodeParts
    disks: tuple[Path, Path]

    @classmethod
    def begin(cls, root: Path) -> Job:
        run = external_run(root)
        disks = root / "disk-0", root / "disk-1"
        for disk in disks:
            disk.mkdir()
        chief = SavedStates(run.job, record(num_nodes=2, world_size=2), [disks[0]])
        chief.resume(root / "nothing")
        return cls(run, chief, NodeParts(states_of(run.uri), chief.attempt, 1, [disks[1]]), disks)

    @property
    def store(self) -> Storage:
        return states_of(self.run.uri)

    def write(self, node: int, step: int, data: bytes = ARCHIVE) -> None:
        """Shards of the node's process, and on the first node the weights."""
        tag = self.disks[node] / f"global_step{step}"
        tag.mkdir(exist_ok=True)
        (tag / f"zero_pp_rank_{node}_mp_rank_00_optim_states.pt").write_bytes(data)
        if not node:
            (tag / "mp_rank_00_model_states.pt").write_bytes(data)

    def name(self, step: int) -> None:
        (self.disks[0] / "latest").write_text(f"global_step{step}")

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.chief.save_newest()
            self.other.answer()

    def committed_steps(self) -> list[int]:
        return [step_of(name) for name in committed(self.store)]

    def resumed(self, folder: Path) -> dict[str, bytes]:
        """What a later start is given."""
        chief = SavedStates(self.run.job, record(num_nodes=2, world_size=2), [])
        found, _, passed_over = chief.resume(folder)
        assert found and not passed_over
        given = folder / f"checkpoint-{found.record.step}"
        return {path.relative_to(given).as_posix(): path.read_bytes() for path in given.rglob("*") if path.is_file()}


@pytest.fixture
def job(memory: Path) -> Job:
    return Job.begin(memory)


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No time for the other nodes."""
    monkeypatch.setattr(gathering.Gathering, "is_over", property(lambda _: True))
    return None


PARTS = {f"global_step5/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
WEIGHTS = "global_step5/mp_rank_00_model_states.pt"


def test_both_nodes_parts_are_committed_and_resumed(job: Job, tmp_path: Path) -> None:
    for node in range(2):
        job.write(node, 5)
    job.name(5)
    job.look(4)
    assert job.committed_steps() == [5]
    given = job.resumed(tmp_path)
    assert given.pop("latest") == b"global_step5"
    assert {name for name, data in given.items() if data == ARCHIVE} == {*PARTS, WEIGHTS}


def test_a_node_that_answered_before_its_program_had_written_answers_again(job: Job) -> None:
    job.write(0, 5)
    job.name(5)
    job.look(5)
    assert (job.store.stat(f"checkpoints/{job.chief._gathering.name}/node-1.json")) and job.committed_steps() == []  # type: ignore[union-attr]
    job.write(1, 5, ARCHIVE[:100])
    job.look(5)
    assert job.committed_steps() == []
    job.write(1, 5)
    job.look(4)
    assert job.committed_steps() == [5]


def test_without_a_nodes_part_it_is_left_out_with_the_reason_and_the_next_one_is_committed(
    job: Job, over: None
) -> None:
    job.write(0, 5)
    job.name(5)
    job.look(4)
    (warning,) = job.chief.take_warnings()
    assert warning.startswith("global_step5 is not committed: node 1 has not given its files")
    assert not [
        info for info in job.store.list("checkpoints") if "/node-" in info.name and "-00000005-" not in info.name
    ]
    job.look(4)
    assert not job.chief.take_warnings(), "it is not tried again while nothing changes"
    for node in range(2):
        job.write(node, 10)
    job.name(10)
    job.other.answer()
    job.look(1)
    while job.chief._gathering is None:
        job.chief.save_newest()
    for _ in range(3):
        job.other.answer()
    job.chief.save_newest()
    assert job.committed_steps() == [10]


def test_a_tag_that_the_program_removes_while_it_is_copied_is_no_failure(job: Job) -> None:
    for node in range(2):
        job.write(node, 5)
    job.name(5)
    job.chief.save_newest()
    job.chief.save_newest()
    for disk in job.disks:
        shutil.rmtree(disk / "global_step5")
    job.look(3)
    assert job.committed_steps() == [] and job.chief.take_warnings() == []
    for node in range(2):
        job.write(node, 10)
    job.name(10)
    job.look(4)
    assert job.committed_steps() == [10]


def test_the_next_tag_saved_while_one_is_copied_changes_nothing_in_it(job: Job, tmp_path: Path) -> None:
    for node in range(2):
        job.write(node, 5)
    job.name(5)
    job.chief.save_newest()
    job.chief.save_newest()  # it asks the other node
    for node in range(2):
        job.write(node, 10)
    job.name(10)
    while job.chief.newest_step < 5:
        job.look()
    given = job.resumed(tmp_path)
    assert given["latest"] == b"global_step5" and set(given) == {"latest", WEIGHTS, *PARTS}


def test_files_that_the_first_node_has_are_its_own(job: Job, tmp_path: Path) -> None:
    """Nodes that all write the weights, of which some file differs, make one checkpoint."""
    for node in range(2):
        job.write(node, 5)
    for disk, text in zip(job.disks, ("first", "second"), strict=True):
        (disk / "global_step5/args.json").write_text(text)
    job.name(5)
    job.look(4)
    assert job.committed_steps() == [5] and job.resumed(tmp_path)["global_step5/args.json"] == b"first"


def test_a_start_with_another_number_of_processes_is_told_at_once(job: Job, tmp_path: Path) -> None:
    for node in range(2):
        job.write(node, 5)
    job.name(5)
    job.look(4)
    later = SavedStates(job.run.job, record(num_nodes=1, world_size=4), [])
    with pytest.raises(ConfigError, match="shards of 2 processes, and this start has 4") as caught:
        later.resume(tmp_path)
    assert "torch.distributed.checkpoint" in caught.value.fix


def test_nodes_end_once_the_first_needs_nothing_more(job: Job) -> None:
    job.chief.close()
    job.other.close()
    assert not job.other.answer()
    assert not NodeParts(job.store, None, 3, []).answer(), "a parameter server is asked for nothing"


def moving_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A time in s that each wait moves on by five."""
    now = [0.0]
    for module in (gathering, states):
        replace_time(
            monkeypatch,
            module,
            monotonic=lambda: now[0],
            sleep=lambda _: now.__setitem__(0, now[0] + 5.0),
        )
    return now


@pytest.mark.parametrize("failed", [True, False])
def test_a_node_whose_program_failed_does_not_wait_long_for_the_first(
    failed: bool, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its end is what ends the job, while the other nodes may hang in a collective."""
    now = moving_clock(monkeypatch)
    job.other.close(failed=failed)
    assert now[0] == (gathering.FAILED_LIMIT_S if failed else gathering.CLOSED_LIMIT_S)
    assert "has not said that it needs no more files" in capsys.readouterr().err


def test_the_first_node_hurries_where_its_program_failed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = moving_clock(monkeypatch)
    job.write(0, 5)
    job.name(5)
    job.chief.save_last(lambda: False, failed=True)
    assert now[0] == gathering.STOPPING_LIMIT_S and job.committed_steps() == []


EVENTS = ("half 0", "rest 0", "half 1", "rest 1", "latest", *["look"] * 6, *["answer"] * 4)


@settings(max_examples=200 if WHOLE else 25)
@given(st.permutations(EVENTS))
def test_in_any_order_of_events_no_torn_checkpoint_is_committed(events: list[str]) -> None:
    """Processes write in two pieces, `latest` comes at any time, and launchers look in between."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        job, written = Job.begin(Path(root)), {"0": 0, "1": 0}
        for event in events:
            kind, _, node = event.partition(" ")
            if kind in ("half", "rest"):
                written[node] += 1
                job.write(int(node), 5, ARCHIVE if written[node] == 2 else ARCHIVE[:200])
            elif kind == "latest":
                job.name(5)
            elif kind == "look":
                job.chief.save_newest()
            else:
                job.other.answer()
            if job.committed_steps():
                assert written == {"0": 2, "1": 2}, "committed before all was written"
        job.look(6)
        assert job.committed_steps() == [5]
        given = job.resumed(Path(root, "given"))
        assert all(given[name] == ARCHIVE for name in (*PARTS, WEIGHTS))
