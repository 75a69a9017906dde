"""The workload that a plan takes: that of prepared data under the local root, else the run file's plan section."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.model_architecture import Architecture, sharing_obstacle
from vlmpipe.planner.sequence_fill import fill_by_length
from vlmpipe.planner.step_questions import UNKNOWN, step_questions
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.config.sources.data_source import function_named
from vlmpipe.trainer.data.prefixes.separate_cost import cost_text, separate_cost
from vlmpipe.trainer.data.prefixes.sharing import resolved_sharing
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.hub.client import without_hub

if TYPE_CHECKING:
    from vlmpipe.trainer.data.shards.index import SplitIndex


def planned_workload(config: RunConfig, model: Architecture, paths: RunPaths) -> tuple[Workload, str]:
    """The workload from prepared data under the local root, else from the run file's plan section; and a note."""
    if prepared := _prepared(config, model, paths):
        return prepared
    note = "The amount of data is not known before it is prepared; give plan.samples and plan.sample_tokens."
    return Workload.assumed(config, model.shape), "" if config.plan.samples else note


def _prepared(config: RunConfig, model: Architecture, paths: RunPaths) -> tuple[Workload, str] | None:
    """The workload, and how often an epoch reads each of several sources. Raises DataError for one that it reads too
    often.
    """
    sources = [source.uri for source in config.data.all_sources if source.uri]
    # A plan calls no function of a user's: its records may take long, or be of another machine.
    if any("://" in uri for uri in (paths.root_uri, *sources)) or any(map(function_named, sources)):
        return None
    job = JobConfig.model_validate(config.to_run_json(paths))
    with without_hub():  # what has been prepared here was prepared with files that are here
        return _prepared_here(config, model, job, paths)


def _prepared_here(
    config: RunConfig, model: Architecture, job: JobConfig, paths: RunPaths
) -> tuple[Workload, str] | None:
    from vlmpipe.planner.jobs.shared_prompts import questions_per_image
    from vlmpipe.trainer.data.prepare.chunks.merge import STATS
    from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
    from vlmpipe.trainer.data.prepare.pipeline import mixture_note
    from vlmpipe.trainer.data.sampler import PackedBatchSampler
    from vlmpipe.trainer.data.shards.index import Index
    from vlmpipe.trainer.data.shards.prepared_files import DONE, OtherFormatError

    try:
        uri = join_uri(paths.prepared_root, fingerprint(job))
        if open_storage(uri).stat(DONE) is None:
            return None
        index = Index.load(uri)
        split, validation = index.split("train"), index.split("eval")
        stats = json.loads(open_storage(uri).read(STATS))
    except OtherFormatError:  # which the run would refuse too
        raise
    except UserError:  # a source that is not there, or damage, after which the next run prepares the data again
        return None
    passes = mixture_note(stats, job.data)
    obstacle = sharing_obstacle(model.model)
    job, why_not = resolved_sharing(job, lambda: obstacle)
    shares = job.data.share_prefix == "on"
    sampler = PackedBatchSampler.of_training(split, job)
    sampler.require_batch()
    epoch = sampler.totals(0)
    workload = Workload.from_index(
        config,
        samples=epoch.samples,
        tokens=epoch.tokens,
        pairs=epoch.squared_tokens,
        images=epoch.shown,
        image_tokens=epoch.image_tokens,
        label_tokens=epoch.label_tokens,
        sequences=epoch.sequences,
        steps=sampler.num_steps(job.train.epochs, max_steps=job.train.max_steps),
        fills=() if job.data.sources or shares else fill_by_length(config, split),
        step_questions=step_questions(config, job, split, epoch),
        whole_sample=_whole_sample(split, job) if shares else None,
    )
    together = 1.0 if obstacle else questions_per_image(validation, config.model)
    cost = separate_cost(split, in_pairs=job.train.in_pairs) if why_not else None
    workload = dataclasses.replace(workload, replayed=_replayed(job), asked_together=together, separate_cost=cost)
    return workload, f"Prepared data, {passes}." if passes else ""


def _whole_sample(split: SplitIndex, job: JobConfig) -> tuple[float, float]:
    """Tokens and images of a mean sample by itself; of a pair by itself, those of both conversations."""
    return float(split.tokens.mean()), float(split.image_count.mean()) * (1 + job.train.in_pairs)


def _replayed(job: JobConfig) -> int | None:
    """Answers of the start model that the run finds; None where its weights, data or settings have none yet."""
    if not job.data.replay:
        return None
    from vlmpipe.trainer.evaluation.replay.questions import answers_there  # it imports torch

    try:
        answers = answers_there(job)
    except UserError:  # weights or questions that are not there, which the run itself reports
        return None
    return answers.answered if answers else None


def questions_note(config: RunConfig, model: Architecture, load: Workload) -> str:
    """How many questions a step holds, of a run file with `data.share_prefix` on or auto."""
    job = JobConfig.model_validate(config.to_run_json(RunPaths(run_id=config.name, root_uri=config.output.root_uri)))
    _, why_not = resolved_sharing(job, lambda: sharing_obstacle(model.model))
    if why_not:
        cost = cost_text(load.separate_cost, in_pairs=job.train.in_pairs)
        return f"data.share_prefix auto computes images for each sample: found {why_not}; {cost}."
    return load.step_questions.text(config.train.global_batch_size) if load.step_questions else UNKNOWN
