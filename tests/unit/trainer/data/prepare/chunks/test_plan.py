"""Samples of a plan: those that data.exclude names by their final ids are left out, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.exclusions.exclusion_file import Exclusions
from vlmpipe.trainer.data.prepare.chunks.plan import planned_samples, write_plan
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import ImageRef, Sample, Turn


def sample(identity: str, answer: str) -> Sample:
    image = ImageRef(answer, lambda: answer.encode())
    return Sample(identity, (Turn("<image>\nWhat is it?", answer),), (image,), answer)


RECORDS = [
    sample("a", "cup"),
    sample("a", "tea"),  # becomes a~ and 12 digits
    Reject("line 3", "", RejectCode.ID_UNSAFE, "an id of 0 characters"),
    sample("b", "hat"),
    sample("a", "cup"),  # a duplicate, which preparation rejects
]
REPEAT = f"a~{RECORDS[1].content_digest()[:12]}" if isinstance(RECORDS[1], Sample) else ""


@pytest.mark.parametrize(
    ("excluded", "left"),
    [
        (set(), ["cup", "tea", "hat", "cup"]),
        ({REPEAT}, ["cup", "hat", "cup"]),
        ({"a"}, ["tea", "hat", "cup"]),
        ({"b", "none"}, ["cup", "tea", "cup"]),
    ],
)
def test_a_repeated_id_is_left_out_by_its_final_id_alone(tmp_path: Path, excluded: set[str], left: list[str]) -> None:
    config = DataConfig(source="builtin:digits", sequence_length=64, validation_fraction=0.5, max_split_error=1.0)
    exclusions = Exclusions("list", frozenset(excluded))
    assert list(write_plan(RECORDS, tmp_path, config, threads=1, excluded=exclusions))
    answers = [sample.turns[0].answer for sample, _ in planned_samples(RECORDS, tmp_path, exclusions.ids)]
    assert answers == left
