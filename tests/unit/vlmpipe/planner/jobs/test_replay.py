"""Planned questions for the start model, and what they are about."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.planner.jobs.hours import replay_hours, replay_questions
from vlmpipe.planner.jobs.replay import asked_about, replay_notes
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.steps.graph import graph_steps
from vlmpipe.planner.workload import Workload

RUN_FILE = ROOT / "tests/fixtures/run_files/digits-replay.yaml"


def config_of(*overrides: str, **replay: object) -> RunConfig:
    sources = [{"name": "digits", "uri": "builtin:digits"}, {"name": "before", "replay": "self", **replay}]
    return load_run_file(RUN_FILE, [f"data.sources={json.dumps(sources)}", *overrides])


def load_of(samples: int, images: float) -> Workload:
    sizes: dict[str, Any] = dict.fromkeys(("sequences_per_epoch", "steps"))
    return Workload(
        4, 64, 1.0, samples_per_sequence=2.0, sample_pairs_per_sequence=1.0, images_per_sequence=2.0 * images,
        label_tokens_per_sequence=1.0, samples=samples, epochs=1, origin="", **sizes,
    )  # fmt: skip


@pytest.mark.parametrize(("others", "share", "images"), [(1000, 0.5, 1.0), (400, 0.25, 2.0), (90, 1.0, 1.0)])
def test_the_share_is_of_the_other_sources_images_not_of_all(others: int, share: float, images: float) -> None:
    answers = round(share * images * others)
    config = config_of(replay_images=share)
    assert replay_questions(config, load_of(others + answers, images)) == answers


def test_answers_that_are_there_cost_nothing_and_no_job_runs() -> None:
    config = config_of()
    case = scenario_of(config, load_of(1000, 1.0))
    assert "answers of the start model with" in replay_notes(case, None)[0]
    there = dataclasses.replace(case, load=dataclasses.replace(case.load, replayed=1234))
    assert replay_hours(there) == 0.0
    [note] = replay_notes(there, None)
    assert "1,234 answers of the start model are there" in note and "cost nothing" in note
    expected = {step.name: step.is_expected for step in graph_steps(config, encodes=False, replays=False)}
    assert [expected[name] for name in ("choose-replay", "replay", "collect-replay", "reuse-replay")] == [
        True, False, False, True
    ]  # fmt: skip


def test_processes_without_questions_are_counted() -> None:
    config = config_of("cluster.processes_per_replica=8", "train.global_batch_size=16")
    assert config.cluster.of_job("evaluate").world_size == 8
    [note] = replay_notes(scenario_of(config, load_of(1000, 1.0)), None)  # 200 questions in 4 files
    assert "at most 200 answers" in note and "4 of 8 processes of job replay have nothing to ask" in note
    [note] = replay_notes(scenario_of(config, load_of(5000, 1.0)), None)
    assert "nothing to ask" not in note


def scenario_of(config: RunConfig, load: Workload) -> Any:
    nothing: Any = None  # of the model and the machines, on which neither note nor zero hours depend
    return Scenario(config, nothing, nothing, load, nothing, gpu=None)


def test_a_plan_says_what_is_asked_and_why(tmp_path: Path) -> None:
    assert "gs://example-bucket/models/tiny-llava is a run's export" in asked_about(config_of())
    assert asked_about(config_of(replay_prompts=["Is it red?"])).endswith("replay_prompts is given")
    assert asked_about(config_of(replay_about="images")).endswith("replay_about is images")
    here = f"model.pretrained.weights={tmp_path}"
    assert asked_about(config_of(here)).endswith(f"{tmp_path}, is not the export of a run")
    assert asked_about(config_of(here, replay_about="start_data")).startswith("the run ends, as the start")
