"""`vlmpipe curve`: the sweep that it makes of a run file, and what it refuses before anything starts."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_line import Vlmpipe
from tests.support.pipelines.example_project import for_vertex
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.cli.runs.curve import _curve_of, _shares
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.runs.folders.marker import require_marker
from vlmpipe.runs.submitted import RunRecord, continue_with
from vlmpipe.trainer.errors import ConfigError, ExitCode

DIGITS = "configs/digits.yaml"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ("5,x,100", "percentages above 0 up to 100"),
        ("0,10,100", "percentages above 0 up to 100"),
        ("10,20,120", "percentages above 0 up to 100"),
        ("nan,10,100", "percentages above 0 up to 100"),
        ("10,100", "at least three different shares"),
        ("10,10,100", "at least three different shares"),
        ("10,20,50", "100 among them"),
    ],
)
def test_wrong_shares_are_refused(shares: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"--shares is") as caught:
        _shares(shares)
    assert expected in str(caught.value.expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.train_share=0.5"], "data.train_share is 0.5"),
        (["sweep={grid: {train.seed: [0, 1]}}"], "has sweep"),
        (["--metric", "bleu"], "sweep.metric"),
        (["--dry-run"], "--dry-run is given with --target local"),
        (["--fresh", "--target", "vertex"], "--fresh is given with --target vertex"),
        (["train.trainer={name: mine, command: [python, train.py]}", "features.cache=off"], "train.trainer"),
    ],
)
def test_what_a_curve_cannot_be_drawn_for_is_refused(vlmpipe: Vlmpipe, arguments: list[str], said: str) -> None:
    answer = vlmpipe("curve", DIGITS, *arguments)
    assert (answer.code, answer.out) == (64, "")
    assert said in answer.err, answer.err


def run_file(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(merged(TINY, changes)))
    return path


def test_a_curve_is_a_sweep_over_shares(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    here = _curve_of(path, ["train.epochs=2"], [0.1, 0.5, 1.0], 2, 0.9, "anls", is_here=True)
    assert here.name == "tiny-curve" and here.sweep and here.train.epochs == 2
    assert here.sweep.grid == {"data.train_share": (0.1, 0.5, 1.0)}
    assert (here.sweep.starts, here.sweep.goal, here.sweep.metric, here.sweep.trainings_per_job) == (2, 0.9, "anls", 6)
    evaluated = (here.evaluate.controls, here.evaluate.baseline, here.evaluate.retention.probe)
    assert evaluated == ((), "off", "off"), "only answers that the curve compares"
    there = _curve_of(path, [], [0.1, 0.5, 1.0], 2, 0.9, "anls", is_here=False)
    assert there.sweep and (there.sweep.trainings_per_job, there.sweep.parallelism) == (3, 2)


def test_fields_that_a_curve_sets_may_be_given_too(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["name=mine", "cluster.replica_count=2", "gate.min_exact_match=0.9", "evaluate.controls=[no_image]"]
    settings = _curve_of(Path(DIGITS), given, [0.1, 0.5, 1.0], 1, 0.9, "exact_match", is_here=True)
    assert (settings.name, settings.cluster.replica_count, settings.evaluate.controls) == ("mine-curve", 1, ())
    assert "not used: gate.min_exact_match=0.9 evaluate.controls=[no_image]" in capsys.readouterr().err


def test_several_nodes_become_one_on_this_machine_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    here = _curve_of(Path(DIGITS), ["train.micro_batch_size=4"], [0.1, 0.5, 1.0], 1, 0.9, "exact_match", is_here=True)
    assert here.train.micro_batch_size == 4, "which fills the batch of one node, not of two"
    assert here.cluster.replica_count == 1 and "change no result" in capsys.readouterr().err
    there = _curve_of(Path(DIGITS), [], [0.1, 0.5, 1.0], 1, 0.9, "exact_match", is_here=False)
    assert there.cluster.replica_count == 2 and there.sweep and there.sweep.trainings_per_job == 1


@pytest.mark.parametrize("target", ["local", "vertex", "kubeflow"])
def test_a_curve_is_compiled_for_every_target(target: str, tmp_path: Path) -> None:
    images = [f"{field}=registry.example.com/vlmpipe:1" for field in ("cluster.image_uri", "gcp.pipeline_image")]
    is_here = target == "local"
    settings = _curve_of(Path(DIGITS), for_vertex(images), [0.1, 0.5, 1.0], 1, 0.9, "exact_match", is_here=is_here)
    content = compile_pipeline(settings, target, tmp_path / "pipeline.yaml").path.read_text(encoding="utf-8")
    spec = next(iter(yaml.safe_load_all(content)))
    tasks = {name for part in spec["components"].values() for name in part.get("dag", {}).get("tasks", {})}
    assert {"train-variants", "compare-variants"} <= tasks and "register-model" not in tasks
    share = settings.sweep and settings.sweep.grid["data.train_share"]
    assert share == (0.1, 0.5, 1.0) and "data.train_share" in content, "the compiled run file has the shares"


def test_the_command_that_is_printed_for_a_stopped_curve_continues_it(
    vlmpipe: Vlmpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = [sys.executable, "-c", f"raise SystemExit({int(ExitCode.INTERRUPTED)})"]
    monkeypatch.setattr("vlmpipe.platforms.local.process.pipeline_command", lambda *_, **__: stopped)
    given = ["train.epochs=2", f"output.root_uri={tmp_path}", "--shares", "10,50,100", "--seeds", "2"]
    first = vlmpipe("curve", DIGITS, *given)
    command = re.search(r"to continue: +(.*)", first.out)
    assert first.code == ExitCode.INTERRUPTED and command, first.out + first.err
    words = shlex.split(command[1])
    assert words[:5] == ["vlmpipe", "curve", DIGITS, *given[:2]] and not any("sweep=" in word for word in words)
    again = vlmpipe(*words[1:])
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run {run.name}, which was stopped" in again.out, again.out + again.err
    assert require_marker(run).command == tuple(words), "and so does what that one prints"


def test_the_command_that_continues_a_curve_on_a_service_is_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (DIGITS, "--shares", "10,50,100", "--target", "vertex")
    RunRecord("projects/p/locations/l/pipelineJobs/j", "gs://b/r", 0.0, source=source, subcommand="curve").write("j")
    command = continue_with("j", "r", template_uri="", pipeline="digits-curve")
    assert command == f"vlmpipe curve {DIGITS} --shares 10,50,100 --target vertex --run-id r"
