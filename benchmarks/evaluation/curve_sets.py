"""Part `curve-sets`: whether a learning curve's interval holds the largest share of real sets, hidden from the law.

Five curves by `vlmpipe curve`, each on samples that no other one has, with one question about each image. Trainings of
all shares have equal numbers of steps, so that the smallest share is trained too.
"""

from __future__ import annotations

import colorsys
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.records.learning_curve import Between, LearningCurve
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.storage import open_storage

RUN_FILE = Path(__file__).parents[2] / "examples/good_enough/labels.yaml"
SAMPLES, VALIDATION = 560, 0.3
COLOURFUL, DARK = 0.25, 0.25  # saturation from which a pixel has a colour; value below which it is an outline
HUES = ("red", "yellow", "green", "cyan", "blue", "pink")  # each of 60 degrees, the first around 0


@dataclass(frozen=True)
class Case:
    """A question about images of a built-in set.

    answer: of a sample and its image; None where it is not asked about.
    draw: which of the set's samples: the first `SAMPLES` that are asked about, or the next.
    """

    source: str
    question: str
    answer: Callable[[Sample, bytes], str | None]
    draw: int = 0


def digit(sample: Sample, _: bytes) -> str | None:
    """The digit of a scan that is alone on its canvas."""
    return next((turn.answer for turn in sample.turns if turn.question.endswith("what digit is this?")), None)


def colour(sample: Sample, _: bytes) -> str | None:
    """The colour of the shape of an image of easy-vqa, from its first question that asks for it."""
    return next((turn.answer for turn in sample.turns if "what" in turn.question and "color" in turn.question), None)


def main_colour(_: Sample, image: bytes) -> str | None:
    """The hue that most pixels of a drawing have, without its paper and outlines; grey where most have none."""
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB").resize((32, 32))).reshape(-1, 3) / 255
    hues = Counter[str]()
    for red, green, blue in pixels[(pixels < 0.97).any(1)].tolist():  # the paper is white
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        if value >= DARK:
            hues[HUES[round(6 * hue) % 6] if saturation >= COLOURFUL else "grey"] += 1
    return hues.most_common(1)[0][0] if hues else None


CASES = {
    "digits": Case("builtin:digits", "what digit is this?", digit),
    "digits, other scans": Case("builtin:digits", "what digit is this?", digit, draw=1),
    "easy-vqa": Case("builtin:easy-vqa", "what color is the shape?", colour),
    "easy-vqa, other images": Case("builtin:easy-vqa", "what color is the shape?", colour, draw=1),
    "openmoji": Case("builtin:openmoji", "what is the main color?", main_colour),
}


@dataclass(frozen=True)
class Sizes:
    samples: int = SAMPLES
    max_steps: int = 240
    shares: str = "10,20,40,100"
    starts: int = 2


def curve_sets(bench: Bench) -> None:
    """Some fifteen minutes of CPU time: all curves side by side, as no figure is a time."""
    sizes = Sizes(samples=120, max_steps=6, starts=1) if bench.quick else Sizes()
    folders = {name: bench.scratch / f"case-{number}" for number, name in enumerate(CASES)}
    for name, case in CASES.items():
        bench.at(f"images of {name}", 0.0)
        _write(folders[name], case, sizes)
    bench.at(f"{len(CASES)} curves", 0.0)
    with ThreadPoolExecutor(len(CASES)) as pool:
        processes = dict(zip(CASES, pool.map(lambda name: _curve(folders[name], sizes), CASES), strict=True))
    inside = 0
    for name, process in processes.items():
        with bench.going_on(name):
            inside += _reported(bench, name, folders[name], process)
    bench.report.figure(
        "hidden largest share inside 80 %", f"{len(CASES)} sets", "sets", Side("vlmpipe curve", [float(inside)])
    )


def _reported(bench: Bench, name: str, folder: Path, process: subprocess.CompletedProcess[str]) -> bool:
    """Whether the largest share is inside the interval. Raises RuntimeError where there is no curve."""
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {process.stderr[-500:]}")
    answered = LearningCurve.read(open_storage(str(folder / "root/runs/curve")))
    scores = ", ".join(f"{point.samples:,.0f}: {_score(point.score)}" for point in answered.points)
    bench.report.note(f"{name}, {answered.questions} questions, baseline {_percent(answered.baseline)}: {scores}")
    bench.report.note(f"{name}: {answered.decision}; {answered.law.formula if answered.law else 'no law'}")
    checked = answered.checked
    if checked is None or checked.measured is None:
        bench.report.note(f"{name}: the largest share is not predicted, as fewer than 3 others are fitted")
        return False
    verdict = "inside" if checked.is_inside else "outside"
    bench.report.note(f"{name}: predicted {_score(checked.score)}, measured {checked.measured:.1%}: {verdict}")
    return bool(checked.is_inside)


def _write(folder: Path, case: Case, sizes: Sizes) -> None:
    """The case's images, records and run file."""
    (folder / "images").mkdir(parents=True)
    asked = _asked(case)
    records = []
    for number, (image, answer) in enumerate(islice(asked, case.draw * sizes.samples, (case.draw + 1) * sizes.samples)):
        (folder / f"images/{number}.png").write_bytes(image)
        turns = [{"from": "human", "value": f"<image>\n{case.question}"}, {"from": "gpt", "value": answer}]
        records.append({"id": f"sample-{number}", "image": f"{number}.png", "conversations": turns})
    (folder / "labels.json").write_text(json.dumps(records), encoding="utf-8")
    (folder / "curve.yaml").write_text(json.dumps(_run_file(folder, sizes)), encoding="utf-8")  # which is YAML, too


def _asked(case: Case) -> Iterator[tuple[bytes, str]]:
    """Images that are asked about, and their answers."""
    for sample in open_source(DataConfig(source=case.source, sequence_length=512)):
        if isinstance(sample, Sample):
            image = sample.images[0].read()
            if answer := case.answer(sample, image):
                yield image, answer


def _run_file(folder: Path, sizes: Sizes) -> dict[str, Any]:
    content: dict[str, Any] = read_run_file(RUN_FILE)
    content["data"] = {
        **content["data"],
        **{"source": str(folder / "labels.json"), "image_folder": str(folder / "images"), "slices": []},
        "validation_fraction": VALIDATION,
    }
    length = {"epochs": 1000, "max_steps": sizes.max_steps, "validate_every_steps": 0, "checkpoint_every_steps": 1000}
    content["train"] |= {**length, "early_stopping": None, "best_metric": "validation_loss"}
    content["checkpoint"] = {"export": "last"}
    content["evaluate"]["max_new_tokens"] = 8  # of 4, names of colours such as yellow are cut
    content["cluster"]["env"] = {"OMP_NUM_THREADS": "1"}
    return {**content, "output": {"root_uri": str(folder / "root")}}


def _curve(folder: Path, sizes: Sizes) -> subprocess.CompletedProcess[str]:
    asked = ["--shares", sizes.shares, "--seeds", str(sizes.starts), "--goal", "0.9", "--run-id", "curve", "--plain"]
    command = [sys.executable, "-m", "vlmpipe", "curve", str(folder / "curve.yaml"), *asked]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment, check=False, start_new_session=True
    )


def _score(score: Between | None) -> str:
    return f"{score.value:.1%} ({score.low:.1%} to {score.high or 1.0:.1%})" if score else "none"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"
