"""Disk, memory and seconds of work of each step. None: not known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.steps import StepFacts, load_steps
from vlmpipe.config.rules.baseline import asks_start
from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import Job
from vlmpipe.planner.time.feature_cache import feature_bytes
from vlmpipe.trainer.config.job import export_dtype
from vlmpipe.trainer.data.shards.disk_cache import GIB, SHARE_OF_FREE_DISK
from vlmpipe.trainer.sizing.checkpoint_size import node_bytes
from vlmpipe.trainer.sizing.export_size import FP32_BYTES, PUBLISHED_BYTES, ExportSize, export_size, published_bytes
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.storage.base import in_bucket

GB = 10**9
SMALL_BYTES = GB  # records, reports, a tokenizer
RECORD_BYTES = 300  # of a sample in the tables that preparation keeps on disk
# Mean size of the chunks that are under way, relative to data.chunk_samples: they end between 0.5 and 2 times of it
# (vlmpipe.trainer.data.prepare.chunks.plan.ends_chunk), and a longer one is under way longer.
CHUNK_UNDER_WAY = 1.15
# Of the free disk, what the cache of a source's files takes (vlmpipe.trainer.data.sources.file_patterns), and the files
# that are read record by record, without it.
SOURCE_CACHE = 0.4
STREAMED = (".json", ".jsonl")
SMALLEST_CHUNK = 0.5  # times data.chunk_samples: a source that is not larger is one chunk


@dataclass(frozen=True)
class Need:
    """`why` names the largest part."""

    disk_bytes: int | None
    memory_bytes: int
    work_s: float | None
    why: str = ""


@dataclass(frozen=True)
class StepNeeds:
    """Needs of a run's steps.

    Args:
        shape: the model; None where it is not known.
        samples: of all splits; None where that is not known.
        job_hours: of each job that a step watches. 0: it does not run. None: not known.
        is_later_stage: it starts from the export of the stage before.
    """

    config: RunConfig
    shape: ModelShape | None
    samples: int | None
    job_hours: dict[Job, float | None]
    is_later_stage: bool = False

    def of(self, step: str) -> Need:
        """Disk, memory and time of a step of the pipeline's own."""
        facts = load_steps()
        work = facts.steps[step]
        base = Need(SMALL_BYTES, int(work.memory_gb * GB), work.work_s)
        if step in ("choose-replay", "plan-data", "prepare-data", "prepare-chunks"):
            return self._preparation(step, base, facts)
        if step == "sync-checkpoint":
            return self._export(base, facts)
        if step == "register-model":
            return self._registration(base, facts)
        if step == "deploy-model":
            return Need(base.disk_bytes, base.memory_bytes, work.work_s + facts.rates["deploy_s"])
        return base

    def of_job(self, job: Job) -> tuple[int | None, str]:
        """Bytes on the boot disk of each machine of a job, beside a cache that takes all free space; what they are."""
        shape, config = self.shape, self.config
        if shape is None or config.train.trainer:
            return None, ""
        weights = self.weights_bytes(job)
        if job == "cache_features":
            return weights, "published weights"
        if job == "train":
            checkpoints = node_bytes(
                shape.trainable_parameters,
                config.train,
                nodes=config.cluster.replica_count,
                in_bucket=True,
            )
            cache, why = self._min_cache(shape), "published weights, a checkpoint that is saved or resumed"
            return weights + checkpoints + cache, f"{why} and the smallest cache of shards"
        halves = "bf16" in (config.train.precision, export_dtype(config.model, config.train, config.checkpoint))
        start = shape.total_parameters * (PUBLISHED_BYTES if halves else FP32_BYTES)
        if job == "replay":
            return weights + start, "published weights and the start model's files"
        if job == "audit":
            return weights + self._export_size(shape).disk_bytes, "a checkpoint's export, and one file of it"
        is_quantized = job == "evaluate" and config.evaluate.quantize
        quantized = self._export_size(shape).written_bytes if is_quantized else 0  # at most
        if job == "evaluate" and asks_start(config, is_later_stage=self.is_later_stage):
            # Published weights are on the disk, too, where no adapter needs them anyway, or the stage before's export.
            read = start if self.is_later_stage else published_bytes(config.model, shape)
            read = 0 if config.model.exports_adapter and not self.is_later_stage else read
            why = "the export and the start weights, as published and as files of an export,"
            return weights + read + max(start, quantized), why  # one of them after the other
        return weights + quantized, "the export and a quantized copy" if quantized else "the export"

    def weights_bytes(self, job: Job) -> int:
        """Bytes of weights that each machine of a job reads before it begins: published ones, or those of the export.
        0 where they are not known."""
        shape, config = self.shape, self.config
        if shape is None or config.train.trainer:
            return 0
        published = published_bytes(config.model, shape)
        if job in ("train", "replay"):
            return published
        if job == "cache_features":
            return published if config.model.pretrained else min(published, shape.parameters["tower"] * PUBLISHED_BYTES)
        return self._export_size(shape).written_bytes + (published if config.model.exports_adapter else 0)

    def _export_size(self, shape: ModelShape) -> ExportSize:
        config = self.config
        return export_size(shape, config.model, export_dtype(config.model, config.train, config.checkpoint))

    def _min_cache(self, shape: ModelShape) -> int:
        """Disk of the smallest cache of shards that training starts with: data.shard_cache_gib, or room for the largest
        shard of each kind (`vlmpipe.trainer.data.shards.disk_cache`)."""
        data = self.config.data
        if data.shard_cache_gib:
            return int(data.shard_cache_gib * GIB)
        images_bytes = self.config.plan.sample_images * load_steps().rates["image_bytes"]
        shards = data.shard_samples * (images_bytes + RECORD_BYTES)
        if self.job_hours.get("cache_features") != 0.0 and not shape.trains_tower:
            shards += self.config.features.shard_images * feature_bytes(shape)
        return int(shards / SHARE_OF_FREE_DISK)

    def _preparation(self, step: str, base: Need, facts: StepFacts) -> Need:
        data, samples = self.config.data, self.samples
        cpus = load_catalog().machines[facts.machine_of(step)].vcpus
        memory = base.memory_bytes + cpus * data.max_image_bytes
        if samples is None or base.work_s is None:
            return Need(None, memory, None, "the amount of data is not known")
        images_bytes = samples * self.config.plan.sample_images * facts.rates["image_bytes"]
        tables = SMALL_BYTES + samples * RECORD_BYTES
        read_s = images_bytes / (facts.rates["bucket_gb_per_s"] * GB)
        prepare_s = samples / (cpus * facts.rates["prepared_samples_per_cpu_s"])
        if step in ("choose-replay", "plan-data"):
            return Need(tables, memory, base.work_s + read_s, "tables of all records")
        at_once = self._under_way(samples, cpus) / samples * images_bytes
        why = "images of the chunks that are prepared at once"
        held = int(self._with_source_cache(at_once + tables, images_bytes))
        if held > at_once + tables:
            why += " and the cache of the source's files"
        if step == "prepare-chunks":
            return Need(held, memory, base.work_s + (read_s + prepare_s) / data.tasks, why)
        if data.tasks > 1:
            return Need(tables, memory, base.work_s, "tables of all records")
        return Need(held, memory, base.work_s + 2 * read_s + prepare_s, why)

    def _with_source_cache(self, held: float, images_bytes: float) -> float:
        """Add the cache of tars and Parquet files in a bucket, whose size follows the free space at its opening."""
        data = self.config.data
        uris = [source.uri for source in data.all_sources if source.uri]
        if not any(in_bucket(uri) and not uri.endswith(STREAMED) for uri in uris):
            return held
        if data.shard_cache_gib:
            return held + min(images_bytes, data.shard_cache_gib * 2**30 / 2)
        return min(held + images_bytes, held / (1 - SOURCE_CACHE))

    def _under_way(self, samples: int, cpus: int) -> float:
        """Samples in the chunks that one machine prepares at the same time."""
        data = self.config.data
        if samples <= SMALLEST_CHUNK * data.chunk_samples and len(data.sources) <= 1:
            return samples
        chunks = math.ceil(samples / data.chunk_samples / data.tasks)
        workers = min(data.workers or max(1, min(cpus, chunks // 2)), chunks)
        return min(samples, workers * CHUNK_UNDER_WAY * data.chunk_samples)

    def _export(self, base: Need, facts: StepFacts) -> Need:
        if self.shape is None or base.work_s is None:
            return Need(None, base.memory_bytes, None, "the model's sizes are not known")
        rate, trainer = facts.rates["bucket_gb_per_s"] * GB, self.config.train.trainer
        if trainer:
            whole = self.shape.total_parameters
            disk = whole * FP32_BYTES + (
                whole * (FP32_BYTES + PUBLISHED_BYTES) if trainer.result == "hf-adapter" else 0
            )
            why = f"the result of {trainer.name} as a whole"
            return Need(disk, base.memory_bytes + whole * FP32_BYTES, base.work_s + 2 * disk / rate, why)
        size = self._export_size(self.shape)
        work_s = base.work_s + (size.read_bytes + size.base_bytes + size.written_bytes) / rate
        return Need(size.disk_bytes, size.memory_bytes, work_s, "one exported file")

    def _registration(self, base: Need, facts: StepFacts) -> Need:
        if self.config.register_.hub is None or base.work_s is None:
            return base
        if self.shape is None:
            return Need(None, base.memory_bytes, None, "the model's sizes are not known")
        written = self._export_size(self.shape).written_bytes
        work_s = base.work_s + 2 * written / (facts.rates["bucket_gb_per_s"] * GB)
        return Need(SMALL_BYTES + written, base.memory_bytes, work_s, "the whole model, to upload it to the hub")


def all_samples(training: int | None, validation_fraction: float) -> int | None:
    """Samples of all splits, estimated from the training split."""
    return None if training is None or validation_fraction == 1 else round(training / (1 - validation_fraction))
