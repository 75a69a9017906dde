"""The data and models that are measured: run files, prepared and encoded as a run does it."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.support.suite import Bench
from vlmpipe.config.run_config import load_run_file
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.feature_cache.encode import build
from vlmpipe.trainer.feature_cache.store import features_uri
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.records.prepared import DataPointers
from vlmpipe.trainer.storage import open_storage

CONFIGS = Path(__file__).parents[2] / "configs"
OF_ONE_SIZE = {"easy-vqa": Path(__file__).with_name("easy-vqa.yaml")}  # whose figures are compared over time
# One process; every run from the start; a constant rate, so that the other side of a comparison needs no schedule.
SETTINGS = ("cluster.replica_count=1", "train.resume=never", "train.lr_schedule=constant", "train.warmup_fraction=0")


@dataclass(frozen=True)
class Workload:
    """A run file's model and data, ready to train on: the same job with cached features and with online ones."""

    name: str
    run_file: str
    cached: JobConfig
    online: JobConfig

    @cached_property
    def chat(self) -> Chat:
        return Chat.load(open_storage(self.online.pointers().prepared_uri), image_form_of(self.online.model))

    @cached_property
    def num_steps(self) -> int:
        """Steps of the first epoch."""
        return self.sequence().num_steps(1)

    @property
    def image_tokens(self) -> int:
        """Tokens of one image."""
        model = self.online.model
        return image_tokens_of(model)(model.image_size, model.image_size)

    def split(self) -> SplitIndex:
        return Index.load(self.online.pointers().prepared_uri).split("train")

    def sequence(self) -> PackedBatchSampler:
        """The packed sequences that training reads."""
        job = self.online
        return PackedBatchSampler(
            self.split(),
            job.data,
            seed=job.train.seed,
            global_batch_size=job.train.global_batch_size,
            in_pairs=job.train.in_pairs,
        )

    def loader(self, *, images: bool = True) -> PackedLoader:
        """Packed sequences, with their encoded images where `images`; a new one verifies the shards anew."""
        return PackedLoader(self.split(), self.sequence(), self.chat, self.reader(), images=images)

    def reader(self) -> ShardReader:
        return ShardReader.open(open_storage(self.online.pointers().prepared_uri))


def job_of(run_file: str, root: Path, run_id: str, overrides: tuple[str, ...] = ()) -> JobConfig:
    """A run file as the job that a container sees."""
    config = load_run_file(OF_ONE_SIZE.get(run_file, CONFIGS / f"{run_file}.yaml"), [*SETTINGS, *overrides])
    return JobConfig.model_validate(config.to_run_json(RunPaths(run_id=run_id, root_uri=str(root))))


def prepare_job(job: JobConfig) -> str:
    """Prepare the job's data, or find it there. Returns where it lies."""
    return prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True)).uri


def workload(bench: Bench, run_file: str, overrides: tuple[str, ...] = (), *, name: str = "") -> Workload:
    """Prepared data and cached features of a run file, made once in a run of the benchmark."""
    bench.at(f"data and features of {name or run_file}")
    cached = job_with_data(run_file, bench.scratch, "reuse", overrides)
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        build(cached, bench.worker)
    return Workload(name or run_file, run_file, cached, job_with_data(run_file, bench.scratch, "off", overrides))


def data_workloads(bench: Bench) -> list[Workload]:
    """What the data path is measured on."""
    samples = {"digits": 300, "easy-vqa": 200} if bench.quick else {"digits": 0, "easy-vqa": 2000}
    return [workload(bench, name, (f"data.max_samples={count}",)) for name, count in samples.items()]


def job_with_data(run_file: str, root: Path, features: str, overrides: tuple[str, ...]) -> JobConfig:
    job = job_of(run_file, root, f"{run_file}-{features}", overrides)
    pointers = {
        "prepared_uri": prepare_job(job),
        "features_uri": features_uri(job.run.features_root, job.model, job.train.precision),
    }
    content = DataPointers.model_validate(pointers | {"features": features}).model_dump_json()
    open_storage(job.run.run_uri).write("prepared.json", content.encode())
    return job
