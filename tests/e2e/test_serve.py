"""A trained run behind the real `transformers serve`, deployed and uploaded by the compiled local pipeline,
and asked by `vlmpipe predict`: all answers are the evaluation's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.hub_uploads import UploadHub, running_upload_hub
from tests.support.paths import ROOT
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.storage.records import read_record_file

# Needs `make build/serving` on PYTHONPATH, as `make test-whole` has it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.slow]

ASKED = 8
TOKEN = "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x"
RUN_FILE = merged(
    TINY,
    {
        "model.family": "llava",
        "data.max_samples": 200,
        "train.epochs": 1000,
        "train.max_steps": 400,  # so many that it gives different answers to different questions
        "evaluate.controls": [],
        # A margin over the baseline would not be sure: there are 66 questions.
        "gate": {"min_exact_match": 0.1, "min_margin_over_chance": None},
        "evaluate.quantize": {"formats": ["int4", "fp8"], "min_agreement": 0.5},
        "register.hub": {"repo_id": "team/digits"},
        "deploy": {"endpoint": "digits", "smoke_questions": ASKED, "min_agreement": 1.0},
    },
)


def vlmpipe(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = "from vlmpipe.cli.entry import console; console()"
    command, environment = [sys.executable, "-c", program, *arguments], {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hub() -> Iterator[UploadHub]:
    with running_upload_hub(**{TOKEN: "team"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, hub: UploadHub) -> Path:
    """The folder of a pipeline that ran to its end, deploy-model included."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "serve.yaml").write_text(json.dumps(RUN_FILE))
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    done = vlmpipe(folder, "run", "serve.yaml", "--run-id", "r1", "--plain", **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return folder / "runs/runs/r1"


def predictions(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    return [line for line in lines if "prediction" in line]


def test_the_pipeline_deploys_a_model_that_answers_as_it_was_evaluated(run: Path) -> None:
    deployed = read_record_file(run / "deployed.json")
    assert (deployed["asked"], deployed["agreement"], deployed["server"]) == (ASKED, 1.0, "transformers serve")
    assert len({line["prediction"] for line in predictions(run)}) > 1, "answers that could differ"


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_a_registered_quantized_export_is_served_and_answers_much_as_the_model(
    folder: Path, run: Path, form: str
) -> None:
    """Not as often as in the evaluation, which rounds what the frozen vision encoder gives, as no server does."""
    scores = read_record_file(run / "evaluate.json")["quantized"][form]
    assert scores["accepted"] and read_record_file(run / "registered.json")["quantized"][form].endswith(f"model-{form}")
    options = ("--quantized", form, "--check", str(scores["questions"]), "--min-agreement", "0", "--json")
    done = vlmpipe(folder, "serve", "r1", *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["asked"] == scores["questions"] and min(told["agreement"], scores["same"] / told["asked"]) > 0.75


def test_the_pipeline_uploads_the_exported_model_and_its_card(folder: Path, run: Path, hub: UploadHub) -> None:
    branch = hub.repositories["team/digits"].branches["main"]
    assert branch.commits[1:] == ["tiny version 1, run r1"]
    assert branch.files["model.safetensors"] == (run / "export/model.safetensors").read_bytes()
    assert b"library_name: transformers" in branch.files["README.md"]
    assert read_record_file(run / "registered.json")["hub"]["commit"] == branch.head
    written = [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == [], "the token"


def test_predict_answers_as_the_evaluation(folder: Path, run: Path) -> None:
    prepared_uri = read_record_file(run / "prepared.json")["prepared_uri"]
    shards = ShardReader.open(open_prepared(prepared_uri))
    split = Index.load(prepared_uri).split("eval")
    (folder / "images").mkdir()
    rows, expected = [], []
    for number, line in enumerate(predictions(run)):
        if not line["question"].startswith("<image>"):
            continue
        (image,) = shards.images(split.sample_location(split.ids.index(line["id"])))
        (folder / "images" / f"{number}.png").write_bytes(image)
        rows.append({"image": f"images/{number}.png", "question": line["question"].removeprefix("<image>").strip()})
        expected.append(line["prediction"])
    assert len(rows) >= 5
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = vlmpipe(folder, "predict", "r1", "asked.jsonl", "--output", "answers.jsonl")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in answers] == expected


def test_a_served_model_that_was_evaluated_otherwise_is_refused(folder: Path, run: Path) -> None:
    """The evaluation's record is another one: what a served model of other weights looks like from outside."""
    path = run / "predictions.jsonl"
    before = path.read_text()
    try:
        lines = [json.loads(line) for line in before.splitlines()]
        changed = [{key: value for key, value in line.items() if key != "record_crc32c"} for line in lines]
        path.write_text("".join(json.dumps(line | {"prediction": "none of these"}) + "\n" for line in changed))
        done = vlmpipe(folder, "serve", "r1", "--check", "2")
    finally:
        path.write_text(before)
    assert done.returncode == 76, done.stderr
    assert "the server does not answer as the evaluation" in done.stderr


def test_lmms_eval_scores_the_served_model_as_its_evaluation_does(folder: Path, run: Path) -> None:
    """As the step benchmark of the pipeline, on a file in POPE's format: validation questions that are yes or no."""
    python = ROOT / "build/recipes/lmms-eval/bin/python"
    if not (ROOT / "build/recipes/lmms-eval/.installed").is_file():
        pytest.skip("make recipe-lmms-eval makes its environment")
    prepared_uri = read_record_file(run / "prepared.json")["prepared_uri"]
    shards, split = ShardReader.open(open_prepared(prepared_uri)), Index.load(prepared_uri).split("eval")
    asked = [line for line in predictions(run) if line["answer"] in ("yes", "no")]
    (pope := folder / "pope").mkdir()
    lines = []
    for number, line in enumerate(asked):
        (image,) = shards.images(split.sample_location(split.ids.index(line["id"])))
        (pope / f"{number}.png").write_bytes(image)
        text = line["question"].removeprefix("<image>").strip()
        lines.append({"question_id": number, "image": f"{number}.png", "text": text, "label": line["answer"]})
    (pope / "pope.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--questions", pope / "pope.json", "--images", pope, "--output", folder / "task")
    subprocess.run([sys.executable, ROOT / "recipes/lmms-eval/pope_task.py", *options], check=True)
    correct = sum(line["prediction"] == line["answer"] for line in asked)
    assert correct, "a score that could be another"
    section = {"tasks": ["pope_file"], "include_path": "task", "python": str(python)}
    gate = {"pope_file": {"pope_accuracy": correct / len(asked), "pope_f1_score": 1.01}}  # the second rejects
    scored = merged(RUN_FILE, {"evaluate.lmms_eval": section, "gate.benchmarks": gate})
    del scored["deploy"], scored["register"]["hub"]
    (folder / "scored.yaml").write_text(json.dumps(scored))
    done = vlmpipe(folder, "run", "scored.yaml", "--run-id", "r2", "--plain", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    second = folder / "runs/runs/r2"
    found = read_record_file(second / "evaluate.json")["benchmarks"]["pope_file"]
    assert found["scores"]["pope_accuracy"] == pytest.approx(correct / len(asked))
    answers = [json.loads(line) for line in (second / "benchmarks/pope_file.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in answers if "prediction" in line] == [line["prediction"] for line in asked]
    decision = read_record_file(second / "decision.json")
    assert [check["metric"] for check in decision["checks"] if not check["passed"]] == [
        "benchmarks.pope_file.pope_f1_score"
    ]
    assert "pope_accuracy" in (second / "report.html").read_text()
