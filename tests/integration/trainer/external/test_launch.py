"""The launcher of training programs: what a run's outcome is, whatever the program's exit code says."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.short_form import WHOLE, chosen
from tests.support.trainer.external_runs import PROGRAM, ExternalRun, external_run, lose_machine, wait_for_step
from vlmpipe.trainer import __version__
from vlmpipe.trainer.errors import ExitCode


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> ExternalRun:
    """A run of 90 steps that nothing interrupted."""
    run = external_run(tmp_path_factory.mktemp("straight"), steps=90, run_id="straight")
    assert run.launch()[0] == 0
    return run


def test_a_result_is_committed_with_its_metrics_and_no_pickle(tmp_path: Path) -> None:
    run = external_run(tmp_path)
    code, text = run.launch()
    assert code == 0, text
    assert run.result().keys() == {"config.json", "model.safetensors"}
    assert run.steps() == list(range(1, 13))
    summary = run.record("summary.json")
    assert (summary["steps"], summary["total_steps"], summary["final_loss"]) == (12, 12, pytest.approx(1 / 12))
    assert summary["versions"]["python"] and summary["versions"]["vlmpipe"] == __version__
    assert re.fullmatch("[0-9a-f]{12}", summary["versions"]["program"]), "by which compare knows that it has changed"
    committed = {path.parent.name.split("-")[1] for path in Path(run.uri, "trainer").rglob("COMMIT")}
    assert committed and committed <= {"00000005", "00000010"}

    code, text = run.launch()
    assert (code, run.record("steps/train.json")["state"]) == (0, "reused"), text


def test_a_program_that_knows_only_vertex_ais_folders_is_copied_and_its_model_is_the_result(
    tmp_path: Path,
) -> None:
    """A model and a checkpoint of a run before are there already, and count for nothing."""
    run = external_run(tmp_path, "as-on-vertex")
    places = {"AIP_MODEL_DIR": f"{run.uri}/model/", "AIP_CHECKPOINT_DIR": f"{run.uri}/checkpoints/"}
    old = Path(run.uri, "checkpoints/checkpoint-99")
    old.mkdir(parents=True)
    (old / "trainer_state.json").write_text('{"global_step": 99}')
    Path(run.uri, "model").mkdir()
    Path(run.uri, "model/old.safetensors").write_text("old")
    code, text = run.launch(**places)
    assert code == 0, text
    assert run.result().keys() == {"config.json", "model.safetensors"}
    committed = {path.parent.name.split("-")[1] for path in Path(run.uri, "trainer").rglob("COMMIT")}
    assert committed and committed <= {"00000005", "00000010"}


WRONG_ENDS = {
    "nothing": (ExitCode.BAD_RESULT, "ended well and wrote nothing"),
    "half": (ExitCode.BAD_RESULT, "model.safetensors is cut off or damaged"),
    "infinite": (ExitCode.BAD_RESULT, "numbers that are not finite: w in model.safetensors"),
    "nan-loss": (ExitCode.BAD_RESULT, "a loss that is no number at step 12"),
    "other-model": (ExitCode.BAD_RESULT, "wrote a model of type other"),
    "early": (ExitCode.BAD_RESULT, "exit code 0 after 6 of 12 steps"),
    "fails": (ExitCode.UNEXPECTED, "ended with exit code 1"),
}
# What a file holds and what an end means are looked at without a launch as well: test_result.py, test_outcome.py.
SHORT = chosen(WRONG_ENDS, lambda mode: mode == "nothing")


@pytest.mark.parametrize(("mode", "code", "sentence"), [(mode, *end) for mode, end in SHORT.items()])
def test_what_is_no_finished_model_is_said(tmp_path: Path, mode: str, code: int, sentence: str) -> None:
    run = external_run(tmp_path, mode)
    found, text = run.launch()
    assert found == code, text
    assert sentence in text
    assert not run.result()
    assert run.record("steps/train.json")["state"] == "failed"


def test_children_left_behind_are_killed(tmp_path: Path) -> None:
    code, text = external_run(tmp_path, "children").launch()
    assert code == 0, text
    assert "left behind were killed" in text


def test_stopped_is_not_done_and_resumes_to_the_same_model_also_past_a_damaged_checkpoint(
    tmp_path: Path, straight: ExternalRun
) -> None:
    run = external_run(tmp_path, "slow", steps=90, run_id="stopped")
    process = run.popen()
    wait_for_step(run, 12, process)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, text  # though the program wrote a model and ended with 0
    assert not run.result()
    newest, *others = sorted(Path(run.uri, "trainer").rglob("number"), reverse=True)
    assert others, text
    newest.write_text("1")
    code, text = external_run(tmp_path, steps=90, run_id="stopped").launch()
    assert code == 0, text
    assert "passed over" in text and "continuing after step" in text
    assert run.steps() == list(range(1, 91))
    assert run.result() == straight.result()
    summary = run.record("summary.json")
    assert summary["starts"] == 2 and summary["steps_made"] == 90 + summary["steps_repeated"] > 90
    assert summary["wall_s"] > straight.record("summary.json")["wall_s"] > 0


def test_a_launcher_that_dies_of_a_stop_leaves_its_child_the_time_to_save(
    tmp_path: Path, straight: ExternalRun
) -> None:
    command = ["python", str(PROGRAM), "self"]
    settings: dict[str, Any] = {"steps": 90, "run_id": "self", "launch": "self"}
    run = external_run(tmp_path, command=[*command, "slow-saving", "{max_steps}"], **settings)
    process = run.popen("--nproc-per-node", "2")
    wait_for_step(run, 6, process)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, text
    assert 'told ["1", "0", "2"] True' in text and "killed" not in text
    saved = run.record("steps/train.json")["message"]
    assert saved == f"stopped on request after step {run.steps()[-1]}; a checkpoint of step {run.steps()[-1]} is saved"
    code, text = external_run(tmp_path, command=[*command, "plain", "{max_steps}"], **settings).launch()
    assert code == 0, text
    assert run.steps() == list(range(1, 91))
    assert run.result() == straight.result()


HOROVODRUN = """#!/usr/bin/env python
# Stands in for horovodrun, which needs a build of its own: it takes exactly what horovodrun is given here.
import os, subprocess, sys
option, count, *command = sys.argv[1:]
assert option == "-np" and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys(), sys.argv
ranks = [{"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": count} for rank in range(int(count))]
# All but the first rank do nothing: the program of this test is no distributed one.
others = [subprocess.Popen([sys.executable, "-c", "pass"], env=os.environ | rank) for rank in ranks[1:]]
print("ranks", len(ranks), command[1].rpartition("/")[2], flush=True)
sys.exit(max(subprocess.call(command, env=os.environ | ranks[0]), *(other.wait() for other in others)))
"""


def test_horovodrun_starts_the_processes_of_the_node(tmp_path: Path) -> None:
    (folder := tmp_path / "bin").mkdir()
    (folder / "horovodrun").write_text(HOROVODRUN)
    (folder / "horovodrun").chmod(0o755)
    run = external_run(tmp_path, launch="horovod")
    code, text = run.launch("--nproc-per-node", "2", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert code == 0, text
    assert "starting horovodrun -np 2 python" in text and "ranks 2 external_program.py" in text
    assert run.record("summary.json")["world_size"] == 2 and run.result()


def test_a_program_that_ignores_a_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    run = external_run(tmp_path, "deaf", steps=600, stop_grace_s=1)
    process = run.popen()
    wait_for_step(run, 6, process)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, text
    assert "1 processes still ran 1 s after SIGTERM, and were killed" in text


def test_killed_at_random_it_ends_with_the_same_model(tmp_path: Path, straight: ExternalRun) -> None:
    run, draw = external_run(tmp_path, "slow", steps=90, run_id="killed"), random.Random(7)
    for _ in range(3 if WHOLE else 1):
        process = run.popen()
        time.sleep(draw.uniform(0.5, 2.5))
        lose_machine(process)
    code, text = external_run(tmp_path, steps=90, run_id="killed").launch()
    assert code == 0, text
    assert run.result() == straight.result()
