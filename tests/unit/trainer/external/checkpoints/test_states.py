"""Copies of a program's checkpoints: its own rotation is no failure, and an absent store ends nothing at once."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import MEMORY
from tests.support.trainer.checkpoints import ARCHIVE, record
from tests.support.trainer.external_runs import ExternalRun, external_run
from vlmpipe.trainer.checkpoint.attempts import (
    Attempts,
    claim_attempt,
    follow_attempt,
    last_attempt,
    read_attempts,
    require_current,
    step_of,
)
from vlmpipe.trainer.checkpoint.commit import committed
from vlmpipe.trainer.checkpoint.failed_saves import FailedSaves
from vlmpipe.trainer.checkpoint.mirror import background
from vlmpipe.trainer.checkpoint.mirror.background import BackgroundMirror
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.external.base_model import model_section_sha256
from vlmpipe.trainer.external.checkpoints import states as module
from vlmpipe.trainer.external.checkpoints.states import SavedStates, newest_result, results_of, states_of
from vlmpipe.trainer.external.report import is_done, settings_sha256
from vlmpipe.trainer.storage.local import LocalStorage
from vlmpipe.trainer.storage.records import write_record


class Store(LocalStorage):
    """A folder; something happens before each upload, and it may be away."""

    before_upload: Callable[[Path], object] = staticmethod(lambda path: None)
    is_away = False
    read_bytes = 0  # of files of checkpoints

    def read_range(self, name: str, start: int, end: int, *, version: str = "") -> bytes:
        data = super().read_range(name, start, end, version=version)
        self.read_bytes += len(data)
        return data

    def upload(self, path: Path, name: str, *, crc32c: int | None = None) -> None:
        self.before_upload(path)
        self._answer()
        super().upload(path, name, crc32c=crc32c)

    def write(self, name: str, data: bytes) -> None:
        self._answer()
        super().write(name, data)

    def _answer(self) -> None:
        if self.is_away:
            raise UserError("the store does not answer", code=ExitCode.UNAVAILABLE)


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return memory


@pytest.fixture
def run(tmp_path: Path) -> ExternalRun:
    return external_run(tmp_path)


@pytest.fixture
def store(run: ExternalRun, monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store(states_of(run.uri).root_uri)
    monkeypatch.setattr(module, "states_of", lambda _uri: store)
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def saved_states(job: JobConfig, folder: Path, limit_s: float = 3600.0) -> SavedStates:
    states = SavedStates(job, record(num_nodes=1), [folder])
    states._failures = FailedSaves(limit_s, retry_s=0.0)
    return states


def checkpoint(folder: Path, step: int) -> Path:
    """What the program leaves at a step."""
    made = folder / f"checkpoint-{step}"
    made.mkdir()
    (made / "model.safetensors").write_bytes(bytes([step]) * 1000)
    (made / "number").write_text(str(step))
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return made


def looked_at_twice(states: SavedStates) -> None:
    for _ in range(2):  # one that changes no more between two looks is finished
        states.save_newest()


def wait_until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("file", ["model.safetensors", "number", "trainer_state.json"])
@pytest.mark.parametrize("whole", [True, False], ids=["the folder", "a file of it"])
def test_a_checkpoint_that_the_program_deletes_meanwhile_is_no_failure(
    file: str, whole: bool, run: ExternalRun, store: Store, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states, first = saved_states(run.job, folder), checkpoint(folder, 5)

    def rotate(path: Path) -> None:
        if path == first / file:
            shutil.rmtree(first) if whole else path.unlink()

    store.before_upload = rotate
    looked_at_twice(states)
    said = capsys.readouterr()
    assert "not saved" not in said.err and committed(store) == []
    shutil.rmtree(first, ignore_errors=True)
    checkpoint(folder, 10)
    looked_at_twice(states)
    assert [step_of(name) for name in committed(store)] == [10]
    assert len(list(store.root.glob("checkpoints/*-*"))) == 1, "no half copy is left"


def test_a_start_reads_each_byte_of_the_checkpoint_once_and_passes_over_a_damaged_one(
    run: ExternalRun, store: Store, folder: Path, tmp_path: Path
) -> None:
    states, bytes_in = saved_states(run.job, folder), {}
    for step in (5, 10):
        made = checkpoint(folder, step)
        bytes_in[step] = sum(file.stat().st_size for file in made.iterdir())
        looked_at_twice(states)
    _, newest = committed(store)
    resumed_in, given = tmp_path / "resume", tmp_path / "given"
    store.read_bytes = 0
    found, _, passed_over = saved_states(run.job, folder).resume(given)
    assert found and found.name == newest and not passed_over and store.read_bytes == bytes_in[10]
    assert (given / "checkpoint-10/number").read_text() == "10"
    store.write(f"checkpoints/{newest}/model.safetensors", bytes(1000))
    found, _, passed_over = saved_states(run.job, folder).resume(resumed_in)
    assert found and found.record.step == 5 and "model.safetensors differs from" in passed_over[0]
    assert [path.name for path in resumed_in.iterdir()] == ["checkpoint-5"]


def test_a_store_that_is_away_is_a_warning_and_the_newest_is_copied_later(
    run: ExternalRun, store: Store, folder: Path
) -> None:
    states = saved_states(run.job, folder)
    store.is_away = True
    for step in (5, 10):
        checkpoint(folder, step)
        looked_at_twice(states)
    warnings = states.take_warnings()
    assert warnings and all("is not saved: the store does not answer" in text for text in warnings)
    store.is_away = False
    states.save_newest()
    assert [step_of(name) for name in committed(store)] == [10] and states.newest_step == 10


def test_after_the_limit_the_job_ends_with_its_cause(run: ExternalRun, store: Store, folder: Path) -> None:
    states = saved_states(run.job, folder, limit_s=0.0)
    store.is_away = True
    checkpoint(folder, 5)
    with pytest.raises(UserError, match="no checkpoint was committed since") as caught:
        looked_at_twice(states)
    assert caught.value.code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize("stopping", [False, True])
def test_the_last_checkpoint_is_waited_for_unless_the_machine_goes(
    stopping: bool, run: ExternalRun, store: Store, folder: Path
) -> None:
    states, tries = saved_states(run.job, folder), []
    store.is_away = True

    def count(_path: Path) -> None:
        tries.append(1)
        store.is_away = len(tries) < 3

    store.before_upload = count
    checkpoint(folder, 5)
    states.save_last(lambda: stopping)
    assert len(committed(store)) == (not stopping)


@given(st.permutations([0, 0, 1, 1, 2, 2]), st.integers(0, 4))
def test_both_counts_name_the_same_last_start_in_any_order(turns: list[int], earlier: int) -> None:
    """Three starts at once, each of which claims in one store and then follows in the other."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        states, results = LocalStorage(Path(root, "trainer")), LocalStorage(Path(root, "result"))
        for _ in range(earlier):  # results of starts that left no checkpoint, whose own count was lost
            claim_attempt(results, fresh=False)
        claimed: dict[int, Attempts] = {}
        superseded: set[int] = set()
        for start in turns:
            if start not in claimed:
                claimed[start] = claim_attempt(states, fresh=False, above=last_attempt(results))
                continue
            try:
                follow_attempt(results, claimed[start])
            except UserError as error:
                assert error.code == ExitCode.SUPERSEDED
                superseded.add(start)
        last = max(claimed, key=lambda start: claimed[start].attempt)
        assert last not in superseded
        assert read_attempts(states).attempt == read_attempts(results).attempt == claimed[last].attempt > earlier
        for store in (states, results):
            require_current(store, claimed[last].attempt)


def test_a_start_follows_a_fresh_one_in_both_stores(run: ExternalRun, folder: Path) -> None:
    saved_states(run.job, folder)
    fresh = run.job.model_copy(update={"train": run.job.train.model_copy(update={"resume": "never"})})
    saved_states(fresh, folder)
    assert read_attempts(states_of(run.uri)) == read_attempts(results_of(run.uri))
    assert read_attempts(results_of(run.uri)).fresh_from == 2


def test_a_finished_program_is_not_trained_again_by_a_restart_and_is_by_the_next_submission_of_never(
    run: ExternalRun, tmp_path: Path
) -> None:
    def job_of(submission: str) -> JobConfig:
        train = run.job.train.model_copy(update={"resume": "never"})
        return run.job.model_copy(
            update={"train": train, "run": run.job.run.model_copy(update={"submission": submission})}
        )

    result = tmp_path / "output"
    result.mkdir()
    (result / "config.json").write_text("{}")
    job = job_of("one")
    assert not is_done(job)
    name = SavedStates(job, record(num_nodes=1), []).save_result(result, 12, "hf-model")
    summary = {"steps": 12, "result": name, "settings_sha256": settings_sha256(job)}
    write_record(LocalStorage(run.uri), "summary.json", summary)
    assert is_done(job) and not is_done(job_of("two"))


def test_a_finished_program_of_the_version_before_is_not_trained_again(run: ExternalRun) -> None:
    """Fields that came since are at their defaults, or do not decide the result."""
    job = run.job.model_copy(update={"data": run.job.data.model_copy(update={"loader_threads": 3})})
    since = {"warmup_steps", "loader_threads"}
    without = since | {"resume", "keep_checkpoints", "log_every_steps", "checkpoint_every_steps"}
    sections = [
        job.train.model_dump(mode="json", exclude=without),
        job.data.model_dump(mode="json", exclude=since),
        model_section_sha256(job),
        job.pointers().prepared_uri,
    ]
    assert settings_sha256(job) == hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()
    warm = job.model_copy(update={"train": job.train.model_copy(update={"warmup_steps": 3, "warmup_fraction": None})})
    assert settings_sha256(warm) != settings_sha256(job)


def test_a_copy_in_the_mirror_is_resumed_once_the_first_store_is_lost(
    run: ExternalRun, folder: Path, tmp_path: Path
) -> None:
    settings = run.job.checkpoint.model_copy(update={"mirror_uri": str(tmp_path / "mirror")})
    job = run.job.model_copy(update={"checkpoint": settings})
    states = saved_states(job, folder)
    states.resume(tmp_path / "nothing")
    checkpoint(folder, 5)
    looked_at_twice(states)
    mirror = LocalStorage(tmp_path / "mirror/runs/run/trainer")
    wait_until(lambda: states._copies and states._copies.lag(5).steps == 0)
    shutil.rmtree(states_of(run.uri).root_uri)
    later = saved_states(job, folder)
    found, store, _ = later.resume(tmp_path / "given")
    assert found and found.record.step == 5 and store.root_uri == mirror.root_uri
    assert later.attempt == states.attempt + 1, "it outranks what the mirror holds"
    assert (tmp_path / "given/checkpoint-5/number").read_text() == "5"


def test_a_mirror_that_lags_is_said_once(
    run: ExternalRun, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored = run.job.checkpoint.model_copy(update={"mirror_uri": str(tmp_path / "mirror")})
    job = run.job.model_copy(update={"checkpoint": mirrored})
    monkeypatch.setattr(background, "LAG_WARNING_S", 1e-9)
    monkeypatch.setattr(BackgroundMirror, "_copy", lambda *_: "the bucket is away")
    states = saved_states(job, folder)
    states.resume(tmp_path / "nothing")
    checkpoint(folder, 5)
    looked_at_twice(states)
    wait_until(lambda: states._copies and states._copies.lag(5).error)  # the thread has used what is patched
    for _ in range(2):
        looked_at_twice(states)
    (warning,) = states.take_warnings()
    assert "the mirror lags" in warning


def test_the_result_of_several_nodes_is_that_of_the_first(run: ExternalRun, tmp_path: Path) -> None:
    (result := tmp_path / "output").mkdir()
    (result / "config.json").write_text("{}")
    name = SavedStates(run.job, record(num_nodes=2), []).save_result(result, 12, "hf-model")
    _, found, _ = newest_result(run.job)
    assert found and found.name == name


def test_latest_names_the_tag_that_is_copied_though_the_program_saves_the_next_one_meanwhile(
    run: ExternalRun, store: Store, folder: Path
) -> None:
    def save(step: int) -> None:
        (tag := folder / f"global_step{step}").mkdir()
        for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
            (tag / name).write_bytes(ARCHIVE)
        (folder / "latest").write_text(tag.name)

    states = SavedStates(run.job, record(num_nodes=1, world_size=1), [folder])
    save(5)
    states.save_newest()
    uploads = itertools.count()  # files are copied by several threads: one of them meets the next checkpoint
    store.before_upload = lambda path: save(10) if next(uploads) == 0 else None
    states.save_newest()
    (name,) = committed(store)
    assert step_of(name) == 5 and store.read(f"checkpoints/{name}/latest") == b"global_step5"
