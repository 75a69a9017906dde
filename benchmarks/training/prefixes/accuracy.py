"""Part `shared-prefix-accuracy`: what it costs in accuracy that an image's questions meet in a step.

Equal questions a step and equal epochs, and once equal time; three seeds; easy-vqa from random weights, and scenes with
GQA's numbers of questions from a model that was trained on easy-vqa. Every answer is generated, each question alone.
"""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.workloads import CONFIGS, prepare_job
from benchmarks.training.prefixes.scenes import write_scenes
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.config.sources.data_fields import AUTO_QUESTIONS
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.distributed.process import StopRequest
from vlmpipe.trainer.evaluation.answer import AnsweringModel
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.evaluation.validation.questions import ValidationSplit, answer, with_images
from vlmpipe.trainer.feature_cache.encode import build
from vlmpipe.trainer.feature_cache.reader import FeatureReader
from vlmpipe.trainer.feature_cache.store import features_uri
from vlmpipe.trainer.loop import train
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.serving.exported_model import load_export
from vlmpipe.trainer.storage import open_storage

SETTINGS = (
    "cluster.replica_count=1", "train.resume=never", "train.validate_every_steps=0", "train.micro_batch_size=1",
    "train.checkpoint_every_steps=1000000", "evaluate.earlier_turns=none", "evaluate.max_new_tokens=4",
    "gate=none", "train.log_every_steps=50",
)  # fmt: skip
FROM_RANDOM = (
    "model.tokenizer=train:400", "model.language_model.config.max_position_embeddings=1024",
    "model.language_model.config.hidden_size=64", "model.language_model.config.intermediate_size=192",
)  # fmt: skip
AT_ONCE = 64  # questions
SEEDS = (0, 1, 2)  # of weights, order and, of scenes, the start


@dataclass(frozen=True)
class Arm:
    """How questions become steps. sequences: of a step, each of so many tokens that a step has about 32 questions."""

    name: str
    turns: str
    share_prefix: str
    max_questions: int
    sequences: int
    tokens: int
    more_epochs: float = 1.0

    def settings(self) -> tuple[str, ...]:
        return (
            f"data.turns={self.turns}", f"data.share_prefix={self.share_prefix}",
            f"data.max_questions_per_image={self.max_questions}", f"data.sequence_length={self.tokens}",
            f"train.global_batch_size={self.sequences}",
        )  # fmt: skip


ALONE = Arm("one by one", "independent", "off", 0, 2, 608)
FEW = Arm(f"at most {AUTO_QUESTIONS} of an image", "independent", "on", AUTO_QUESTIONS, 1, 736)
ALL = Arm("all of an image", "independent", "on", 0, 1, 640)
ARMS = (
    ALONE,
    FEW,
    ALL,
    Arm("one conversation an image", "conversation", "off", 0, 1, 640),
    replace(FEW, name=f"{FEW.name}, equal time", more_epochs=1.6),  # of the speed with 16 image tokens
)


@dataclass(frozen=True)
class Case:
    """A set of records, each with all questions about an image, and the start of their trainings."""

    name: str
    settings: tuple[str, ...]
    epochs: int
    images: int  # of validation, whose questions are asked


def shared_prefix_accuracy(bench: Bench) -> None:
    """Some ten minutes of CPU time."""
    train_images, images, epochs = (24, 6, 1) if bench.quick else (700, 100, 3)
    samples = f"data.max_samples={train_images * 5 // 4}"  # a fifth is for validation
    easy = Case("easy-vqa, random weights", (samples, *FROM_RANDOM), epochs, images)
    scenes = write_scenes(bench.scratch / "scenes", train_images * 3 // 10, images)
    other = (f"data.source={scenes}", "train.optimizer.learning_rate=1e-3")
    runs, found = Runs(bench), dict[tuple[str, str], list[Score]]()
    for seed in SEEDS[:1] if bench.quick else SEEDS:
        for arm in ARMS:
            found.setdefault((easy.name, arm.name), []).append(runs.score(easy, arm, seed))
        begun = Case("scenes, from a run on easy-vqa", (*other, *runs.as_start(easy, ALONE, seed)), epochs, images)
        for arm in ARMS:
            found.setdefault((begun.name, arm.name), []).append(runs.score(begun, arm, seed))
    for names, scores in found.items():
        data = ": ".join(names)
        bench.report.figure("answers exactly right", data, "%", Side("validation", [100 * one.right for one in scores]))
        bench.report.figure("CPU time of training", data, "s", Side("steps", [one.cpu_s for one in scores]))


@dataclass(frozen=True)
class Score:
    right: float
    asked: int
    questions_a_step: float
    steps: int
    cpu_s: float

    def text(self) -> str:
        steps = f"{self.steps:,} steps of {self.questions_a_step:.1f} questions in {self.cpu_s:.0f} CPU s"
        return f"{100 * self.right:.1f} % of {self.asked:,} right, after {steps}"


class Runs:
    """Trainings in this process, each in a run folder of its own."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._jobs = bench, dict[tuple[Case, Arm, int], JobConfig]()

    def as_start(self, case: Case, arm: Arm, seed: int) -> tuple[str, ...]:
        """Settings that begin at the export of a run that was made, with its tokenizer."""
        job = self._jobs[case, arm, seed]
        weights = f"{{weights: {job.run.run_uri}/export}}"
        parts = (f"model.{part}={weights}" for part in ("language_model", "projector"))
        return (*parts, f"model.tokenizer={job.pointers().prepared_uri}/tokenizer")

    def score(self, case: Case, arm: Arm, seed: int) -> Score:
        """Train, export, and ask the validation questions."""
        self._bench.at(f"{case.name}: {arm.name}, seed {seed}")
        job = self._jobs[case, arm, seed] = self._job(case, arm, seed)
        with contextlib.redirect_stdout(io.StringIO()):
            with torch.no_grad():
                build(job, self._bench.worker)
            began = time.process_time()
            train(job, self._bench.worker, StopRequest())
            cpu_s = time.process_time() - began
            sync_run(job)
        index = Index.load(job.pointers().prepared_uri)
        sampler = PackedBatchSampler.of_training(index.split("train"), job)
        steps, questions = sampler.num_steps(1), sum_of_turns(index, sampler)
        right, asked = self._asked(job, index, case.images)
        score = Score(right, asked, questions / steps, sampler.num_steps(job.train.epochs), cpu_s)
        self._bench.report.note(f"{case.name}, {arm.name}, seed {seed}: {score.text()}")
        return score

    def _job(self, case: Case, arm: Arm, seed: int) -> JobConfig:
        settings = [*SETTINGS, *case.settings, *arm.settings(), f"train.seed={seed}", f"model.seed={seed}"]
        settings.append(f"train.epochs={round(arm.more_epochs * case.epochs)}")
        config = load_run_file(CONFIGS / "easy-vqa.yaml", settings)
        root = Path(self._bench.scratch) / "root"
        paths = RunPaths(run_id=f"run-{len(self._jobs)}", root_uri=str(root))
        job = JobConfig.model_validate(config.to_run_json(paths))
        pointers = DataPointers(
            prepared_uri=prepare_job(job),
            features_uri=features_uri(job.run.features_root, job.model, job.train.precision),
            features="reuse",
        )
        open_storage(job.run.run_uri).write("prepared.json", pointers.model_dump_json().encode())
        return job

    def _asked(self, job: JobConfig, index: Index, images: int) -> tuple[float, int]:
        """Share of right answers to all questions about the first validation images, and their number."""
        pointers, cpu = job.pointers(), torch.device("cpu")
        family, model = load_export(job, cpu)
        store = open_storage(pointers.prepared_uri)
        chat = Chat.load(store, image_form_of(job.model), is_proved=True)
        features = FeatureReader.open(pointers.features_uri)
        validation = ValidationSplit(index.split("eval"), ShardReader.open(store))
        answering = AnsweringModel(family, model, chat, features, BatchBudget(job.evaluate.batch_tokens))
        questions = validation.questions(0, "none")
        shown = set(sorted({question.image_group for question in questions})[:images])
        chosen = sorted((one for one in questions if one.image_group in shown), key=lambda one: one.image_group)
        right = 0
        for start in range(0, len(chosen), AT_ONCE):
            asked = with_images(validation, chosen[start : start + AT_ONCE])
            right += sum(one.correct for one in answer(job, answering, asked, cpu))
        return right / len(chosen), len(chosen)


def sum_of_turns(index: Index, sampler: PackedBatchSampler) -> int:
    """Questions of the first epoch: a conversation has several."""
    return int(index.split("train").turns[sampler.plan(0).members].sum())
