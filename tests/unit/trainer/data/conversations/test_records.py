"""Marks of videos and images in a conversation, and the files that they stand for."""

from __future__ import annotations

import pytest

from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.records import require_media, with_media
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import ImageRef, Turn

FRAMES = [ImageRef(str(number), lambda: b"") for number in range(3)]


def test_llava_videos_image_marks_stand_for_its_videos() -> None:
    turns, images = with_media([Turn("<image>\nWhat?", "A.")], [], [FRAMES])
    assert turns == (Turn("<image><image><image>\nWhat?", "A."),) and list(images) == FRAMES


def test_image_marks_beside_a_video_are_counted_where_an_image_is_named() -> None:
    with pytest.raises(RejectedError, match="0 <video> marks for 2 videos"):
        with_media([Turn("<image>\nWhat?", "A.")], FRAMES[:1], [FRAMES, FRAMES])


@pytest.mark.parametrize("words", ["<IMAGE>\nWhat?", "What? <Image>", "Is <image_1> old?", "<|image|>What?", "<video>"])
def test_a_mark_without_a_file_is_rejected(words: str) -> None:
    with pytest.raises(RejectedError) as rejected:
        require_media(Record({"messages": []}), [Turn(words, "A.")], 0, 0)
    assert rejected.value.code == RejectCode.CONV_NO_MEDIA


@pytest.mark.parametrize("words", ["What is <Image> for?", "```\n<Image>\n</Image>\n```", "<video>\n<a>\n</video>"])
def test_a_word_or_an_element_of_code_is_no_mark(words: str) -> None:
    require_media(Record({"messages": []}), [Turn(words, words)], 0, 0)
