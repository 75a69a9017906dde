"""Samples of a report: what is shown of those without pictures."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tests.support.reports import predictions
from vlmpipe.report.samples import EmbeddedImage, PreparedImages, choose, prediction_browser, sample_cards, thumbnail


class Images:
    """One picture of each sample but those of text alone."""

    def embedded(self, identity: Any, _most: int, _pixels: int) -> tuple[list[EmbeddedImage], int]:
        return ([] if str(identity).startswith("text/") else [EmbeddedImage("data:image/png;base64,AA", 4, 4)]), 0


def test_samples_of_text_alone_are_listed_without_a_picture() -> None:
    images = cast(PreparedImages, Images())
    lines = [
        {"id": "text/1", "question": "1 + 1?", "answer": "2", "prediction": "3", "correct": False},
        {"id": "scans/1", "question": "<image>\nWhich?", "answer": "2", "prediction": "2", "correct": True},
    ]
    browser = prediction_browser(images, lines)
    assert [line[-1] for line in browser.lines] == [None, 0] and len(browser.images) == 1
    assert [len(card["images"]) for card in sample_cards(images, lines)] == [0, 1]


@given(predictions, st.integers(0, 20))
def test_chosen_samples_differ_and_half_are_wrong_where_possible(lines: list[dict[str, Any]], most: int) -> None:
    chosen = choose(lines, most)
    wrong = sum(not line["correct"] for line in lines)
    assert len(chosen) == min(most, len(lines))
    assert len({id(line) for line in chosen}) == len(chosen)
    shown_wrong = sum(not line["correct"] for line in chosen)
    assert shown_wrong >= min(wrong, most // 2)
    assert len(chosen) - shown_wrong >= min(len(lines) - wrong, most - most // 2)


@given(st.data())
def test_a_damaged_picture_never_breaks_the_report(data: st.DataObject) -> None:
    from io import BytesIO

    from PIL import Image

    buffer = BytesIO()
    Image.radial_gradient("L").save(buffer, data.draw(st.sampled_from(["PNG", "JPEG"])))
    damaged = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    picture = thumbnail(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    assert bool(picture.data_uri) != bool(picture.problem)
