"""Assumptions about services and machines (unproved.yaml), and observations of them since.

What was seen lies beside the runs: one JSON file for each assumption in <root>/first_contact/, so that two writers
never lose each other's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from vlmpipe.config.yaml_loader import packaged_yaml
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.records import read_record, write_record

TABLE = "unproved.yaml"
FOLDER = "first_contact"
Tool = Literal["probe", "doctor", "diagnose", "people"]


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Assumption:
    """Assumption of the code that no run has shown. refuted_by: failure patterns that contradict it."""

    id: str
    service: str
    assumption: str
    shown_by: str
    tools: tuple[Tool, ...]
    source: str
    code: str
    refuted_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sighting:
    """Evidence for or against an assumption, seen by a tool. said: the evidence, in one sentence."""

    id: str
    holds: bool
    said: str
    tool: Tool
    run: str = ""
    seen_s: float = field(default_factory=time.time)


@functools.cache
def load_assumptions() -> tuple[Assumption, ...]:
    """All assumptions, in the order of the file."""
    content = packaged_yaml((resources.files("vlmpipe.catalog") / TABLE).read_text(encoding="utf-8"))
    return TypeAdapter(tuple[Assumption, ...]).validate_python(content)


def assumption_of(assumption_id: str) -> Assumption:
    """The assumption of that id. Raises KeyError, because ids stand in code."""
    return {assumption.id: assumption for assumption in load_assumptions()}[assumption_id]


def refuted_by(pattern_id: str) -> list[Assumption]:
    """The assumptions that this failure pattern contradicts."""
    return [assumption for assumption in load_assumptions() if pattern_id in assumption.refuted_by]


def read_sightings(root: Storage) -> dict[str, Sighting]:
    """Evidence so far, by id. A file of an id that this version does not know is left out.

    Args:
        root: the folder of all runs (output.root_uri).
    """
    known = {assumption.id for assumption in load_assumptions()}
    names = [info.name for info in root.list(FOLDER)]
    sightings = [
        Sighting(**read_record(root, name)) for name in names if name.rpartition("/")[2][: -len(".json")] in known
    ]
    return {sighting.id: sighting for sighting in sightings}


def note_sightings(root: Storage, sightings: Iterable[Sighting]) -> list[Sighting]:
    """Record sightings. Returns what is new: seen for the first time, or otherwise than before.

    A contradiction outranks an earlier confirmation; a confirmation does not hide an earlier contradiction. Raises
    KeyError for an unknown id, UserError where `root` cannot be read or written.
    """
    before, new = read_sightings(root), list[Sighting]()
    for sighting in sightings:
        assumption_of(sighting.id)
        known = before.get(sighting.id)
        if known is None or (known.holds and not sighting.holds):
            write_record(root, f"{FOLDER}/{sighting.id}.json", asdict(sighting), indent=1)
            new.append(sighting)
    return new
