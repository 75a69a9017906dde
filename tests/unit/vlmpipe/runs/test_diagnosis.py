"""Causes and remedies: every known failure by its example, and how what a run left behind is weighed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from tests.support.paths import ROOT
from vlmpipe.cli import app as cli
from vlmpipe.config.run_config import RunConfig
from vlmpipe.runs.diagnosis import NOT_RECOGNISED, Diagnosis
from vlmpipe.runs.failure_patterns import Pattern, hits, patterns
from vlmpipe.runs.folders.diagnose import diagnose_folder
from vlmpipe.runs.folders.marker import Marker
from vlmpipe.runs.stack_dumps import main_frames, read_stall
from vlmpipe.runs.steps import STEPS

EXAMPLES = ROOT / "tests/fixtures/failures"
STARTED_S = 1_763_667_000.0
Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Makes the folder of a run that has ended, as `vlmpipe run` leaves it."""

    def make(
        *,
        exit_code: int | None = 1,
        step: str = "train",
        detail: Mapping[str, Any] | None = None,
        logs: Mapping[str, str] | None = None,
        pipeline_log: str = "",
        files: Mapping[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / "runs/digits-1"
        (folder / "steps").mkdir(parents=True)
        (folder / f"logs/{step}").mkdir(parents=True)
        Marker("digits-1", "d", ("digits.yaml", "train.epochs=2"), STARTED_S, STARTED_S + 9, exit_code).write(folder)
        record = {"step": step, "state": "failed" if exit_code else "done", "started_s": STARTED_S + 1}
        (folder / f"steps/{step}.json").write_text(json.dumps({**record, "detail": detail or {}}))
        for name, text in (logs or {}).items():
            (folder / f"logs/{step}/{name}.log").write_text(text)
        (folder / "pipeline.log").write_text(pipeline_log)
        for name, text in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return make


def example(name: str) -> str:
    return (EXAMPLES / f"{name}.log").read_text()


def identity(found: Diagnosis) -> str | None:
    return found.pattern.id if found.pattern else None


def test_every_pattern_has_an_example_and_every_example_a_pattern() -> None:
    names = [pattern.id for pattern in patterns()]
    assert len(names) == len(set(names)) > 40
    assert set(names) == {path.stem for path in EXAMPLES.glob("*.log")}


def test_the_words_of_an_earlier_trainer_image_are_known_too() -> None:
    """An image is older than this program where a run file pins it by digest."""
    (found,) = hits("train", "error: training was stopped: somebody cancelled its job")
    assert found.pattern.id == "cancelled"


@pytest.mark.parametrize("name", [pattern.id for pattern in patterns()])
def test_an_example_is_matched_by_its_own_pattern_only(name: str) -> None:
    (hit,) = hits("log", example(name))
    assert hit.pattern.id == name
    assert bool(hit.detail) == bool(hit.pattern.detail), "the example names everything that the detail wants to tell"


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: pattern.id)
def test_each_form_of_a_pattern_has_a_line_in_its_example_and_a_source(pattern: Pattern) -> None:
    """Sources that are files of ours are there; a form that nothing says any more would stay for ever."""
    assert [form for form in pattern.any if not re.search(form, example(pattern.id), re.MULTILINE)] == []
    ours = re.findall(r"\b(?:trainer|components|pipelines)/[\w/]+\.py", pattern.source)
    assert pattern.source and all((ROOT / file).is_file() for file in ours)


@pytest.mark.parametrize("name", [pattern.id for pattern in patterns()])
def test_an_example_in_the_log_of_a_run_is_the_diagnosis(name: str, run: Run) -> None:
    found = diagnose_folder(run(logs={"workerpool0-0": f"some line\n{example(name)}"}))
    assert identity(found) == name and found.also == ()
    assert found.hit and found.hit.where == "logs/train/workerpool0-0.log" and found.hit.line > 1
    said = " ".join(line.strip() for line in found.lines())
    assert found.pattern and found.pattern.remedy in said and found.cause in said


@pytest.mark.parametrize("title", ["evaluate", "pretrain-evaluate"])
def test_an_evaluation_that_ran_out_of_memory_is_told_of_its_own_settings(title: str, run: Run) -> None:
    stage, _, step = title.rpartition("-")
    found = diagnose_folder(run(step=step, logs={"workerpool0-0": example("gpu-out-of-memory")}))
    found = replace(found, step=title) if stage else found
    said = " ".join(line.strip() for line in found.lines())
    assert "evaluate.batch_questions" in said and "train.micro_batch_size" not in said
    assert "evaluate.batch_questions" in found.as_json()["remedy"]


def test_remedies_by_step_are_of_steps_that_there_are() -> None:
    assert {step for pattern in patterns() for step in pattern.remedies} <= {*STEPS}


def test_exit_codes_are_distinguished() -> None:
    codes = [code for pattern in patterns() for code in pattern.exit_codes]
    assert len(codes) == len(set(codes))


def test_remedies_name_fields_that_exist() -> None:
    known = set(field_names(RunConfig))
    sections = "|".join(RunConfig.model_fields)
    texts = [text for pattern in patterns() for text in (pattern.remedy, *pattern.remedies.values())]
    named = {name for text in texts for name in re.findall(rf"\b(?:{sections})(?:\.[a-z]\w*)+", text)}
    assert len(named) > 10 and named <= known


def field_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        names.append(f"{prefix}{name}")
        for kind in (field.annotation, *get_args(field.annotation)):  # of a section that may be absent, too
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += field_names(kind, f"{prefix}{name}.")
    return names


def test_unknown_values_are_shown_as_unknown(run: Run) -> None:
    log = "".join(f"line {number}\n" for number in range(100)) + "KeyError: 'colour'\n"
    found = diagnose_folder(run(logs={"workerpool0-0": log}))
    lines = found.lines()
    assert lines[1] == f"  cause:     {NOT_RECOGNISED}: exit code 1"
    assert "    KeyError: 'colour'" in lines and "    line 99" in lines and "    line 1" not in lines
    assert found.as_json()["recognised"] is False


def test_a_cause_outweighs_its_consequences_wherever_they_are(run: Run) -> None:
    logs = {"workerpool0-0": example("peer-lost"), "workerpool1-0": example("gpu-out-of-memory")}
    detail = {"error": example("peer-lost").strip(), "replica": "workerpool0-0"}
    found = diagnose_folder(run(logs=logs, detail=detail))
    assert identity(found) == "gpu-out-of-memory"
    assert found.hit and found.hit.where == "logs/train/workerpool1-0.log"
    assert [text.split(" (")[0] for text in found.also] == [
        "a rank lost its connection because another one ended first"
    ]


def test_what_the_step_itself_recorded_outweighs_an_earlier_failure_in_its_log(run: Run) -> None:
    detail = {"error": "no space left while writing a checkpoint to /tmp/x", "exit_code": 73}
    found = diagnose_folder(run(exit_code=73, detail=detail, logs={"workerpool0-0": example("killed")}))
    assert identity(found) == "no-space"
    assert found.hit and found.hit.where == "steps/train.json"


def test_the_exit_code_decides_between_two_causes(run: Run) -> None:
    log = example("preempted") + example("interrupted")
    assert identity(diagnose_folder(run(exit_code=130, logs={"workerpool0-0": log}))) == "interrupted"


@pytest.mark.parametrize(("code", "name"), [(137, "killed"), (139, "crashed"), (71, "stalled"), (64, "bad-config")])
def test_an_exit_code_decides_where_no_text_is_recognised(code: int, name: str, run: Run) -> None:
    found = diagnose_folder(run(exit_code=code, logs={"workerpool0-0": "nothing of interest\n"}))
    assert identity(found) == name and found.hit is None
    assert "{" not in found.cause


def test_the_first_rank_to_end_is_named_across_nodes(run: Run) -> None:
    order = "launcher: ranks ended in this order:"
    logs = {
        "workerpool0-0": f"{order} rank 0 (code 1, 2026-11-20T19:32:36.25)\n" + example("peer-lost"),
        "workerpool1-0": f"{order} rank 3 (code 1, 2026-11-20T19:32:35.75), rank 2 (code 1, 2026-11-20T19:32:37.1)\n",
    }
    found = diagnose_folder(run(logs=logs))
    assert [end.rank for end in found.ends] == [3, 0, 2]
    assert (
        "  first:     rank 3 ended first (code 1, 19:32:35 UTC); the next one, rank 0 (code 1), 0.5 s later"
        in found.lines()
    )


def test_only_the_last_attempt_of_the_pipeline_counts_and_lines_are_numbered_as_in_the_file(run: Run) -> None:
    attempt = "vlmpipe: this attempt started at 2026-11-20 19:30:00\n"
    found = diagnose_folder(run(pipeline_log=attempt + example("no-space") + attempt + example("not-finite")))
    assert identity(found) == "not-finite"
    assert found.hit and (found.hit.where, found.hit.line) == ("pipeline.log", 6)


def test_ordered_mishaps_are_noted(run: Run) -> None:
    events = [
        {"event": "kill", "time_s": STARTED_S + 2, "faults": "kill:rank=0,after_step=7"},
        {"event": "missed", "time_s": STARTED_S + 3, "faults": "kill:rank=1,after_step=99"},
    ]
    faults = "".join(json.dumps(event) + "\n" for event in events)
    found = diagnose_folder(run(logs={"workerpool0-0": example("killed")}, files={"faults.jsonl": faults}))
    assert found.notes == ("ordered by --inject-fault: kill:rank=0,after_step=7",)


def test_a_run_that_is_done_with_weights_that_were_not_resumed_is_told(run: Run) -> None:
    found = diagnose_folder(run(exit_code=0, logs={"workerpool0-0": example("weights-not-resumed")}))
    assert (found.outcome, found.pattern) == ("done", None)
    (told,) = found.also
    assert "without all weights of its checkpoint (logs/train/workerpool0-0.log" in told
    assert "train.trainer.resume_as_model" in told


def test_a_run_that_is_done_needs_nothing(run: Run) -> None:
    found = diagnose_folder(run(exit_code=0, logs={"workerpool0-0": example("no-space")}))
    assert (found.outcome, found.cause) == ("done", "nothing: the run is done")
    assert len(found.lines()) == 2


def test_a_run_is_found_by_id_and_by_folder_also_without_a_marker(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(exit_code=77, logs={"workerpool0-0": example("folder-permission")})
    assert diagnosed(monkeypatch, capsys, "digits-1", "--root", str(tmp_path))["id"] == "folder-permission"
    (folder / "local.json").unlink()  # downloaded from a bucket
    (folder / "steps/train.json").write_text(json.dumps({"step": "train", "state": "failed", "started_s": STARTED_S}))
    assert diagnosed(monkeypatch, capsys, str(folder), "--root", "nowhere")["id"] == "folder-permission"
    assert "no run 'digits-2'" in diagnosed(monkeypatch, capsys, "digits-2", "--root", str(tmp_path))["error"]["found"]


def diagnosed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    monkeypatch.setattr("sys.argv", ["vlmpipe", "diagnose", *arguments, "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    return json.loads(capsys.readouterr().out)


def stacks(rank: int, *calls: str) -> str:
    frames = "".join(f'  File "/app/trainer/{call}.py", line {number} in {call}\n' for number, call in enumerate(calls))
    return (
        f"rank {rank} on vm, process 1: no step for 300.0 s\nlast step: 41; limit: 300.0 s\n"
        "main thread: 0x00007f4ee442fb80\n"
        'Current thread 0x00007f4ee0000000 (most recent call first):\n  File "watchdog.py", line 1 in _watch\n\n'
        f"Thread 0x00007f4ee442fb80 (most recent call first):\n{frames}"
    )


def test_the_stacks_show_the_common_call_the_rank_apart_and_the_silent_one(run: Run) -> None:
    waiting = ("all_reduce", "sum_over_ranks", "train", "main")
    files = {
        "logs/stacks/rank-0.txt": stacks(0, *waiting),
        "logs/stacks/rank-1.txt": stacks(1, "read", "next_rows", "train", "main"),
        "logs/stacks/rank-2.txt": stacks(2, *waiting),
        "preflight.json": json.dumps({"world_size": 4}),
    }
    found = diagnose_folder(run(exit_code=71, logs={"workerpool0-0": example("stalled")}, files=files))
    assert found.stall and found.stall.last_step == 41
    assert [line for line in found.lines() if "stacks:" in line] == [
        "  stacks:    deepest common call: train (app/trainer/train.py:2)",
        "  stacks:    ranks 0, 2 in all_reduce (app/trainer/all_reduce.py:0)",
        "  stacks:    rank 1 in read (app/trainer/read.py:0)",
        "  stacks:    rank 3 left no stacks: stopped, killed, or its machine is gone",
    ]
    assert found.as_json()["stall"]["silent_ranks"] == [3]


def test_stacks_of_an_earlier_attempt_are_not_read(run: Run) -> None:
    folder = run(files={"logs/stacks/rank-0.txt": stacks(0, "all_reduce")})
    os.utime(folder / "logs/stacks/rank-0.txt", (STARTED_S - 100,) * 2)
    assert read_stall(folder, world_size=2, since_s=STARTED_S) is None
    assert read_stall(folder, world_size=2) is not None


def test_a_rank_that_was_slow_in_an_earlier_step_and_then_stopped_left_no_stacks_of_this_stall(run: Run) -> None:
    early = stacks(0, "slow_read").replace("last step: 41", "last step: 12")
    files = {"logs/stacks/rank-0.txt": early, "logs/stacks/rank-1.txt": stacks(1, "all_reduce")}
    found = read_stall(run(files=files), world_size=2)
    assert found and found.last_step == 41 and list(found.ranks) == [1] and found.silent == (0,)


def test_calls_are_those_of_the_main_thread_from_the_outermost_in() -> None:
    assert [frame.function for frame in main_frames(stacks(0, "inner", "outer"))] == ["outer", "inner"]
    assert main_frames("no stacks here") == ()


def test_the_command_prints_lines_or_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(exit_code=137, logs={"workerpool0-0": example("killed")})
    said = {}
    for options in ((), ("--json",)):
        monkeypatch.setattr("sys.argv", ["vlmpipe", "diagnose", "digits-1", "--root", str(tmp_path), *options])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        assert not leaving.value.code
        said[options] = capsys.readouterr().out
    assert said[()].startswith(
        "run digits-1: failed in step train with exit code 137\n  cause:     a process was killed"
    )
    assert said[()].rstrip().endswith("continue:  vlmpipe run digits.yaml train.epochs=2 --run-id digits-1")
    assert json.loads(said[("--json",)])["id"] == "killed"
