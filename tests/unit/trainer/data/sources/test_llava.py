"""LLaVA files: what a record may say, and sentences for files of another kind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.data.prepared import conversation, llava_folder, png, record, write_json
from tests.support.short_form import WHOLE
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import Sample, Turn
from vlmpipe.trainer.data.sources import llava, open_source
from vlmpipe.trainer.errors import ConfigError, DataError, UserError

LIMIT = 400  # bytes of a line in the law of lines


def read(path: Path, folder: Path | str = "") -> list[Sample | Reject]:
    return list(open_source(DataConfig(source=str(path), image_folder=str(folder), sequence_length=100)))


def test_json_and_json_lines_give_the_same_samples(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    array = write_json(tmp_path / "a.json", records)
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(json.dumps(line).encode() for line in records))
    from_array, from_lines = read(array, images), read(lines, images)
    assert [sample.content_digest() for sample in from_array if isinstance(sample, Sample)] == [
        sample.content_digest() for sample in from_lines if isinstance(sample, Sample)
    ]
    assert len(from_array) == 3
    assert from_array[2].where == "a.json record 3" and from_lines[2].where == "a.jsonl line 5"


def test_roles_may_be_named_either_way_and_a_system_message_comes_first(tmp_path: Path) -> None:
    messages = [
        {"from": "system", "value": "Be brief."},
        {"from": "user", "value": "<image>\nWhat?"},
        {"from": "assistant", "value": "A cat. "},
    ]
    (sample,) = read(write_json(tmp_path / "a.json", [{"image": "1.png", "conversations": messages}]))
    assert isinstance(sample, Sample)
    assert sample.turns == (Turn("<image>\nWhat?", "A cat.", system="Be brief."),)


def test_optional_keys_set_slice_and_split_and_ids_may_be_missing_or_numbers(tmp_path: Path) -> None:
    records = [record(1, id=7, slice="ocr", split="eval"), record(2), record(3)]
    del records[1]["id"]
    samples = [sample for sample in read(write_json(tmp_path / "a.json", records)) if isinstance(sample, Sample)]
    assert (samples[0].id, samples[0].split, samples[0].turns[1].slice) == ("7", "eval", "ocr")
    assert len(samples[1].id) == 16 and samples[1].split is None
    again = read(write_json(tmp_path / "b.json", [records[0], records[2], records[1]]))
    assert again[2].id == samples[1].id  # an id from content does not depend on the place in the file


def test_a_fingerprint_follows_records_and_images(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    path = write_json(tmp_path / "a.json", records)
    prints = [open_source(DataConfig(source=str(path), image_folder=str(images), sequence_length=100)).fingerprint()]
    prints.append(
        open_source(DataConfig(source=str(path), image_folder=str(images), sequence_length=100)).fingerprint()
    )
    (images / "1.png").write_bytes(png(99, side=30))
    prints.append(
        open_source(DataConfig(source=str(path), image_folder=str(images), sequence_length=100)).fingerprint()
    )
    write_json(path, records[:2])
    prints.append(
        open_source(DataConfig(source=str(path), image_folder=str(images), sequence_length=100)).fingerprint()
    )
    (images / "not-referenced.png").write_bytes(png(5))
    prints.append(
        open_source(DataConfig(source=str(path), image_folder=str(images), sequence_length=100)).fingerprint()
    )
    assert [prints.index(value) for value in prints] == [0, 0, 2, 3, 3]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.json", None, ConfigError, "does not exist"),
        ("a.txt", "id,image", ConfigError, "a.txt' has an unknown format"),
        ("a.json", "not json", DataError, "is not JSON"),
        ("a.json", '{"id": 1}\n{"id": 2}', DataError, "name the file .jsonl"),
        ("a.json", '{"images": [], "annotations": []}', DataError, "holds no captions"),
        ("a.json", '{"images": [], "captions": []}', DataError, "the keys 'images', 'captions'"),
        ("a.json", '[{"url": "x", "title": "y"}]', DataError, "the keys 'url', 'title'"),
        ("a.json", '["x"]', DataError, "found a text"),
        ("a.json", "[]", DataError, "holds no records"),
        ("a.jsonl", "", DataError, "holds no records"),
        ("a.jsonl", "PNG", DataError, "not JSON"),
    ],
)
def test_file_of_another_format_is_reported(
    tmp_path: Path, name: str, text: str | None, error: type[UserError], message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize(("encoding", "said"), [("utf-16", "is text in UTF-16"), ("latin-1", "not UTF-8")])
def test_file_in_another_encoding_is_reported(tmp_path: Path, encoding: str, said: str) -> None:
    text = json.dumps([record(1) | {"id": "größe"}], ensure_ascii=False)
    (tmp_path / "a.json").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=said):
        read(tmp_path / "a.json")


def test_the_image_folder_must_exist_and_hold_images(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", [record(1)])
    with pytest.raises(ConfigError, match="is not a folder"):
        read(path, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no images")
    with pytest.raises(DataError, match="holds no images"):
        read(path, tmp_path / "empty")


def test_one_odd_record_first_does_not_condemn_the_file(tmp_path: Path) -> None:
    good = {"id": "2", "conversations": conversation("What?", "That.")}
    first, second = read(write_json(tmp_path / "a.json", [{"url": "x"}, good]))
    assert isinstance(first, Reject) and isinstance(second, Sample)


def test_messages_in_hugging_face_style_are_conversations_too(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "A cat.", "reasoning_content": "Whiskers."},
    ]
    (sample,) = read(write_json(tmp_path / "a.json", [{"images": ["1.png"], "messages": messages}]))
    assert isinstance(sample, Sample) and len(sample.images) == 1
    assert sample.turns == (Turn("<image>\nWhat is this?", "A cat.", system="Be brief.", thinking="Whiskers."),)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"id": [1]}, RejectCode.RECORD_FORM),
        ({"id": True}, RejectCode.RECORD_FORM),
        ({"image": 7}, RejectCode.RECORD_FORM),
        ({"slice": 7}, RejectCode.RECORD_FORM),
        ({"split": "elsewhere"}, RejectCode.RECORD_FORM),
        ({"conversations": "What?"}, RejectCode.RECORD_FORM),
        ({"conversations": [{"from": ["human"], "value": "What?"}] * 2}, RejectCode.CONV_ROLES),
        ({"conversations": conversation("What?", "\ud83d")}, RejectCode.RECORD_ENCODING),
        ({"image": "\udcff.png"}, RejectCode.RECORD_ENCODING),
        ({"image": "/etc/passwd"}, RejectCode.REF_UNSAFE_PATH),
        ({"image": "a\0b"}, RejectCode.REF_UNSAFE_CHARACTERS),
    ],
)
def test_a_field_of_the_wrong_kind_rejects_its_record_only(
    tmp_path: Path, change: dict[str, Any], code: RejectCode
) -> None:
    bad, good = read(write_json(tmp_path / "a.json", [record(1, **change), record(2)]))
    assert isinstance(bad, Reject) and bad.code == code
    assert isinstance(good, Sample)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "set" / "1.png").symlink_to(tmp_path / "secret.png")
    (bad,) = read(write_json(tmp_path / "set" / "a.json", [record(1)]))
    assert isinstance(bad, Reject) and bad.code == RejectCode.REF_UNSAFE_PATH


def test_overlong_line_is_one_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmpipe.trainer.data.sources.llava.LONGEST_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([json.dumps(record(1)).encode(), b"x" * 5000, json.dumps(record(2)).encode()]))
    first, long, last = read(path)
    assert isinstance(first, Sample) and isinstance(last, Sample)
    assert isinstance(long, Reject) and long.code == RejectCode.RECORD_PARSE


def test_truncated_array_is_refused_as_a_whole(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.json", [record(number) for number in range(100)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"not JSON.*after record 9\d"):
        read(path)


@st.composite
def line_lengths(draw: st.DrawFn) -> list[int]:
    """Lengths of lines without their ends; 0 is a blank line. Most are about as long as a line may be."""
    near = st.integers(LIMIT - 4, LIMIT + 4)
    return draw(st.lists(near | st.sampled_from([0, 300, 2 * LIMIT - 1, 2 * LIMIT, 2 * LIMIT + 1, 3 * LIMIT])))


@settings(deadline=None, max_examples=300 if WHOLE else 60)
@given(lengths=line_lengths(), end=st.sampled_from([b"\n", b"\r\n"]), ends_with_newline=st.booleans())
@example(lengths=[LIMIT, 300], end=b"\n", ends_with_newline=True)
def test_every_line_is_a_sample_or_a_reject(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], end: bytes, ends_with_newline: bool
) -> None:
    lines = [padded(number, length) for number, length in enumerate([300, *lengths])]
    content = end.join(lines) + (end if ends_with_newline else b"")
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(content)
    with mock.patch.object(llava, "LONGEST_LINE_BYTES", LIMIT):
        found = read(path)
    assert len(found) == sum(bool(line.strip()) for line in content.split(b"\n")), "lines != accepted + rejected"
    short = [line for line in content.splitlines(keepends=True) if line.strip() and len(line) <= LIMIT]
    assert [one.id for one in found if isinstance(one, Sample)] == [json.loads(line)["id"] for line in short]
    assert all("more than" in one.message for one in found if isinstance(one, Reject))


def padded(number: int, length: int) -> bytes:
    """A record's line of exactly that many bytes."""
    if length == 0:
        return b""
    bare = json.dumps(record(number, note=""))
    return json.dumps(record(number, note="x" * (length - len(bare)))).encode()


LINES = b"".join(json.dumps(record(n)).encode() + b"\n" for n in range(6))


@given(st.integers(1, len(LINES)))
def test_a_cut_file_of_lines_is_whole_or_refused(tmp_path_factory: pytest.TempPathFactory, stop: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(LINES[:stop])
    whole = LINES[:stop].count(b"\n") + (LINES[stop : stop + 1] == b"\n")
    if whole and (LINES[:stop].endswith(b"\n") or LINES[stop : stop + 1] == b"\n"):
        assert len(read(path)) == whole
        return
    with pytest.raises(DataError, match=r"is cut or damaged: line \d"):
        read(path)


@given(st.integers(0, len(LINES) - 1), st.integers(1, 2000))
def test_a_file_of_lines_with_blanked_parts_is_refused(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int
) -> None:
    path = tmp_path_factory.mktemp("blank") / "a.jsonl"
    blanked = bytes(len(LINES[start : start + length]))
    path.write_bytes(LINES[:start] + blanked + LINES[start + length :])
    with pytest.raises(DataError, match="bytes of zero"):
        read(path)


def test_folders_that_are_links_in_the_image_folder_are_read(tmp_path: Path) -> None:
    """LLaVA's guide links each set's pictures into one folder. Links of files lead no further than before."""
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "1.png").write_bytes(png(1))
    (tmp_path / "secret.png").write_bytes(png(2))
    images = tmp_path / "images"
    images.mkdir()
    (images / "coco").symlink_to(tmp_path / "elsewhere")
    (images / "2.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "elsewhere" / "deep" / "3.png").symlink_to(tmp_path / "secret.png")
    names = ["coco/deep/1.png", "2.png", "coco/deep/3.png", f"{images}/coco/deep/1.png", "../secret.png"]
    path = write_json(tmp_path / "a.json", [record(n, image=name) for n, name in enumerate(names)])
    config = DataConfig(source=str(path), image_folder=str(images), sequence_length=100)
    found = [one.code if isinstance(one, Reject) else one.images[0].read() == png(1) for one in open_source(config)]
    unsafe = RejectCode.REF_UNSAFE_PATH
    assert found == [True, unsafe, unsafe, True, unsafe]


def test_a_folder_is_resolved_once_and_not_with_each_picture(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 20)
    path = write_json(tmp_path / "a.json", records)
    source = open_source(DataConfig(source=str(path), image_folder=str(images), sequence_length=100))
    with mock.patch("os.path.realpath", side_effect=os.path.realpath) as resolved:
        for _ in range(3):
            assert len(list(source)) == 20
    assert resolved.call_count <= 3
