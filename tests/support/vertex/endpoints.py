"""Questions and models of tests that deploy."""

from __future__ import annotations

import io

from PIL import Image

from vlmpipe.serving.questions import ValidationQuestion, chat_messages

ANSWERS = {f"what digit is this? {number}": str(number) for number in range(10)}


def asked_questions() -> list[ValidationQuestion]:
    """Ten validation questions, each about a picture."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    return [
        ValidationQuestion(
            f"digit-{number}", 0, chat_messages(f"<image>\n{text}", "", [picture.getvalue()], as_text=True), 4, answer
        )
        for number, (text, answer) in enumerate(ANSWERS.items())
    ]


def right(question: str) -> str:
    """The answer that evaluation got."""
    return ANSWERS[question]


def wrong(question: str) -> str:
    return "7"
