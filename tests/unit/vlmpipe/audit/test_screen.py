"""The screen and the page of an audit."""

from __future__ import annotations

from vlmpipe.audit.screen import decision, lines, summary_json
from vlmpipe.trainer.audit.findings import Audit, Finding, Flagged

FLAGGED = tuple(
    Flagged(id=f"a-{number}", split="train", kind="near_duplicate", detail="repeats b", group=1, is_excluded=True)
    for number in range(30)
)
FOUND = Audit(
    prepared_uri="gs://bucket/prepared/1",
    samples=1_234_567,
    images=1_000_000,
    vectors="cached features and pixel hashes",
    checkpoint_steps=(100, 1000),
    excluded=30,
    findings=(
        Finding(
            kind="near_duplicate",
            samples=30,
            groups=1,
            excluded=30,
            checked=1_000_000,
            advice="x " * 90,
            flagged=FLAGGED,
        ),
        Finding(kind="text_alone", obstacle="needs the checkpoints of a run: " + "name it " * 20),
    ),
)


def test_the_decision_is_first() -> None:
    shown = lines(FOUND, {"exclusions": "list.jsonl"})
    assert shown[0].startswith("exclude 30 of 1,234,567 samples (0.0%)")
    assert "  data: {exclude: list.jsonl}" in shown
    assert any("text alone" in line and "not known" in line for line in shown)


def test_nothing_found_is_said_and_names_no_list() -> None:
    nothing = FOUND.model_copy(update={"excluded": 0, "findings": ()})
    assert decision(nothing).startswith("nothing to exclude")
    assert not any("data:" in line for line in lines(nothing, {"exclusions": "list.jsonl"}))


def test_json_lists_a_few_samples_and_how_many_there_are() -> None:
    shown = summary_json(FOUND, {})
    (first, _) = shown["findings"]  # type: ignore[misc]
    assert (first["listed"], len(first["flagged"])) == (30, 20)
