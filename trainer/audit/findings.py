"""What an audit found: `audit.json`, and the list of exclusions that `data.exclude` takes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from vlmpipe.trainer.data.exclusions.exclusion_file import exclusion_lines
from vlmpipe.trainer.records.record import Part, Record

EXCLUSIONS = "exclusions.jsonl"
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
    STEP: ClassVar[str] = "data-audit"

    prepared_uri: str
    run_id: str = ""
    samples: int = 0
    images: int = Field(0, description="Distinct images.")
    vectors: str = Field("", description="What images were compared by.")
    checkpoint_steps: tuple[int, ...] = Field((), description="Steps whose losses were compared.")
    findings: tuple[Finding, ...] = ()
    excluded: int = Field(0, description="Distinct samples in the list of exclusions.")
    notes: tuple[str, ...] = ()

    def finding(self, kind: Kind) -> Finding:
        """The finding of a kind."""
        return next(finding for finding in self.findings if finding.kind == kind)


def collected(
    kind: Kind, flagged: list[Flagged], *, checked: int, advice: str, obstacle: str = "", samples: int | None = None
) -> Finding:
    """The finding of all flagged samples, strongest first. samples: how many there are, where not all are listed."""
    ordered = sorted(flagged, key=lambda one: (-one.score, one.group, one.id))
    splits: dict[int, set[str]] = {}
    for one in ordered:
        if one.group:
            splits.setdefault(one.group, set()).add(one.split)
    return Finding(
        kind=kind,
        samples=len({one.id for one in ordered}) if samples is None else samples,
        groups=len(splits),
        across_splits=sum(len(of_group) > 1 for of_group in splits.values()),
        excluded=len({one.id for one in ordered if one.is_excluded}),
        checked=checked,
        obstacle=obstacle,
        advice=advice,
        flagged=tuple(ordered),
    )


def exclusions_of(audit: Audit) -> list[Flagged]:
    """The samples to exclude, each once, by their ids."""
    found: dict[str, Flagged] = {}
    for finding in audit.findings:
        for one in finding.flagged:
            if one.is_excluded:
                found.setdefault(one.id, one)
    return [found[identity] for identity in sorted(found)]


def exclusion_file(audit: Audit) -> bytes:
    """The list as JSON Lines of ids with the reason."""
    return exclusion_lines((one.id, one.kind, one.detail) for one in exclusions_of(audit))
