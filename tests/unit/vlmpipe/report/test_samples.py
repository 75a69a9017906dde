"""Samples of a report: what is shown of those without pictures."""

from __future__ import annotations

from typing import Any, cast

from vlmpipe.report.samples import Picture, PreparedImages, prediction_browser, sample_cards


class Pictures:
    """One picture of each sample but those of text alone."""

    def pictures(self, identity: Any, _most: int, _pixels: int) -> tuple[list[Picture], int]:
        return ([] if str(identity).startswith("text/") else [Picture("data:image/png;base64,AA", 4, 4)]), 0


def test_samples_of_text_alone_are_listed_without_a_picture() -> None:
    images = cast(PreparedImages, Pictures())
    lines = [
        {"id": "text/1", "question": "1 + 1?", "answer": "2", "prediction": "3", "correct": False},
        {"id": "scans/1", "question": "<image>\nWhich?", "answer": "2", "prediction": "2", "correct": True},
    ]
    browser = prediction_browser(images, lines)
    assert [line[-1] for line in browser.lines] == [None, 0] and len(browser.pictures) == 1
    assert [len(card["pictures"]) for card in sample_cards(images, lines)] == [0, 1]
