"""Rule for runs that share the prefix of images among samples (`data.share_prefix`), by their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vlmpipe.trainer.config.job import JobConfig, JobSections
from vlmpipe.trainer.config.sources.data_fields import AUTO_QUESTIONS
from vlmpipe.trainer.hooks.rules import obstacles_to

# What computing samples separately costs, for where no prepared data tells: of
# benchmarks/results/2026-11-29-cpu-shared-prefix.md and 2026-11-30-cpu-shared-pairs.md.
MEASURED = "10 questions about an image then take 1.6 times as long with 16 image tokens, 7.9 with 576, as measured"
PAIRS_MEASURED = "pairs with 256 image tokens and answers of 30 words then take 1.6 times as long, as measured"


@dataclass(frozen=True)
class Obstacle:
    """A setting with which samples cannot share a prefix."""

    found: str
    expected: str


def obstacles(job: JobSections) -> Iterator[Obstacle]:
    """The settings with which samples cannot share a prefix."""
    data, model, train = job.data, job.model, job.train
    if not data.pack:
        yield Obstacle("data.pack false, which gives each sample its own sequence", "pack true")
    for reason in (*obstacles_to("shared_prefix", model), *obstacles_to("shared_prefix", train)):
        yield Obstacle(reason, "one of the two")
    if model.lora and model.lora.dropout:
        yield Obstacle("model.lora.dropout, which would be drawn once for all samples of a prefix", "dropout 0")
    if train.trainer:
        yield Obstacle("train.trainer, whose program packs by itself", "share_prefix off")


def stores_prefixes(job: JobSections) -> bool:
    """Return whether prepared data says which tokens samples may share: with auto, whatever the model can."""
    sharing = job.data.share_prefix
    return sharing == "on" or (sharing == "auto" and next(obstacles(job), None) is None)


def resolved_sharing(job: JobConfig, why_not: Callable[[], str]) -> tuple[JobConfig, str]:
    """The job with on or off in place of auto, and why auto is off; "" where it is on or was not asked for.

    why_not: of a model that cannot share, the reason, else ""; called where the settings allow sharing.
    """
    if job.data.share_prefix != "auto":
        return job, ""
    obstacle = next(obstacles(job), None)
    reason = obstacle.found if obstacle else why_not()
    most = job.data.max_questions_per_image or AUTO_QUESTIONS
    update = {"share_prefix": "off"} if reason else {"share_prefix": "on", "max_questions_per_image": most}
    return job.model_copy(update={"data": job.data.model_copy(update=update)}), reason
