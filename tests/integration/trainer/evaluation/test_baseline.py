"""Laws of the baseline, on runs whose truth is planted: a start that knows colors, and trainings from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.trainer.runs import make_run, run_ranks, train_runs
from vlmpipe.config.sections.output import GateConfig
from vlmpipe.registry.gate import decide
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.evaluation.baseline.probe import Probe
from vlmpipe.trainer.evaluation.baseline.score import StartWeights
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.start_answers import StartAnswers
from vlmpipe.trainer.storage import open_storage

COLORS = {"red": (220, 60, 60), "green": (60, 220, 60), "blue": (60, 60, 220), "white": (240, 240, 240)}
CODES = {"red": "green", "green": "blue", "blue": "white", "white": "red"}
ASK_COLOR, ASK_CODE = "Which color is it?", "Which code has it?"
SHADES, HELD_OUT_SHADES = 40, 15  # of each color: none of the data is in the benchmark
LORA = {"rank": 4, "alpha": 8.0, "parts": ["language_model", "projector"]}


def write_image(path: Path, color: str, shade: int) -> None:
    red, green, blue = (max(0, value - shade) for value in COLORS[color])
    Image.new("RGB", (32, 32), (red, green, blue)).save(path)


def write_task(folder: Path, question: str, answers: dict[str, str]) -> str:
    """Records about images of one color each; every second shade is `kind` dark."""
    folder.mkdir()
    lines = []
    for color in COLORS:
        for shade in range(SHADES):
            write_image(folder / f"{color}{shade}.png", color, shade)
            kind = "dark" if shade % 2 else "bright"
            record = {"image": f"{color}{shade}.png", "question": question, "answer": answers[color], "kind": kind}
            lines.append(json.dumps(record))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "records.jsonl")


def write_benchmark(folder: Path) -> dict[str, Any]:
    """The question about colors of other images, in ChartQA's form."""
    folder.mkdir()
    asked = []
    for shade in range(SHADES, SHADES + HELD_OUT_SHADES):
        for color in COLORS:
            write_image(folder / f"{color}{shade}.png", color, shade)
            asked.append({"imgname": f"{color}{shade}.png", "query": ASK_COLOR, "label": color})
    (folder / "questions.json").write_text(json.dumps(asked))
    return {"name": "colors", "format": "chartqa", "uri": str(folder / "questions.json"), "images": str(folder)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobConfig]:
    """A base that knows colors; a training on another task from it, and a LoRA training that changes nothing."""
    root = tmp_path_factory.mktemp("baseline")
    codes, benchmark = write_task(root / "codes", ASK_CODE, CODES), write_benchmark(root / "benchmark")
    common = {
        "features.cache": "off", "model.freeze": [], "data.max_samples": 0, "data.validation_fraction": 0.35,
        "data.source": write_task(root / "colors", ASK_COLOR, {color: color for color in COLORS}),
        "train.epochs": 9, "train.micro_batch_size": 8, "evaluate.max_new_tokens": 8, "evaluate.controls": [],
    }  # fmt: skip

    def run(name: str, changes: dict[str, Any]) -> JobConfig:
        job = make_run(root, name, common | changes, features="off")
        train_runs([job], processes=1)
        sync_run(job)
        return job

    base = open_storage(run("base", {}).run.run_uri).uri("export")
    whole = {"pretrained": {"weights": base}, "tokenizer": base, "image_size": 32, "freeze": []}
    adapted = whole | {"freeze": ["tower"], "lora": LORA}
    other = {
        "train.epochs": 15,
        "model": whole,
        "data.source": codes,
        "data.slices": ["kind"],
        "evaluate.benchmarks": [benchmark],
    }
    still = {"model": adapted, "train.optimizer.learning_rate": 1e-30, "train.max_steps": 1}
    prompts = {"evaluate.retention": {"prompts": [ASK_COLOR, ASK_CODE], "max_images": 30}}
    return {"other": run("other", other), "still": run("still", still | prompts)}


def evaluated(job: JobConfig, processes: int) -> Evaluation:
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=processes)
    return Evaluation.read(open_storage(job.run.run_uri))


@pytest.fixture(scope="module")
def evaluations(runs: dict[str, JobConfig]) -> dict[str, Evaluation]:
    return {"other": evaluated(runs["other"], 2), "still": evaluated(runs["still"], 1)}


def decided(evaluation: Evaluation, **bounds: float) -> tuple[bool, str]:
    decision = decide(evaluation, GateConfig(min_margin_over_chance=None, **bounds))  # type: ignore[arg-type]
    return decision.accepted, decision.reason


def test_training_on_another_task_gains_there_and_forgets(evaluations: dict[str, Evaluation]) -> None:
    evaluation = evaluations["other"]
    start = evaluation.start
    assert start and start.retention and not start.obstacle and not start.is_reused
    assert (
        start.before is not None and start.before < 0.1 and start.after == evaluation.exact_match and start.after > 0.6
    )
    assert start.questions == evaluation.questions and start.images == evaluation.questions
    kinds = {(one.field, one.name): one for one in start.slices}
    assert {name for field, name in kinds if field == "kind"} == {"bright", "dark"}
    assert sum(one.questions for one in kinds.values()) == start.questions
    assert all(one.verdict == "better" for one in kinds.values())
    probe = start.retention
    assert (probe.form, probe.questions, probe.before) == ("benchmarks", 50, 1.0)
    assert probe.after is not None and probe.after < 0.2
    assert [(part.name, part.verdict) for part in probe.parts] == [("colors", "worse")]
    assert decided(evaluation, min_gain=0.3) == (True, decided(evaluation, min_gain=0.3)[1])
    accepted, reason = decided(evaluation, min_gain=0.3, max_forgetting=0.2)
    assert not accepted and "does not rule out a loss of 0.2" in reason and "50 questions" in reason


def test_a_run_equal_to_its_start_gains_and_loses_nothing(evaluations: dict[str, Evaluation]) -> None:
    start = evaluations["still"].start
    assert start and start.retention and start.paired and start.retention.paired
    assert start.before == start.after and start.before is not None and start.before > 0.9
    assert (start.paired["only_model"], start.paired["only_other"]) == (0, 0)
    assert start.retention.form == "agreement" and start.retention.after == 1.0
    assert {part.name for part in start.retention.parts} == {ASK_COLOR, ASK_CODE}
    assert start.retention.questions == 60 and start.retention.images == 30
    accepted, reason = decided(evaluations["still"], min_gain=0.0)
    assert not accepted and reason.startswith("Rejected: gain over the start +0.0000 does not surely exceed")
    assert decided(evaluations["still"], max_forgetting=0.2)[0]


def test_answers_of_the_start_are_reused_and_those_of_other_weights_refused(
    runs: dict[str, JobConfig], evaluations: dict[str, Evaluation]
) -> None:
    first = evaluations["still"].start
    again = evaluated(runs["still"], 2).start
    assert first and again and again.is_reused
    measured = {"is_reused": True, "wall_s": 0.0}
    assert again.model_copy(update=measured) == first.model_copy(update=measured)
    job = runs["still"]
    asking = StartWeights(job, None, (), (), Probe())  # type: ignore[arg-type]
    uri, weights, answers, note = asking._look(torch.device("cpu"))
    assert list(weights) == ["pretrained"] and answers is None and not note
    for kept, of_others in (({}, False), ({"pretrained": "weights of before"}, True)):
        StartAnswers(weights=weights | kept, answers=()).write(open_storage(uri))
        _, _, answers, note = asking._look(torch.device("cpu"))
        assert (answers is None) == of_others
        assert (
            "belong to other weights and are not used: model.pretrained was at weights of before" in note
        ) == of_others
