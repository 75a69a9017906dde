"""Final ids of samples: unsafe ones are rejected, repeated ones get a suffix."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from vlmpipe.trainer.data.prepare.validation.deduplicate import NEW, OTHER, SAME, Met, SeenIds
from vlmpipe.trainer.data.rejects import Reject, RejectCode, Repair
from vlmpipe.trainer.data.sample import Sample, Split
from vlmpipe.trainer.printable import unsafe_characters

LONGEST_ID_CHARS = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample with its final id and split."""

    sample: Sample
    repairs: tuple[Repair, ...]
    split: Split


def with_met_ids(source: Iterable[Sample | Reject]) -> Iterator[tuple[Sample | Reject, Met]]:
    """The records of a source, each with whether its id was met before."""
    seen = SeenIds()
    for sample in source:
        met: Met = NEW
        if isinstance(sample, Sample) and not _unsafe(sample.id):
            met = seen.add(sample.id, sample.content_digest())
        yield sample, met


def final_entry(
    sample: Sample | Reject, met: Met, split: Split, excluded: Collection[str] = frozenset()
) -> Entry | Reject:
    """The sample with its final id, or a reject for one whose final id is excluded (`data.exclude`)."""
    entry = _with_final_id(sample, met, split)
    if excluded and isinstance(entry, Entry) and entry.sample.id in excluded:
        # Without its image: what is left out must not be read.
        return Reject(entry.sample.where, entry.sample.id, RejectCode.SAMPLE_EXCLUDED, "data.exclude names its id")
    return entry


def _with_final_id(sample: Sample | Reject, met: Met, split: Split) -> Entry | Reject:
    """Reject a sample that repeats an id of its own; add a suffix to a used id with other content, because LLaVA's sets
    repeat ids, and to that of a repeated record without one, which `data.duplicates` keeps or drops.
    """
    if isinstance(sample, Reject):
        return sample
    if problem := _unsafe(sample.id):
        return reject_of(sample, RejectCode.ID_UNSAFE, problem)
    if met.startswith(SAME) and sample.id_is_hash:
        return Entry(replace(sample, id=f"{sample.id}~{int(met.removeprefix(SAME)) + 1}"), (), split)
    if met.startswith(SAME):
        return reject_of(sample, RejectCode.ID_DUPLICATE, "the same id with the same content came before")
    if met == OTHER:
        renamed = replace(sample, id=f"{sample.id}~{sample.content_digest()[:12]}")
        return Entry(renamed, (Repair.ID_SUFFIXED,), split)
    return Entry(sample, (), split)


def reject_of(sample: Sample, code: RejectCode, message: str) -> Reject:
    return Reject(sample.where, sample.id, code, message, sample.images[0] if sample.images else None)


def _unsafe(identity: str) -> str:
    """Why an id is rejected, or "". Readers of shards may make paths of ids."""
    if not identity or len(identity) > LONGEST_ID_CHARS:
        return f"an id of {len(identity)} characters, not 1 to {LONGEST_ID_CHARS}"
    if unsafe := unsafe_characters(identity):
        return f"an id with control characters or marks of direction: {unsafe}"
    if identity.startswith("/") or ".." in identity.split("/"):
        return "an id that as a path would leave its folder"
    return ""
