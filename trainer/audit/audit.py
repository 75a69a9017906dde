"""Audits prepared data, and of a run the losses of its samples under two of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue, read_catalogue
from vlmpipe.trainer.audit.checkpoints import MIN_GAP, LossModel, checkpoints_of, early_and_late, opened_model
from vlmpipe.trainer.audit.contradictions import contradictions
from vlmpipe.trainer.audit.findings import Audit, Finding, Kind, by_records, exclusions_of
from vlmpipe.trainer.audit.image_groups import image_groups
from vlmpipe.trainer.audit.image_vectors import image_vectors
from vlmpipe.trainer.audit.label_suspects import CheckedAnswers, suspected_labels
from vlmpipe.trainer.audit.losses import AnswerLosses, answer_losses
from vlmpipe.trainer.audit.outliers import outliers
from vlmpipe.trainer.audit.repeated_images import blank_images, near_duplicates, shared_images
from vlmpipe.trainer.audit.text_alone import predicted_by_text
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.feature_cache.reader import FeatureReader, FeatureShards
from vlmpipe.trainer.feature_cache.store import features_uri

NEEDS_RUN = "needs the checkpoints of a run: name a run in place of the run file"
IN_PAIRS = "a run that trains on pairs has no loss of a single answer"

Told = Callable[[str, int, int], None]  # what is done, how much of it, and all


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
    """All findings. Raises DataError for damaged data, and what checkpoints raise that cannot be read."""
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
    ]
    losses = _losses(request, catalogue, told)
    if isinstance(losses, str):
        findings += [_without(kind, losses) for kind in ("suspected_label", "text_alone")]
    else:
        findings.append(suspected_labels(catalogue, vectors, losses.seen, losses.obstacle))
        findings.append(predicted_by_text(catalogue, losses.blank, losses.left_out))
    if job.data.overlong_policy == "split":
        ids = frozenset(identity for split in catalogue.splits for identity in split.ids)
        findings = [by_records(finding, ids) for finding in findings]
    result = Audit(
        prepared_uri=request.prepared_uri,
        run_id=job.run.run_id if request.has_run else "",
        samples=len(catalogue),
        images=len(catalogue.images),
        vectors=vectors.described(),
        checkpoint_steps=() if isinstance(losses, str) else losses.seen.steps,
        findings=tuple(findings),
        notes=() if isinstance(losses, str) else losses.notes,
    )
    return result.model_copy(update={"excluded": len(exclusions_of(result))}), catalogue


@dataclass(frozen=True)
class _Losses:
    seen: CheckedAnswers
    blank: CheckedAnswers
    obstacle: str
    left_out: str
    notes: tuple[str, ...]


def _losses(request: AuditRequest, catalogue: Catalogue, told: Told) -> _Losses | str:
    """Losses of the answers, or why there are none."""
    job = request.job
    if not request.has_run:
        return NEEDS_RUN
    if job.train.in_pairs:
        return IN_PAIRS
    stored, faults = checkpoints_of(job)
    if not stored:
        return "the run has no whole checkpoint"
    compared = early_and_late(stored)
    chosen, left_out = _chosen(len(catalogue), request.max_samples)
    seen: list[CheckedAnswers] = []
    blank: list[CheckedAnswers] = []
    for checkpoint in compared:
        with opened_model(job, checkpoint) as model:
            under = _Under(job, catalogue, chosen, model, checkpoint.step, told)
            seen.append(under.losses(f"losses at step {checkpoint.step:,}"))
            if checkpoint is compared[-1]:
                blank.append(under.losses("losses without images", is_blank=True))
    obstacle = left_out
    if len(compared) < 2:
        why = f"no checkpoint of at most {1 - MIN_GAP:.0%} of its steps is kept (train.keep_checkpoints)"
        obstacle = "; ".join(filter(None, [f"judged by step {compared[-1].step:,} alone: {why}", left_out]))
    return _Losses(_together(seen), _together(blank), obstacle, left_out, tuple(faults))


@dataclass(frozen=True)
class _Under:
    """The chosen samples of all splits under one checkpoint."""

    job: JobConfig
    catalogue: Catalogue
    chosen: list[int]
    model: LossModel
    step: int
    told: Told

    def losses(self, message: str, *, is_blank: bool = False) -> CheckedAnswers:
        parts: list[tuple[int, AnswerLosses]] = []
        done = 0
        for split, start in zip(self.catalogue.splits, self.catalogue.starts, strict=False):
            of_split = [sample - start for sample in self.chosen if start <= sample < start + len(split)]
            told = partial(self._tell, message, done)
            findings = answer_losses(self.job, split, self.model, of_split, is_blank=is_blank, progressed=told)
            parts.append((start, findings))
            done += len(of_split)
        return _checked(self.catalogue, parts, self.step)

    def _tell(self, message: str, before: int, done: int) -> None:
        self.told(message, before + done, len(self.chosen))


def _checked(catalogue: Catalogue, parts: list[tuple[int, AnswerLosses]], step: int) -> CheckedAnswers:
    """Losses by the catalogue's rows. The k-th answer of a sample is its k-th turn there."""
    samples = np.concatenate([losses.samples + start for start, losses in parts])
    answers = np.concatenate([losses.answers for _, losses in parts])
    nats = np.concatenate([losses.nats for _, losses in parts])
    missed = np.concatenate([losses.missed for _, losses in parts])
    first = np.searchsorted(catalogue.turns["sample"], samples)
    after = np.searchsorted(catalogue.turns["sample"], samples, side="right")
    rows = first + answers
    is_there = rows < after
    order = np.argsort(rows[is_there], kind="stable")

    def of(values: NDArray[np.generic]) -> NDArray[np.generic]:
        return values[is_there][order]

    return CheckedAnswers(
        of(rows).astype(np.int64), of(nats)[None].astype(np.float32), of(missed)[None].astype(np.int32), (step,)
    )


def _together(parts: list[CheckedAnswers]) -> CheckedAnswers:
    """Join the losses of one list of answers under all checkpoints."""
    nats, missed = (np.concatenate([getattr(part, name) for part in parts]) for name in ("nats", "missed"))
    return CheckedAnswers(parts[0].rows, nats, missed, tuple(step for part in parts for step in part.steps))


def _chosen(samples: int, most: int) -> tuple[list[int], str]:
    """Samples whose losses are computed, and what is left out."""
    count = min(samples, most or samples)
    chosen = [number * samples // count for number in range(count)] if count else []
    left_out = f"losses of {count:,} of {samples:,} samples (--max-samples)" if count < samples else ""
    return chosen, left_out


def _features(job: JobConfig, catalogue: Catalogue) -> FeatureReader | None:
    """The cached features of the data's tower, if all images have some."""
    if job.features.cache == "off":
        return None
    uri = features_uri(job.run.features_root, job.model, job.train.precision)
    shards = FeatureShards(uri)
    if not shards.names or len(shards.missing(catalogue.images)):
        return None
    return FeatureReader.open(uri, job.data.shard_cache_gib)


def _without(kind: Kind, obstacle: str) -> Finding:
    return Finding(kind=kind, obstacle=obstacle)
