"""The list of assumptions: what it names exists, its page is fresh, and what was seen is never lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.unproved_page import PAGE, unproved_page
from vlmpipe.catalog.unproved import (
    FOLDER,
    Sighting,
    assumption_of,
    load_assumptions,
    note_sightings,
    read_sightings,
    refuted_by,
)
from vlmpipe.platforms.vertex.runs.first_contact import BEGUN
from vlmpipe.runs.failure_patterns import patterns
from vlmpipe.trainer.storage.local import LocalStorage

FIRST, SECOND = "vertex-accepts-the-graph", "vertex-exit-task-runs"


def test_the_page_is_that_of_the_list() -> None:
    assert PAGE.read_text(encoding="utf-8") == unproved_page(), "run python -m tests.support.generated_files"


def test_ids_are_unique_and_what_they_name_is_there() -> None:
    found = load_assumptions()
    assert len({one.id for one in found}) == len(found)
    assert [one.id for one in found if not (ROOT / one.code).exists()] == []
    known = {pattern.id for pattern in patterns()}
    assert {name for one in found for name in one.refuted_by} <= known
    assert all(one.tools and one.assumption.endswith(".") and one.shown_by.endswith(".") for one in found)


def test_diagnose_ticks_off_what_the_list_says() -> None:
    ticked = {*BEGUN, "vertex-two-exit-tasks", "vertex-placeholders-in-constants", "vertex-scheduled-run-ids"}
    ticked |= {one.id for pattern in patterns() for one in refuted_by(pattern.id)}
    assert ticked == {one.id for one in load_assumptions() if "diagnose" in one.tools}


def test_a_sighting_is_recorded_once_and_a_contradiction_outranks_it(tmp_path: Path) -> None:
    root = LocalStorage(tmp_path)
    good, bad = Sighting(FIRST, True, "it began", "diagnose", "r1"), Sighting(FIRST, False, "it did not", "diagnose")
    assert note_sightings(root, [good]) == [good]
    assert note_sightings(root, [Sighting(FIRST, True, "again", "probe")]) == []
    assert note_sightings(root, [bad, Sighting(SECOND, True, "ran", "diagnose")])[0] == bad
    assert note_sightings(root, [good]) == [], "a later confirmation does not hide what was contradicted"
    seen = read_sightings(root)
    assert {name: one.holds for name, one in seen.items()} == {FIRST: False, SECOND: True}
    assert seen[FIRST].said == "it did not"


def test_an_unknown_id_is_a_mistake_of_the_code_and_a_later_versions_file_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        note_sightings(LocalStorage(tmp_path), [Sighting("no-such-id", True, "", "probe")])
    (tmp_path / FOLDER).mkdir(exist_ok=True)
    (tmp_path / FOLDER / "of-a-later-version.json").write_text('{"unknown": 1}')
    assert read_sightings(LocalStorage(tmp_path)) == {}
    assert assumption_of(FIRST).service == "Vertex AI Pipelines"
