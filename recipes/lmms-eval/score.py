"""Scores a served model with lmms-eval on a POPE file of this machine. Nothing is downloaded.

    vlmpipe serve RUN                                        # in another terminal; says address and name
    build/recipes/lmms-eval/bin/python recipes/lmms-eval/score.py --url http://127.0.0.1:8000/v1 --model NAME \\
        --questions data/pope/coco_pope_random.json --images data/coco/val2014 --output build/pope

Writes lmms-eval's own files and scores.json into the output folder, and prints the scores. Ends with 1 where a question
was not answered: lmms-eval itself scores the error's text as an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TASK, FAILED = "pope_file", "[LMMS_EVAL_REQUEST_FAILED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of the OpenAI-compatible server, up to /v1")
    parser.add_argument("--model", required=True, help="the model's name on it")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines in POPE's format")
    parser.add_argument("--images", type=Path, required=True, help="folder of the images")
    parser.add_argument("--output", type=Path, required=True, help="new or empty folder")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    if any(asked.output.iterdir()):
        sys.exit(f"{asked.output} is not empty; choose a new folder")
    write_questions(asked.questions, asked.images.resolve(), asked.output / "questions.jsonl")
    run_lmms_eval(asked.url, asked.model, asked.output)
    results = next(asked.output.glob("results/**/*_results.json"), None)
    if results is None:  # it ends with 0 after an error, too
        sys.exit("lmms-eval wrote no results; see what it printed")
    found = json.dumps(scores(results), indent=1)
    (asked.output / "scores.json").write_text(found)
    print(found)
    unanswered = [line for line in samples(asked.output) if FAILED in json.dumps(line)]
    if unanswered:
        sys.exit(f"{len(unanswered)} questions were not answered, and count as wrong: see {results.parent}")


def write_questions(source: Path, images: Path, target: Path) -> None:
    """POPE's lines under the column names that lmms-eval's functions read."""
    with target.open("w", encoding="utf-8") as file:
        for line in source.read_text(encoding="utf-8").splitlines():
            if line.strip():
                one = json.loads(line)
                asked = {"question_id": one["question_id"], "question": one["text"], "answer": one["label"]}
                file.write(json.dumps(asked | {"image": str(images / one["image"])}) + "\n")


def run_lmms_eval(url: str, model: str, output: Path) -> None:
    tasks = Path(__file__).resolve().parent / TASK
    options = f"base_url={url},model_version={model},api_key=none,timeout=120,num_concurrent=1"
    command = [sys.executable, "-m", "lmms_eval", "--model", "openai", "--model_args", options, "--tasks", TASK]
    command += ["--include_path", str(tasks), "--batch_size", "1", "--log_samples", "--output_path", "results"]
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": "cache", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, cwd=output, env={**os.environ, **own})
    if done.returncode:
        sys.exit(f"lmms-eval ended with {done.returncode}; see what it printed")


def scores(results: Path) -> dict[str, float]:
    found = json.loads(results.read_text())["results"][TASK]
    return {
        name.removesuffix(",none"): value
        for name, value in found.items()
        if name.startswith("pope_") and "_stderr" not in name
    }


def samples(output: Path) -> list[dict[str, Any]]:
    """The questions with their answers, as lmms-eval logged them."""
    (file,) = output.glob("results/**/*_samples_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
