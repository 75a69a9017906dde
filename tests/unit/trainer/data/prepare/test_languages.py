"""Languages are told by script and frequent words, and are not guessed where neither tells."""

from __future__ import annotations

import pytest

from vlmpipe.trainer.data.prepare.languages import language_of


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is shown in the picture?", "English"),
        ("Was ist auf dem Bild zu sehen?", "German"),
        ("Hvad er der på billedet, og hvor er det?", "Danish"),
        ("Hva er det på bildet, og hvor er den?", "Norwegian"),
        ("¿De qué color es el coche?", "Spanish"),
        ("Что это и где это было?", "Russian"),
        ("这张图片里有什么？", "Chinese"),
        ("この写真には何が写っていますか？", "Japanese"),
        ("이 사진에 무엇이 있습니까?", "Korean"),
        ("Red car", "Latin script"),
        ("ما هو لون السيارة؟", "Arabic script"),
        ("3 + 4 = 7", "no letters"),
    ],
)
def test_language_of_a_text(text: str, language: str) -> None:
    assert language_of(text) == language
