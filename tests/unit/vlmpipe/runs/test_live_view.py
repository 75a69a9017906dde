"""What a person sees of a run, from the files that it leaves."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from vlmpipe.runs.folders.marker import Marker
from vlmpipe.runs.folders.newest_checkpoint import newest_checkpoint_step
from vlmpipe.runs.folders.state import ATTEMPT_LINE, first_error, read_state
from vlmpipe.runs.folders.summary import RunReport, report_of
from vlmpipe.runs.live_view import PlainView, line_of, render, short_number
from vlmpipe.runs.run_state import RunState, clock
from vlmpipe.runs.steps import OPTIONAL, STEPS, Step
from vlmpipe.trainer.checkpoint.attempts import claim_attempt
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.storage.local import LocalStorage

NOW_S = 1_000_100.0


def record(step: str, state: str, **fields: Any) -> dict[str, Any]:
    ended_s = 0.0 if state == "running" else NOW_S - 10
    return {"step": step, "state": state, "started_s": NOW_S - 40, "ended_s": ended_s, **fields}


# The files of a run that failed in evaluation, as they were recorded.
RUN_FILES: dict[str, str] = {
    "steps/resolve-run.json": json.dumps(record("resolve-run", "done", message="run.json written")),
    "steps/prepare-data.json": json.dumps(record("prepare-data", "reused", message="300 read, 300 accepted")),
    "steps/cache-features.json": json.dumps(record("cache-features", "done", done=300, total=300, unit="images")),
    "steps/train.json": json.dumps(record("train", "running", done=120, total=300, unit="steps", message="loss 0.41")),
    "steps/sync-checkpoint.json": json.dumps(record("sync-checkpoint", "done")),
    "steps/evaluate.json": json.dumps(
        record("evaluate", "failed", message="the export is not there", detail={"exit_code": 65, "log": "e.log"})
    ),
    "steps/notify.json": json.dumps(record("notify", "done", message="report written")),
    "metrics.jsonl": "".join(
        json.dumps({"step": step, "loss": 0.412, "tokens_per_s": 5123.4, "step_s": 0.2}) + "\n" for step in (110, 120)
    ),
    "evaluate.json": json.dumps({"questions": 88, "exact_match": 0.94, "chance": None, "slices": {}, "controls": {}}),
    "decision.json": json.dumps({"accepted": False, "reason": "Rejected: below chance", "checks": []}),
    "local.json": json.dumps(
        {"version": 1, "run_id": "r", "config_digest": "d", "arguments": ["c.yaml"], "started_s": NOW_S - 60,
         "ended_s": NOW_S, "exit_code": 65}
    ),
    "pipeline.log": f"error: of an earlier attempt\n{ATTEMPT_LINE} now\n    [workerpool0-0] error: the export is not "
    "there\n    [workerpool0-0]   expected: a checkpoint\n    [workerpool0-0]   to do:    train first\n    more\n",
    "checkpoints/0001-00000120-abc/COMMIT": "{}",
    "checkpoints/0001-00000140-def/rank-0.json": "{}",
}  # fmt: skip


def lay_out(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def drawn(state: RunState, width: int = 100) -> str:
    console = Console(width=width, file=StringIO(), force_terminal=False)
    console.print(render(state, elapsed_s=61.0, note="a note"))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_each_step_has_a_line_with_its_state(tmp_path: Path) -> None:
    state = read_state(lay_out(tmp_path, RUN_FILES), now_s=NOW_S)
    assert [(step.name, step.state) for step in state.steps] == [
        ("resolve-run", "done"),
        ("prepare-data", "reused"),
        ("cache-features", "done"),
        ("train", "running"),
        ("sync-checkpoint", "done"),
        ("evaluate", "failed"),
        ("decide", "waiting"),
        ("register-model", "waiting"),
        ("notify", "done"),
    ]
    lines = drawn(state).splitlines()
    for step in state.steps:
        assert any(step.name in line and step.state in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    text = drawn(read_state(lay_out(tmp_path, RUN_FILES), now_s=NOW_S), width)
    assert max(map(len, text.splitlines())) <= width


def test_training_shows_step_loss_speed_and_time_left(tmp_path: Path) -> None:
    state = read_state(lay_out(tmp_path, RUN_FILES), now_s=NOW_S)
    expected = "step 120/300 · loss 0.412 · 5.1k tokens/s · ETA 0:36"  # 180 steps of 0.2 s
    assert expected in drawn(state, 80)
    assert line_of(state.step("train"), state) == f"train: running. {expected}"


def test_numbers_of_an_earlier_attempt_are_not_shown_before_the_first_step(tmp_path: Path) -> None:
    files = {**RUN_FILES, "steps/train.json": json.dumps(record("train", "running"))}
    state = read_state(lay_out(tmp_path, files), now_s=NOW_S)
    assert "loss" not in drawn(state)


def test_steps_of_an_earlier_attempt_wait(tmp_path: Path) -> None:
    state = read_state(lay_out(tmp_path, RUN_FILES), now_s=NOW_S, since_s=NOW_S - 1)
    assert {step.state for step in state.steps} == {"waiting"}


def test_preparation_shared_by_tasks_is_seen_before_its_own_step_begins(tmp_path: Path) -> None:
    shares = {
        f"steps/prepare-chunks-{task}.json": json.dumps(
            record(f"prepare-chunks-{task}", state, done=done, total=600, unit="samples")
        )
        for task, (state, done) in enumerate([("done", 600), ("running", 150)])
    }
    plan = {"steps/plan-data.json": json.dumps(record("plan-data", "running"))}
    step = read_state(lay_out(tmp_path / "plan", plan), now_s=NOW_S).step("prepare-data")
    assert (step.state, step.message, step.elapsed_s) == ("running", "plan-data is running", 40)
    plan["steps/plan-data.json"] = json.dumps(record("plan-data", "done"))
    step = read_state(lay_out(tmp_path / "share", plan | shares), now_s=NOW_S).step("prepare-data")
    assert (step.state, step.done, step.total, step.message) == ("running", 750, 1200, "prepare-chunks is running")
    own = {"steps/prepare-data.json": json.dumps(record("prepare-data", "running"))}
    step = read_state(lay_out(tmp_path / "own", plan | shares | own), now_s=NOW_S).step("prepare-data")
    assert (step.state, step.message) == ("running", "")


def test_a_failed_step_shows_its_message_and_what_to_do(tmp_path: Path) -> None:
    report = report_of(lay_out(tmp_path, {**RUN_FILES, "steps/train.json": json.dumps(record("train", "done"))}))
    assert "the export is not there" in drawn(report.state)
    lines = report.lines()
    assert lines[0] == f"error: step evaluate failed with exit code 65: run {tmp_path.name}"
    assert lines[1:4] == ["  the export is not there", "  expected: a checkpoint", "  to do:    train first"]
    assert "  log:      e.log" in lines
    assert lines[-1] == "  continue: vlmpipe run c.yaml"


@settings(max_examples=40)
@given(
    st.sets(st.sampled_from(sorted(RUN_FILES))),
    st.dictionaries(st.sampled_from(sorted(RUN_FILES)), st.integers(0, 200), max_size=4),
    st.dictionaries(
        st.sampled_from(sorted(RUN_FILES)),
        st.sampled_from(["[]", "null", '{"state": 3}', '{"detail": 1}', '{"started_s": "x"}', "\x00"]),
        max_size=2,
    ),
    st.sampled_from([None, 0, 64, 65, 130, 143]),
)
def test_a_view_never_fails_on_damaged_files_and_the_summary_names_them(
    present: set[str], cut_at: dict[str, int], replaced: dict[str, str], exit_code: int | None
) -> None:
    files = {name: RUN_FILES[name] for name in present}
    files |= {name: files[name][:size] for name, size in cut_at.items() if name in files}
    files |= replaced
    with TemporaryDirectory() as folder:
        run = lay_out(Path(folder), files)
        state = read_state(run, now_s=NOW_S)
        assert [step.name for step in state.steps if step.name not in OPTIONAL] == [
            name for name in STEPS if name not in OPTIONAL
        ]
        assert drawn(state)
        view = PlainView(lambda line: None)
        view.update(state)
        marker = Marker("r", "d", ("c.yaml",), 0.0, exit_code=exit_code)
        try:
            assert RunReport(run, marker, state.ended(exit_code), running=False).lines()
        except (ConfigError, DataError) as error:
            said = [f"{run / name} is {what}" for name in {*cut_at, *replaced} for what in ("damaged", "not of this")]
            assert error.found.startswith(tuple(said)), error.found


def test_plain_output_has_one_line_for_each_change_and_every_few_seconds() -> None:
    written: list[str] = []
    now = [0.0]
    view = PlainView(written.append, clock_s=lambda: now[0])

    def show(after_s: float, **fields: Any) -> None:
        now[0] += after_s
        view.update(RunState("r", (Step("prepare-data", **fields),)))

    show(0.0)
    show(0.1, state="running", total=10, unit="samples")
    show(0.1, state="running", done=1, total=10, unit="samples", elapsed_s=1)
    show(5.0, state="running", done=5, total=10, unit="samples", elapsed_s=5)
    show(5.0, state="running", done=5, total=10, unit="samples", elapsed_s=5)
    show(0.1, state="done", elapsed_s=10.4, message="10 read")
    assert written == [
        "prepare-data: running. 0/10 samples",
        "prepare-data: running. 5/10 samples · ETA 0:05",
        "prepare-data: done 0:10. 10 read",
    ]


def test_plain_output_of_a_long_step_has_fewer_lines() -> None:
    written: list[str] = []
    now = [0.0]
    view = PlainView(written.append, clock_s=lambda: now[0])
    for second in range(3600):
        now[0] = float(second)
        step = Step("prepare-data", "running", elapsed_s=now[0], done=second + 1, total=3600)
        view.update(RunState("r", (step,)))
    in_the_first_minute = sum(int(line.split()[2].partition("/")[0].replace(",", "")) <= 60 for line in written)
    assert in_the_first_minute == 12 and 90 <= len(written) <= 120


def test_unfinished_steps_of_an_ended_run_are_stopped_or_skipped() -> None:
    states = ("done", "failed", "running", "waiting")
    run = RunState("r", tuple(Step(name, state) for name, state in zip(STEPS, states, strict=False)))
    assert [step.state for step in run.ended(65).steps] == ["done", "failed", "failed", "skipped"]
    for stopped in (None, 130, 75):
        assert [step.state for step in run.ended(stopped).steps] == ["done", "stopped", "stopped", "skipped"]


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    store = LocalStorage(lay_out(tmp_path, RUN_FILES))
    assert newest_checkpoint_step(store) == 120
    store.write("trainer/checkpoints/0001-00000300-b63507eb/COMMIT", b"{}")  # of a training program of the user's own
    assert newest_checkpoint_step(store) == 300
    for folder in (store, LocalStorage(tmp_path / "trainer")):  # with resume: never
        claim_attempt(folder, fresh=True)
    assert newest_checkpoint_step(store) is None


def test_of_several_errors_the_first_is_the_cause(tmp_path: Path) -> None:
    log = f"""{ATTEMPT_LINE} now
    [workerpool0-0] error: no space left
    [workerpool0-0]   to do:    free space
    error: no space left
      where:    replica workerpool0-0
    """
    assert first_error(lay_out(tmp_path, {"pipeline.log": log})) == ["no space left", "  to do:    free space"]


OF_A_THREAD = [
    '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner',
    "    self.run()",
    '  File "/usr/lib/python3.11/site-packages/writer.py", line 244, in run',
    "    self._file.flush()",
    "OSError: [Errno 28] No space left on device",
]


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize(
    "clauses", [["  at this step", "    and more of it", "  to do:    free", "            space"], []]
)
def test_a_traceback_in_the_same_log_does_not_belong_to_an_error(tmp_path: Path, clauses: list[str], lost: int) -> None:
    """Of a thread that died of the same full disk; its first lines may have been lost there."""
    said = ["no space left while running the job", *clauses]
    log = "\n".join([f"{ATTEMPT_LINE} now", f"error: {said[0]}", *clauses, *OF_A_THREAD[lost:]])
    assert first_error(lay_out(tmp_path, {"pipeline.log": log})) == said


def test_an_error_of_an_earlier_attempt_is_not_repeated(tmp_path: Path) -> None:
    log = f"error: of an earlier attempt\n{ATTEMPT_LINE} now\nnothing\n"
    assert first_error(lay_out(tmp_path, {"pipeline.log": log})) == []


@pytest.mark.parametrize(("seconds", "text"), [(3.21, "3.2 s"), (41, "0:41"), (3723, "1:02:03"), (59.7, "1:00")])
def test_times_read_as_on_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (512, "512"), (5123, "5.1k"), (51234, "51k"), (1.2e6, "1.2M")])
def test_large_numbers_are_short(value: float, text: str) -> None:
    assert short_number(value) == text
