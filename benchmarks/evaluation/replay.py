"""Part `replay`: what a run on digits forgets of easy-vqa, without and with the start model's answers as a source.

Both run by `vlmpipe run` from the same start, and the evaluation asks both the same validation questions of easy-vqa,
as a benchmark. Fails where replay does not halve what is forgotten.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.records.evaluation import Evaluation, Retention
from vlmpipe.trainer.records.replay import ReplayAnswers, ReplayPointer
from vlmpipe.trainer.storage import open_storage

CONFIGS = Path(__file__).parents[2] / "configs"
START = "start"  # id of the run that trains on easy-vqa
DIGITS, IMAGES = {"name": "digits", "uri": "builtin:digits"}, 60  # validation images that are asked about
PROMPTS = ("What color is the shape?", "What shape is in the image?", "Is there a red shape?", "Is there a circle?")
REPLAY = {"name": "before", "replay": "self", "replay_max_new_tokens": 8}
SOURCES: dict[str, dict[str, Any]] = {  # beside digits
    "no replay": {},
    "replay: self": REPLAY,
    "about the images of digits": {**REPLAY, "replay_images": 1.0, "replay_prompts": list(PROMPTS)},
}
SEEDS = (0, 1)


@dataclass(frozen=True)
class Sizes:
    """Samples of both sets, and steps at most; 0: all."""

    start_steps: int = 0
    start_samples: int = 0
    samples: int = 1500
    images: int = IMAGES
    seeds: tuple[int, ...] = SEEDS


def replay(bench: Bench) -> None:
    """A quarter of an hour of CPU time."""
    sizes = Sizes(60, 400, 120, 2, (0,)) if bench.quick else Sizes()
    files = Files(bench.scratch, sizes)
    bench.at("easy-vqa", 0.0)
    files.run(START, files.start())
    forgotten = dict[str, list[float]]()
    kinds = dict(list(SOURCES.items())[: 2 if bench.quick else None])
    for name, source in kinds.items():
        for seed in sizes.seeds:
            bench.at(f"{name}, seed {seed}", 0.0)
            run_id = f"{list(SOURCES).index(name)}-{seed}"
            files.run(run_id, files.after(source, seed))
            kept = files.retention(run_id)
            assert kept.before is not None and kept.after is not None
            forgotten.setdefault(name, []).append(100 * (kept.before - kept.after))
        case = f"digits after easy-vqa, {kept.questions:,} questions, {len(sizes.seeds)} seeds"
        bench.report.figure("forgotten", f"{case}: {name}", "points", Side("vlmpipe run", forgotten[name]))
        if source:
            cost = files.cost(run_id)
            for what, value, unit in (("time", cost.answer_s, "s"), ("tokens", cost.answer_tokens, "tokens")):
                data = f"{cost.answered:,} answers: {name}"
                bench.report.figure(f"{what} of generating", data, unit, Side("job replay", [float(value)]))
    without, replayed = (mean(forgotten[name]) for name in list(SOURCES)[:2])
    if not bench.quick and 2 * replayed > without:  # an UnfairError would take the figures along
        raise RuntimeError(f"replay does not halve what is forgotten: {replayed:.1f} of {without:.1f} points are left")


class Files:
    """Run files of a folder, and what their runs left."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder, self._sizes, self._root = folder, sizes, folder / "root"
        (folder / "images").mkdir()
        self._write_questions()

    def start(self) -> dict[str, Any]:
        """The shipped run file of easy-vqa with one epoch."""
        content = self._settings(0)
        content["data"]["max_samples"] = self._sizes.start_samples
        content["train"] |= {"epochs": 1, "max_steps": self._sizes.start_steps}
        return content

    def after(self, source: dict[str, Any], seed: int) -> dict[str, Any]:
        """A run on digits from the start's export, with the rate of the shipped run file of digits."""
        content = self._settings(seed)
        for part in ("language_model", "projector"):
            content["model"][part] = {"weights": f"run:{START}"}
        content["model"]["tokenizer"] = f"run:{START}"
        digits = {**DIGITS, "max_samples": self._sizes.samples}
        content["data"] = {"sources": [digits, source] if source else [digits], "sequence_length": 256}
        content["train"] |= {"epochs": 1, "warmup_fraction": 0.03}
        questions = {"uri": str(self._folder / "questions.json"), "images": str(self._folder / "images")}
        content["evaluate"]["benchmarks"] = [{"name": "before", "format": "chartqa", "max_new_tokens": 8, **questions}]
        content["evaluate"]["retention"] = {"benchmark_share": 1.0}
        return content

    def _settings(self, seed: int) -> dict[str, Any]:
        content: dict[str, Any] = read_run_file(CONFIGS / "easy-vqa.yaml")
        content["train"] |= {"seed": seed, "validate_every_steps": 0}
        content["evaluate"] = {"max_new_tokens": 8, "max_samples": 60, "controls": []}
        here = {"gate": "none", "cluster": {"replica_count": 1, "processes_per_replica": 1}}
        return {**content, **here, "output": {"root_uri": str(self._root)}}

    def _write_questions(self) -> None:
        rows, images = [], 0
        for sample in open_source(DataConfig(source="builtin:easy-vqa", sequence_length=512)):
            if not isinstance(sample, Sample) or sample.split != "eval":
                continue
            if images == self._sizes.images:
                break
            images += 1
            (self._folder / f"images/{images}.png").write_bytes(sample.images[0].read())
            for turn in sample.turns:
                question = turn.question.replace(IMAGE_TOKEN, "").strip()
                rows.append({"imgname": f"{images}.png", "query": question, "label": turn.answer})
        (self._folder / "questions.json").write_text(json.dumps(rows), encoding="utf-8")

    def run(self, run_id: str, content: dict[str, Any]) -> None:
        """Run it to its end. Raises CalledProcessError with what it printed."""
        path = self._folder / f"{run_id}.yaml"
        path.write_text(json.dumps(content), encoding="utf-8")  # which is YAML, too
        command = [sys.executable, "-m", "vlmpipe", "run", str(path), "--run-id", run_id, "--plain"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
        if ended.returncode:
            print(ended.stdout[-4000:], ended.stderr[-4000:], file=sys.stderr)
        ended.check_returncode()

    def retention(self, run_id: str) -> Retention:
        """What the evaluation found of the questions of easy-vqa."""
        start = Evaluation.read(self._store(run_id)).start
        assert start and start.retention, start
        return start.retention

    def cost(self, run_id: str) -> ReplayAnswers:
        """Counts of the start model's answers that the run trained on."""
        return ReplayAnswers.read(open_storage(ReplayPointer.read(self._store(run_id)).folder))

    def _store(self, run_id: str) -> Any:
        return open_storage(str(self._root / "runs" / run_id))
