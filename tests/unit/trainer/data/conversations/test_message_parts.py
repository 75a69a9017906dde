"""Messages whose parts name their files, in OpenAI's, Hugging Face's and Gemini's spellings, and ShareGPT."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.data.prepared import conversation, encode, llava_folder, picture
from tests.support.data.videos import frame_in, write_video
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import Sample, Turn
from vlmpipe.trainer.data.sources import open_source

PNG = encode(picture(1))
INLINE = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def read(folder: Path, *records: dict[str, Any], **data: Any) -> list[Sample | Reject]:
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return list(open_source(DataConfig(source=str(path), sequence_length=100, **data)))


def only(found: list[Sample | Reject]) -> Sample:
    (sample,) = found
    assert isinstance(sample, Sample), sample
    return sample


def ask(*parts: dict[str, Any], answer: Any = "Yes.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "images/1.png"}},
        {"type": "image_url", "image_url": "images/1.png"},
        {"type": "image", "image": "images/1.png"},
        {"type": "image", "url": "images/1.png"},
        {"type": "image", "path": "images/1.png"},
        {"type": "image_url", "image_url": {"url": INLINE, "detail": "low"}},
        {"type": "image", "source": {"media_type": "image/png", "data": base64.b64encode(PNG).decode()}},
        {"type": "image", "source": {"type": "url", "url": "images/1.png"}},
    ],
)
def test_parts_name_their_images(tmp_path: Path, part: dict[str, Any]) -> None:
    llava_folder(tmp_path, 2)
    sample = only(read(tmp_path, ask(part, {"type": "text", "text": "Noise?"})))
    assert sample.turns == (Turn("<image>\nNoise?", "Yes."),)
    assert [image.read() for image in sample.images] == [PNG]


def test_images_in_answers_and_several_keep_their_places(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 3)
    answer = [{"type": "text", "text": "Here: "}, {"type": "image", "path": "images/2.png"}]
    first = {"type": "image", "path": "images/1.png"}, {"type": "image", "path": "images/0.png"}
    sample = only(read(tmp_path, ask(*first, {"type": "text", "text": "More?"}, answer=answer)))
    assert sample.turns == (Turn("<image>\n<image>\nMore?", "Here: <image>"),)
    assert [image.read() for image in sample.images] == [(images / f"{n}.png").read_bytes() for n in (1, 0, 2)]


def test_images_and_videos_in_one_conversation_are_in_the_order_of_their_marks(tmp_path: Path) -> None:
    llava_folder(tmp_path, 1)
    write_video(tmp_path / "a.mp4")
    texts = "<image> then <video>", "So?", "And <image>?", "No."
    listed = {"images": ["images/0.png"] * 2, "video": "a.mp4", "conversations": conversation(*texts)}
    video = {"type": "video", "video": "a.mp4"}
    named = ask({"type": "image", "path": "images/0.png"}, video, {"type": "text", "text": "So?"})
    for record, images in ((listed, (0, 3)), (named, (0,))):
        sample = only(read(tmp_path, record, video_frames=2))
        frames = [number for number in range(len(sample.images)) if number not in images]
        assert [frame_in(sample.images[number]) for number in frames] == [10, 30]
        assert sum(text.count("<image>") for turn in sample.turns for text in turn.texts()) == len(sample.images)


def test_gemini_tuning_records(tmp_path: Path) -> None:
    llava_folder(tmp_path, 2)
    record = {
        "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
        "contents": [
            {
                "role": "user",
                "parts": [{"fileData": {"mimeType": "image/png", "fileUri": "images/1.png"}}, {"text": "Noise?"}],
            },
            {"role": "model", "parts": [{"text": "Yes."}]},
            {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": INLINE.partition(",")[2]}}]},
            {"role": "model", "parts": [{"text": "Again."}]},
        ],
    }
    sample = only(read(tmp_path, record))
    assert sample.turns == (Turn("<image>\nNoise?", "Yes.", system="Be brief."), Turn("<image>", "Again."))
    assert [image.read() for image in sample.images] == [PNG, PNG]


def test_sharegpt_with_its_system_text_beside_the_conversation(tmp_path: Path) -> None:
    sample = only(read(tmp_path, {"system": "Be brief.", "conversations": conversation("Hi.", "Hello.")}))
    assert sample.turns == (Turn("Hi.", "Hello.", system="Be brief."),)


GEMINI = {"contents": [{"role": "user", "parts": []}, {"role": "model", "parts": [{"text": "x"}]}]}


@pytest.mark.parametrize(
    ("record", "code", "message"),
    [
        (ask({"type": "image", "url": "https://a.b/c.png"}), RejectCode.REF_MISSING, "not fetched; download them"),
        (ask({"type": "image", "url": "gs://b/c.png"}), RejectCode.REF_MISSING, "No such file"),
        (ask({"type": "image", "url": "data:image/png,x"}), RejectCode.RECORD_FORM, "not in base64"),
        (ask({"type": "image", "url": "data:image/png;base64,?"}), RejectCode.RECORD_FORM, "not in base64"),
        (ask({"type": "image", "url": INLINE}), RejectCode.IMAGE_TOO_LARGE, "data.max_image_bytes 100"),
        (ask({"type": "video", "url": "a.gif"}), RejectCode.RECORD_FORM, "does not end in"),
        (GEMINI | {"contents": [{"role": "tool"}]}, RejectCode.CONV_ROLES, "'tool', not user or model"),
        (
            {"contents": [{"parts": [{"fileData": {"mimeType": "audio/mp3", "fileUri": "a"}}]}]},
            RejectCode.RECORD_FORM,
            "a file of type audio/mp3, not a text, an image or a video",
        ),
        (
            {"image": "a.png", "video": "a.mp4", "conversations": conversation("<video>", "x")},
            RejectCode.CONV_IMAGE_COUNT,
            "0 <image> marks for 1 images",
        ),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    tmp_path: Path, record: dict[str, Any], code: RejectCode, message: str
) -> None:
    write_video(tmp_path / "a.mp4")
    _, found = read(tmp_path, GEMINI, record, max_image_bytes=100)
    if isinstance(found, Sample):  # found missing when it is read
        with pytest.raises(Exception, match=message):
            found.images[0].read()
        return
    assert (found.code, message in found.message) == (code, True), found.message


def test_several_accepted_answers_are_named(tmp_path: Path) -> None:
    (reject,) = read(tmp_path, {"question": "Which?", "answers": ["A.", "B."]})
    assert isinstance(reject, Reject) and reject.code == RejectCode.RECORD_FORM
    assert reject.message == "'answer' is missing beside 'answers', of which training needs one: add it as 'answer'"
