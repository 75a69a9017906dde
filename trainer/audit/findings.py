"""Findings of an audit: `audit.json`, and the list of exclusions that `data.exclude` takes."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Literal

from pydantic import Field

from vlmpipe.trainer.data.exclusions.exclusion_file import exclusion_lines
from vlmpipe.trainer.data.sample import PART_MARK
from vlmpipe.trainer.records.record import Part, Record

EXCLUSIONS = "exclusions.jsonl"
FOLDER = "audit"  # of a run, with the files of its job audit
Kind = Literal[
    "near_duplicate", "shared_image", "blank_image", "suspected_label", "contradiction", "text_alone", "outlier"
]
# What stands in the list of exclusions; the others are for people to look at.
EXCLUDED: tuple[Kind, ...] = ("near_duplicate", "blank_image", "suspected_label", "contradiction")


class Flagged(Part):
    """A sample with a finding. group: samples with one number belong together; 0: by itself."""

    id: str
    split: str
    kind: Kind
    detail: str = Field(description="Why, for people.")
    group: int = 0
    score: float = Field(0.0, description="How strong the finding is; larger is stronger, by kind.")
    question: str = ""
    answer: str = ""
    record: str = Field("", description="Id that the list names: the record's, of a part of its conversation.")
    is_excluded: bool = Field(False, description="Whether the list of exclusions has it for this finding.")


class Finding(Part):
    """The samples of one kind. obstacle: why this was not looked for, or only in part; else empty."""

    kind: Kind
    samples: int = 0
    groups: int = 0
    across_splits: int = Field(0, description="Groups with samples of both splits.")
    excluded: int = 0
    checked: int = Field(0, description="Samples, answers or images that were looked at.")
    obstacle: str = ""
    advice: str = ""
    flagged: tuple[Flagged, ...] = Field((), description="The findings, strongest first.")


class Audit(Record):
    """Findings about prepared data, and about a run's checkpoints where there is a run."""

    FILE: ClassVar[str] = "audit.json"
    STEP: ClassVar[str] = "audit"

    prepared_uri: str
    run_id: str = ""
    samples: int = 0
    images: int = Field(0, description="Distinct images.")
    vectors: str = Field("", description="What images were compared by.")
    checkpoint_steps: tuple[int, ...] = Field((), description="Steps whose losses were compared.")
    findings: tuple[Finding, ...] = ()
    excluded: int = Field(0, description="Distinct records in the list of exclusions.")
    notes: tuple[str, ...] = ()
    version: str = Field("", description="The vlmpipe that made it.")
    max_samples: int = Field(0, description="Samples whose losses were computed; 0 for all.")
    checkpoints: tuple[str, ...] = Field((), description="Names of the checkpoints whose losses were compared.")

    @property
    def made_of(self) -> tuple[str, str, int, tuple[str, ...]]:
        """Version, data and settings that decide the findings."""
        return self.version, self.prepared_uri, self.max_samples, self.checkpoints

    def finding(self, kind: Kind) -> Finding:
        """The finding of a kind."""
        return next(finding for finding in self.findings if finding.kind == kind)


def collected(
    kind: Kind, flagged: list[Flagged], *, checked: int, advice: str, obstacle: str = "", samples: int | None = None
) -> Finding:
    """The finding of all flagged samples, strongest first. samples: how many there are, where not all are listed."""
    ordered = sorted(flagged, key=lambda flag: (-flag.score, flag.group, flag.id))
    splits: dict[int, set[str]] = {}
    for flag in ordered:
        if flag.group:
            splits.setdefault(flag.group, set()).add(flag.split)
    return Finding(
        kind=kind,
        samples=len({flag.id for flag in ordered}) if samples is None else samples,
        groups=len(splits),
        across_splits=sum(len(of_group) > 1 for of_group in splits.values()),
        excluded=len({flag.id for flag in ordered if flag.is_excluded}),
        checked=checked,
        obstacle=obstacle,
        advice=advice,
        flagged=tuple(ordered),
    )


def by_records(finding: Finding, ids: Container[str]) -> Finding:
    """The finding whose parts of conversations (`data.overlong_policy: split`) name the record that they are of.

    ids: of all samples. `data.exclude` knows ids of records alone.
    """
    return finding.model_copy(update={"flagged": tuple(_by_record(flag, ids) for flag in finding.flagged)})


def _by_record(flag: Flagged, ids: Container[str]) -> Flagged:
    record, mark, turn = flag.id.rpartition(PART_MARK)
    if not mark or not turn.isdecimal() or record not in ids:
        return flag
    detail = f"{flag.detail}; a part of {record}" + (", all of which is excluded" if flag.is_excluded else "")
    return flag.model_copy(update={"record": record, "detail": detail})


def exclusions_of(audit: Audit) -> list[Flagged]:
    """The samples to exclude, each record once, by their ids."""
    by_record: dict[str, Flagged] = {}
    for finding in audit.findings:
        for flag in finding.flagged:
            if flag.is_excluded:
                by_record.setdefault(flag.record or flag.id, flag)
    return [by_record[identity] for identity in sorted(by_record)]


def exclusion_file(audit: Audit) -> bytes:
    """The list as JSON Lines of ids with the reason."""
    return exclusion_lines((flag.record or flag.id, flag.kind, flag.detail) for flag in exclusions_of(audit))
