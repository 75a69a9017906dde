"""Audits prepared data, and of a run the losses of its samples under two of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer import __version__
from vlmpipe.trainer.audit.catalogue import Catalogue, PreparedSamples, read_catalogue
from vlmpipe.trainer.audit.checkpoints import alone
from vlmpipe.trainer.audit.contradictions import contradictions
from vlmpipe.trainer.audit.findings import Audit, Finding, by_records, exclusions_of
from vlmpipe.trainer.audit.images.image_groups import image_groups
from vlmpipe.trainer.audit.images.image_vectors import ImageVectors, image_vectors
from vlmpipe.trainer.audit.label_suspects import CheckedAnswers, suspected_labels
from vlmpipe.trainer.audit.outliers import outliers
from vlmpipe.trainer.audit.repeated_images import blank_images, near_duplicates, shared_images
from vlmpipe.trainer.audit.sample_losses import NEEDS_RUN, LossPass, RunLosses, Told, sample_losses
from vlmpipe.trainer.audit.text_alone import predicted_by_text
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.feature_cache.reader import FeatureReader, FeatureShards
from vlmpipe.trainer.feature_cache.store import features_uri


@dataclass(frozen=True)
class AuditRequest:
    """prepared_uri: the data. job: settings of the data's run file. has_run: whether job.run has checkpoints.

    max_samples: samples whose losses are computed, evenly spread; 0 for all.
    """

    job: JobConfig
    prepared_uri: str
    has_run: bool
    max_samples: int = 0


def audit(request: AuditRequest, told: Told = lambda *_: None) -> tuple[Audit, Catalogue]:
    """All findings, by one process. Raises DataError for damaged data, and what checkpoints raise that cannot be
    read."""
    return audit_with(request, losses_of(request, told, alone()), told)


def losses_of(request: AuditRequest, told: Told, worker: ProcessContext) -> RunLosses:
    """The losses that an audit needs. Collective."""
    if not request.has_run:
        return RunLosses(missing=NEEDS_RUN)
    splits = PreparedSamples.open(request.prepared_uri).splits
    return sample_losses(request.job, splits, request.max_samples, told, worker)


def audit_with(request: AuditRequest, losses: RunLosses, told: Told = lambda *_: None) -> tuple[Audit, Catalogue]:
    """All findings with these losses."""
    job = request.job
    catalogue = read_catalogue(request.prepared_uri, lambda done, of: told("reading texts", done, of))
    told("comparing images", 0, 1)
    vectors = image_vectors(catalogue, request.prepared_uri, _features(job, catalogue))
    groups = image_groups(catalogue, vectors, lambda done, of: told("looking at images", done, of))
    findings = [
        near_duplicates(catalogue, groups, vectors),
        shared_images(catalogue),
        blank_images(catalogue, vectors),
        contradictions(catalogue, groups.of_image),
        outliers(catalogue, tuple(str(source.name) for source in job.data.sources)),
        *_of_losses(catalogue, vectors, losses),
    ]
    if job.data.overlong_policy == "split" or job.data.turns == "independent":
        ids = frozenset(identity for split in catalogue.splits for identity in split.ids)
        findings = [by_records(finding, ids) for finding in findings]
    result = Audit(
        prepared_uri=request.prepared_uri,
        run_id=job.run.run_id if request.has_run else "",
        samples=len(catalogue),
        images=len(catalogue.images),
        vectors=vectors.described(),
        checkpoint_steps=losses.steps,
        findings=tuple(findings),
        version=__version__,
        max_samples=request.max_samples,
        checkpoints=losses.checkpoints,
    )
    notes = (*losses.notes, *_emptied_splits(catalogue, result))
    return result.model_copy(update={"excluded": len(exclusions_of(result)), "notes": notes}), catalogue


def _emptied_splits(catalogue: Catalogue, audit: Audit) -> Iterator[str]:
    """Say of which split the list of exclusions leaves nothing."""
    listed = {flag.record or flag.id for flag in exclusions_of(audit)}
    for split in catalogue.splits:
        if len(split) and listed.issuperset(split.ids):
            name = "validation" if split.name == "eval" else "training"
            yield f"the list leaves none of {len(split):,} {name} samples, and a run without any is refused"


def _of_losses(catalogue: Catalogue, vectors: ImageVectors, losses: RunLosses) -> list[Finding]:
    """The findings that take losses, or why there are none."""
    if losses.missing:
        obstacle = f"by losses: {losses.missing}"
        return [
            suspected_labels(catalogue, vectors, None, obstacle),
            Finding(kind="text_alone", obstacle=losses.missing),
        ]
    seen = _together([_checked(catalogue, part) for part in losses.passes if not part.is_blank])
    (blank,) = (_checked(catalogue, part) for part in losses.passes if part.is_blank)
    return [
        suspected_labels(catalogue, vectors, seen, losses.obstacle),
        predicted_by_text(catalogue, blank, losses.left_out),
    ]


def _checked(catalogue: Catalogue, part: LossPass) -> CheckedAnswers:
    """Losses by the catalogue's rows. The k-th answer of a sample is its k-th turn there."""
    starts = catalogue.starts
    samples = np.concatenate([losses.samples + start for start, losses in zip(starts, part.splits, strict=False)])
    answers = np.concatenate([losses.answers for losses in part.splits])
    nats = np.concatenate([losses.nats for losses in part.splits])
    missed = np.concatenate([losses.missed for losses in part.splits])
    first = np.searchsorted(catalogue.turns["sample"], samples)
    after = np.searchsorted(catalogue.turns["sample"], samples, side="right")
    rows = first + answers
    is_there = rows < after
    order = np.argsort(rows[is_there], kind="stable")

    def of(values: NDArray[np.generic]) -> NDArray[np.generic]:
        return values[is_there][order]

    return CheckedAnswers(
        of(rows).astype(np.int64), of(nats)[None].astype(np.float32), of(missed)[None].astype(np.int32), (part.step,)
    )


def _together(parts: list[CheckedAnswers]) -> CheckedAnswers:
    """Join the losses of one list of answers under all checkpoints."""
    nats, missed = (np.concatenate([getattr(part, name) for part in parts]) for name in ("nats", "missed"))
    return CheckedAnswers(parts[0].rows, nats, missed, tuple(step for part in parts for step in part.steps))


def _features(job: JobConfig, catalogue: Catalogue) -> FeatureReader | None:
    """The cached features of the data's tower, if all images have some."""
    if job.features.cache == "off":
        return None
    uri = features_uri(job.run.features_root, job.model, job.train.precision)
    shards = FeatureShards(uri)
    if not shards.names or len(shards.missing(catalogue.images)):
        return None
    return FeatureReader.open(uri, job.data.shard_cache_gib)
