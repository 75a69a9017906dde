"""Part `answers`: batch prediction beside the evaluation, on the same questions; and the share of scoring.

The model is that of a short run of configs/digits.yaml. `predict` reads and checks an image file for each question,
where the evaluation reads its prepared shard or cached features.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.timing import Measured
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.evaluation.evaluate import Subject, load_subject
from vlmpipe.trainer.evaluation.metrics import Prediction, Question, scores
from vlmpipe.trainer.evaluation.prediction.answer_file import ToAnswer
from vlmpipe.trainer.evaluation.prediction.predict import predict
from vlmpipe.trainer.evaluation.validation.questions import answer, with_images

QUESTIONS = 1000
RUN = (
    "train.epochs=1",
    "data.max_samples=3000",
    "features.cache=off",
    "evaluate.max_samples=50",
    "gate.min_exact_match=0",
)
START = "from vlmpipe.cli.entry import console; console()"


def answers(bench: Bench) -> None:
    questions_wanted = 100 if bench.quick else QUESTIONS
    bench.at("a short run to ask", 0.0)
    run = trained(bench.scratch)
    job = JobConfig.load(str(run / "run.json"))
    subject = load_subject(job, bench.worker)
    questions = repeated(subject.validation.questions(0, "none"), questions_wanted)
    files = written_images(subject, questions, bench.scratch / "images")
    given: dict[str, list[str]] = {}

    def evaluated() -> float:
        size = job.evaluate.batch_questions
        found: list[Prediction] = []
        for start in range(0, len(questions), size):
            asked = with_images(subject.validation, questions[start : start + size])
            found += answer(job, subject.model, asked, bench.worker.device)
        given["evaluate"] = [one.prediction for one in found]
        return float(len(questions))

    def predicted(count: int) -> float:
        output = bench.scratch / "answers.jsonl"
        with contextlib.suppress(FileNotFoundError):
            output.unlink()
        predict(job, files[:count], output)
        given["predict"] = [json.loads(line)["prediction"] for line in output.read_text(encoding="utf-8").splitlines()]
        return float(count)

    pictures = {(q.id, q.turn): (*subject.split.image_sha256(q.sample), q.question) for q in questions}

    def scored() -> float:
        found = [
            Prediction(f"{number}", q.turn, q.slice, q.question, q.answer, text, False)
            for number, (q, text) in enumerate(zip(questions, given["evaluate"], strict=True))
        ]
        shown = {(p.id, p.turn): pictures[q.id, q.turn] for p, q in zip(found, questions, strict=True)}
        scores(found, shown, job.evaluate.cider_d)
        return float(len(questions))

    evaluated()
    found = bench.take_timed_turns(
        "answers",
        # One question loads the model as all of them do: its time is taken off below.
        {
            "evaluate": evaluated,
            "predict": lambda: predicted(len(files)),
            "load": lambda: predicted(1),
            "score": scored,
        },
    )
    predicted(len(files))
    bench.report.require(given["predict"] == given["evaluate"], "predict answers as evaluate does")
    beyond_load = [
        Measured(mine.cpu_s - load.cpu_s, mine.wall_s - load.wall_s, mine.units - load.units)
        for mine, load in zip(found["predict"], found["load"], strict=True)
    ]
    bench.report.compare_rates(
        "batch prediction beside the evaluation", "digits", "questions", ("predict", beyond_load),
        ("evaluate", found["evaluate"]),
    )  # fmt: skip
    shares = [
        100 * score.cpu_per_unit / asked.cpu_per_unit
        for score, asked in zip(found["score"], found["evaluate"], strict=True)
    ]
    bench.report.note(
        "The model answers in a token or two of a tiny vocabulary: of a real one, scoring is a smaller share."
    )
    bench.report.figure("scoring, of generation", "digits", "% of CPU time", Side("scores", shares))


def trained(folder: Path) -> Path:
    """The folder of a run that was evaluated; `vlmpipe run` in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", START, "run", "configs/digits.yaml", *RUN]
    command += [f"output.root_uri={folder}", "--run-id", "asked"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    run = folder / "runs/asked"
    if not (run / "evaluate.json").exists():
        raise RuntimeError(f"the short run was not evaluated:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return run


def repeated(questions: Sequence[Question], count: int) -> list[Question]:
    return [questions[number % len(questions)] for number in range(count)]


def written_images(subject: Subject, questions: Sequence[Question], folder: Path) -> list[ToAnswer]:
    """Each question's picture in a file, named once a sample."""
    folder.mkdir()
    found = []
    for question in questions:
        path = folder / f"{question.sample}.png"
        if not path.exists():
            (image,) = subject.validation.images(question.sample).read()
            path.write_bytes(image)
        found.append(ToAnswer(path, question.question.removeprefix("<image>").strip()))
    return found
