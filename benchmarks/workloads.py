"""The work that is measured: shipped run files, prepared and encoded as a run does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelines.config import load_run_file
from trainer.config import DataPointers, JobConfig, RunPaths
from trainer.data.conversation import load_tokenizer
from trainer.data.index import Index, SplitIndex
from trainer.data.loader import RowLoader
from trainer.data.prepare import prepare
from trainer.data.sequence import RowSequence
from trainer.data.shards import ShardReader
from trainer.features.build import build
from trainer.features.store import features_uri
from trainer.progress import Progress
from trainer.storage import open_storage
from trainer.worker import Worker

CONFIGS = Path(__file__).parent.parent / "configs"
# A rate that stays the same needs no schedule on the other side of a comparison.
SETTINGS = ("cluster.replica_count=1", "train.schedule=constant", "train.warmup_fraction=0")


@dataclass(frozen=True)
class Workload:
    """A run file's model and data, ready to train on. `cached` and `online` differ in where features come from."""

    name: str
    cached: JobConfig
    online: JobConfig

    def split(self) -> SplitIndex:
        return Index.load(self.online.pointers().prepared_uri).split("train")

    def tokenizer(self) -> Any:
        return load_tokenizer(open_storage(self.online.pointers().prepared_uri))

    def sequence(self) -> RowSequence:
        """The rows of all epochs, as training reads them."""
        job = self.online
        return RowSequence(
            self.split(),
            row_tokens=job.data.row_tokens,
            row_images=job.data.row_images,
            seed=job.train.seed,
            global_batch_rows=job.train.global_batch_rows,
        )

    @contextmanager
    def loader(self) -> Iterator[RowLoader]:
        """Rows with their encoded images."""
        reader = ShardReader(open_storage(self.online.pointers().prepared_uri))
        with RowLoader(self.split(), self.sequence(), self.tokenizer(), reader, images=True) as loader:
            yield loader


def job_of(run_file: str, root: Path, run_id: str, overrides: tuple[str, ...] = ()) -> JobConfig:
    """A shipped run file as the job that a container sees."""
    run = RunPaths(run_id=run_id, root_uri=str(root))
    config = load_run_file(CONFIGS / f"{run_file}.yaml", [*SETTINGS, *overrides])
    return JobConfig.model_validate(config.to_run_json(run))


def prepare_job(job: JobConfig) -> str:
    """Prepare the job's data, or find it there. Returns where it lies."""
    return prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True)).uri


def workload(run_file: str, root: Path, worker: Worker, overrides: tuple[str, ...] = ()) -> Workload:
    """Prepared data and cached features of a shipped run file. Needs the process group."""
    jobs = {}
    for name, features in (("cached", "reuse"), ("online", "off")):
        job = jobs[name] = job_of(run_file, root, f"{run_file}-{name}", overrides)
        pointers = DataPointers(
            prepared_uri=prepare_job(job),
            features_uri=features_uri(job.run.features_root, job.model),
            features=features,
        )
        open_storage(job.run.run_uri).write("prepared.json", pointers.model_dump_json().encode())
    with torch.no_grad():
        build(jobs["cached"], worker)
    return Workload(run_file, **jobs)
