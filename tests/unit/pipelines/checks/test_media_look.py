"""Videos and documents are known by names before any record is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlmpipe.pipelines.checks import media_look
from vlmpipe.pipelines.checks.media_look import names_documents, names_videos
from vlmpipe.trainer.config.data import DataConfig


def data(source: object, **fields: object) -> DataConfig:
    return DataConfig.model_validate({"source": str(source), "sequence_length": 64, **fields})


@pytest.mark.parametrize(
    ("name", "content", "videos", "documents"),
    [
        ("clip.MP4", "", True, False),
        ("deep/manual.pdf", "", False, False),  # no record names a page of it
        ("set.jsonl", '{"video": "films/a.webm#t=3"}', True, False),
        ("set.csv", "image,question\nmanual.pdf#page=2,what?", False, True),
        ("set.json", '[{"image": "a.jpg", "question": "what does mp4 stand for?"}]', False, False),
        (
            "set.jsonl",
            '{"image": "a.jpg", "answer": "save a report.pdf, then open clip.mp4, or b.avi."}',
            False,
            False,
        ),
        ("set.csv", "file_name,answer\na.jpg,it is clip.mp4 in report.pdf", False, False),
        ("set.tsv", "video\tanswer\nfilms/a.mov\tyes", True, False),
        ("set.csv", "video,answer\nfilms/a.mov,yes", True, False),
        ("notes.txt", "clip.mp4 manual.pdf", False, False),
        ("a.png", "", False, False),
    ],
)
def test_names_tell_what_must_be_decoded(
    name: str, content: str, videos: bool, documents: bool, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    for source in (path, tmp_path):
        assert (names_videos(data(source)), names_documents(data(source))) == (videos, documents)


def test_native_videos_are_videos_wherever_they_are() -> None:
    assert names_videos(data("gs://bucket/set.json", video="native"))
    assert not names_videos(data("gs://bucket/set.json")) and not names_documents(data("nowhere"))


def test_a_pipe_among_the_data_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "set.jsonl")
    assert not names_videos(data(tmp_path))


def test_a_folder_is_looked_at_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_look, "TEXT_BYTES", 8)
    (tmp_path / "set.json").write_text(" " * 8 + "a.mp4")
    assert not names_videos(data(tmp_path))
    monkeypatch.setattr(media_look, "MAX_FILES", 0)
    (tmp_path / "b.mp4").touch()
    assert not names_videos(data(tmp_path))
