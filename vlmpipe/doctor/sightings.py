"""Evidence in the doctor's answers about the assumptions on Google's services (catalog/unproved.yaml)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vlmpipe.catalog.unproved import Sighting, note_sightings
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.outage import answering_soon

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig
    from vlmpipe.doctor.rows import Row


def sightings_of(rows: Sequence[Row]) -> list[Sighting]:
    """A sighting for each assumption that a row bears on. One that contradicts it outranks all others."""
    result: dict[str, list[tuple[bool, str]]] = {}
    for line in rows:
        for name, holds in line.shows:
            result.setdefault(name, []).append((holds, f"{line.subject}: {line.text}"))
    return [Sighting(name, *_decided(seen), tool="doctor") for name, seen in result.items()]


def _decided(seen: list[tuple[bool, str]]) -> tuple[bool, str]:
    against = [text for holds, text in seen if not holds]
    of_result = against or [text for _, text in seen]
    more = f" (and {len(of_result) - 1} rows more)" if len(of_result) > 1 else ""
    return not against, of_result[0] + more


def note_rows(config: RunConfig, rows: Sequence[Row]) -> list[str]:
    """Record what the rows show in the folder of all runs, if that is a bucket of Google's.

    Returns a line for each that is new, or one that says why nothing was recorded. No request takes longer than those
    of the doctor.
    """
    root_uri, seen = config.bucket_root_uri, sightings_of(rows)
    if not seen or not root_uri.startswith("gs://"):
        return []
    try:
        with answering_soon():
            new = note_sightings(GcsStorage(root_uri), seen)
    except UserError as error:
        return [f"note: what the answers show was not recorded: {error.found.splitlines()[0]}"]
    return [
        f"note: {sighting.id} {'holds' if sighting.holds else 'is contradicted'}: {sighting.said} "
        "(vlmpipe docs unproved)"
        for sighting in new
    ]
