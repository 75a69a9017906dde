"""The page of an audit: each finding with its samples and their images, as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from markupsafe import Markup

from vlmpipe.audit.screen import NAMES, decision, table
from vlmpipe.report.pages import STYLE, page_template
from vlmpipe.report.samples import EmbeddedImage, thumbnail
from vlmpipe.trainer import __version__
from vlmpipe.trainer.audit.catalogue import PreparedSamples
from vlmpipe.trainer.audit.findings import Audit, Finding, Flagged
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.printable import printable

SHOWN_GROUPS, SHOWN_MEMBERS = 40, 4  # of a finding, and of a group
PIXELS = 160


@dataclass(frozen=True)
class Card:
    """A sample with its first image."""

    sample: Flagged
    image: EmbeddedImage


@dataclass(frozen=True)
class Section:
    """A finding: its groups of cards, and how many samples are not shown."""

    name: str
    finding: Finding
    groups: tuple[tuple[Card, ...], ...]
    left_out: int


def build_page(name: str, audit: Audit, stored: PreparedSamples) -> str:
    """The page's HTML."""
    sections = [_section(finding, stored) for finding in audit.findings if finding.flagged]
    return page_template("vlmpipe.audit.page", "page.html.j2").render(
        style=Markup(STYLE),
        name=printable(name),
        audit=audit,
        decision=decision(audit),
        rows=list(table(audit)),
        sections=sections,
        obstacles=[
            (NAMES[finding.kind][0], printable(finding.obstacle)) for finding in audit.findings if finding.obstacle
        ],
        notes=list(map(printable, audit.notes)),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def _section(finding: Finding, stored: PreparedSamples) -> Section:
    groups = []
    for members in _groups(finding.flagged)[:SHOWN_GROUPS]:
        groups.append(tuple(Card(_printable(flag), _image(stored, flag)) for flag in members[:SHOWN_MEMBERS]))
    return Section(NAMES[finding.kind][0], finding, tuple(groups), finding.samples - sum(map(len, groups)))


def _printable(flag: Flagged) -> Flagged:
    """The sample with no control character and no mark of direction in its texts, which the template escapes."""
    texts = {name: printable(getattr(flag, name)) for name in ("id", "detail", "question", "answer")}
    return flag.model_copy(update=texts)


def _groups(flagged: Sequence[Flagged]) -> list[list[Flagged]]:
    """The samples by group, those without one by themselves, in the order of the first of each."""
    alone = [[flag] for flag in flagged if not flag.group]
    ordered = sorted((flag for flag in flagged if flag.group), key=lambda flag: flag.group)
    together = [list(members) for _, members in groupby(ordered, key=lambda flag: flag.group)]
    return sorted(alone + together, key=lambda members: -max(flag.score for flag in members))


def _image(stored: PreparedSamples, sample: Flagged) -> EmbeddedImage:
    """The first image of a sample, or why there is none."""
    split = next(split for split in stored.splits if split.name == sample.split)
    number = split.number(sample.id)
    if number is None:
        return EmbeddedImage(problem="This sample is not in the prepared data any more.")
    try:
        images = stored.shards.images(split.sample_location(number))
    except UserError as error:
        return EmbeddedImage(problem=f"The image cannot be read: {error.found}.")
    return thumbnail(images[0], PIXELS) if images else EmbeddedImage(problem="no image")
