"""Pages of documents and frames of videos as images of samples."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from tests.support.data.prepared import conversation
from tests.support.data.videos import BITS, FPS, frame_in, shown, write_video
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.media import part_of
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.sources.image_files import ImageFiles
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage.local import LocalStorage


def _matrix(a: int, b: int, c: int, d: int) -> bytes:
    """A transformation in a track's header (ISO 14496-12, 8.3.2.3), in 16.16 and 2.30 fixed point."""
    return struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)


STRAIGHT, TURNED_90 = _matrix(1, 0, 0, 1), _matrix(0, 1, -1, 0)
TURNED_180, TURNED_270 = _matrix(-1, 0, 0, -1), _matrix(0, -1, 1, 0)


def pages(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (60, 80), (40 * n, 0, 200)) for n in range(count)]


def files(folder: Path, **limits: int) -> ImageFiles:
    return ImageFiles(LocalStorage(folder), **{"max_image_bytes": 1 << 20, "max_media_bytes": 1 << 20} | limits)


@pytest.mark.parametrize(
    "path", ["a.png", "a.png#t=1", "a.pdf", "a.pdf#page=0", "a.mp4#page=1", "a.mp4#frame=9/8", "#t=1"]
)
def test_other_paths_name_no_part(path: str) -> None:
    assert part_of(path) is None


@pytest.mark.parametrize("order", ["up", "down", "any"])
def test_the_frame_at_a_time_is_the_one_that_is_shown_then(tmp_path: Path, order: str) -> None:
    write_video(tmp_path / "v.mp4")
    found, times = files(tmp_path), [0.0, 0.05, 0.1, 0.69, 1.2, 2.0, 2.01, 3.99]
    if order != "up":
        times = times[::-1] if order == "down" else [times[n] for n in (5, 0, 7, 2, 2, 6, 1, 4, 3)]
    assert [frame_in(found.reference(f"v.mp4#t={time}")) for time in times] == [
        int(time * FPS + 1e-9) for time in times
    ]


def test_frames_are_evenly_spread_and_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "v.mp4")
    seeks = []
    opened = av.open

    class Counted:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._container = opened(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._container, name)

        def seek(self, *arguments: Any, **options: Any) -> None:
            seeks.append(arguments)
            self._container.seek(*arguments, **options)

    monkeypatch.setattr(av, "open", Counted)
    frames = files(tmp_path).video_frames("v.mp4", 8, 0)
    assert [frame_in(one) for one in frames] == [2, 7, 12, 17, 22, 27, 32, 37] and len(seeks) == 1
    assert len({one.content() for one in frames}) == 8
    assert len(files(tmp_path).video_frames("v.mp4", 8, 1.5)) == 6, "4 seconds, 1.5 frames a second"
    assert len(files(tmp_path).video_frames("v.mp4", 3, 1.5)) == 3


def test_pages_of_pdf_and_tiff(tmp_path: Path) -> None:
    for name in ("d.pdf", "d.tif"):
        first, *others = pages(3)
        first.save(tmp_path / name, save_all=True, append_images=others, resolution=72)
    for name, size in (("d.pdf", (120, 160)), ("d.tif", (60, 80))):  # 144 pixels an inch of a page at 72
        found = [shown(files(tmp_path).reference(f"{name}#page={n}")) for n in (3, 1, 2)]
        assert [image.size for image in found] == [size] * 3
        assert [round(np.asarray(image)[..., 0].mean() / 40) for image in found] == [2, 0, 1]


def test_a_filled_field_of_a_form_is_shown(tmp_path: Path) -> None:
    (tmp_path / "form.pdf").write_bytes(form("XXXX"))
    (tmp_path / "empty.pdf").write_bytes(form(""))
    filled, empty = (shown(files(tmp_path).reference(f"{name}.pdf#page=1")) for name in ("form", "empty"))
    assert (np.asarray(filled) < 128).sum() > (np.asarray(empty) < 128).sum() + 50


def form(value: str) -> bytes:
    """A page with a text field that has a value and no appearance of its own, as programs fill forms."""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [4 0 R] /NeedAppearances true /DA (/F 24 Tf 0 g) "
        "/DR << /Font << /F 5 0 R >> >> >> >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 100] /Annots [4 0 R] >>",
        f"<< /Type /Annot /Subtype /Widget /FT /Tx /T (name) /V ({value}) /Rect [20 30 180 70] /F 4 "
        "/DA (/F 24 Tf 0 g) /P 3 0 R >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body, places = b"%PDF-1.7\n", []
    for number, text in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj {text} endobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer << /Size {len(objects) + 1} /Root 1 0 R >>\n"
    )
    return body + f"{end}startxref\n{len(body)}\n%%EOF".encode()


def test_a_page_of_printing_colours_is_converted(tmp_path: Path) -> None:
    page = Image.new("CMYK", (40, 30), (0, 255, 255, 0))
    page.save(tmp_path / "c.tif", save_all=True, append_images=[page])
    assert shown(files(tmp_path).reference("c.tif#page=2")).getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.parametrize(("matrix", "turn"), [(TURNED_90, 270), (TURNED_180, 180), (TURNED_270, 90)])
def test_a_video_is_shown_upright(tmp_path: Path, matrix: bytes, turn: int) -> None:
    data = write_video(tmp_path / "v.mp4").read_bytes()
    place = data.index(STRAIGHT, data.index(b"tkhd"))
    (tmp_path / "turned.mp4").write_bytes(data[:place] + matrix + data[place + len(matrix) :])
    plain, turned = (shown(files(tmp_path).reference(f"{name}.mp4#t=1")) for name in ("v", "turned"))
    upright = np.asarray(plain.rotate(turn, expand=True), np.int16)
    assert np.abs(upright - np.asarray(turned, np.int16)).mean() < 4


def rejected(folder: Path, path: str, **limits: int) -> tuple[RejectCode, str]:
    with pytest.raises(RejectedError) as caught:
        files(folder, **limits).reference(path).read()
    return caught.value.code, str(caught.value)


def test_what_is_not_there_is_rejected_in_words(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", 10)
    pages(1)[0].save(tmp_path / "d.pdf")
    (tmp_path / "bad.mp4").write_bytes((tmp_path / "v.mp4").read_bytes()[:200])
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    assert rejected(tmp_path, "d.pdf#page=2") == (RejectCode.MEDIA_MISSING_PART, "d.pdf has 1 pages, not #page=2")
    assert rejected(tmp_path, "v.mp4#t=1") == (RejectCode.MEDIA_MISSING_PART, "v.mp4 has 1 s, not #t=1")
    assert rejected(tmp_path, "bad.mp4#t=0")[0] == RejectCode.MEDIA_UNREADABLE
    assert rejected(tmp_path, "bad.pdf#page=1")[0] == RejectCode.MEDIA_UNREADABLE
    assert rejected(tmp_path, "no.pdf#page=1")[0] == RejectCode.REF_MISSING
    code, said = rejected(tmp_path, "v.mp4#t=0", max_media_bytes=99)
    assert code == RejectCode.IMAGE_TOO_LARGE and "data.max_media_bytes 99" in said
    with pytest.raises(RejectedError, match="is outside"):
        files(tmp_path).reference("../v.mp4#t=0")


def test_a_video_is_opened_again_after_one_that_is_not_there(tmp_path: Path) -> None:
    """Its decoder was closed for the other, and a closed one ends the process."""
    write_video(tmp_path / "v.mp4")
    found = files(tmp_path)
    first = frame_in(found.reference("v.mp4#t=1"))
    with pytest.raises(RejectedError):
        found.reference("no.mp4#t=1").read()
    assert frame_in(found.reference("v.mp4#t=1")) == first
    assert frame_in(found.reference("v.mp4#t=2")) > first


def test_an_absolute_path_with_a_zero_byte_is_a_reject(tmp_path: Path) -> None:
    line = {"id": "1", "image": "/x\0y/a.jpg", "conversations": [
        {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It."}
    ]}  # fmt: skip
    (found,) = records(tmp_path, line)
    assert isinstance(found, Reject) and found.code == RejectCode.REF_UNSAFE_CHARACTERS


def test_a_video_without_frames_and_one_that_ends_before_its_length(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "v.mp4", 60, movflags="faststart").read_bytes()  # which writes the length first
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream: Any = container.add_stream("aac", rate=44100)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.int16), format="s16", layout="mono")
        sound.sample_rate = 44100
        container.mux([*stream.encode(sound), *stream.encode()])
    assert rejected(tmp_path, "sound.mp4#t=0") == (RejectCode.MEDIA_UNREADABLE, "sound.mp4 has no video")
    assert rejected(tmp_path, "cut.mp4#frame=8/8") == (RejectCode.MEDIA_UNREADABLE, "cut.mp4 has no frame at 5.62 s")
    first, *others = files(tmp_path).video_frames("cut.mp4", 8, 0)
    assert shown(first).size == (16 * BITS, 48)
    with pytest.raises(RejectedError, match=r"cut.mp4 ends after \d\.\d+ s, and has 6 s by its header"):
        [frame.read() for frame in others]


def test_times_of_frames_are_written_before_them(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4")
    record = {"id": "1", "video": "v.mp4", "conversations": conversation("<video>\nWhat?", "Grey.")}
    (one,) = records(tmp_path, record, video_frames=2, video_times=True)
    assert isinstance(one, Sample)
    assert one.turns[0].question == "<1.0 seconds><image><3.0 seconds><image>\nWhat?"
    assert [frame_in(image) for image in one.images] == [10, 30]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "v.mp4", 10)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match="needs av, which is not installed") as caught:
        files(tmp_path).reference("v.mp4#t=0").read()
    assert "vlmpipe[media]" in str(caught.value.fix)


def records(folder: Path, *lines: dict[str, Any], **data: Any) -> list[Sample | Reject]:
    (folder / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(open_source(DataConfig(source=str(folder / "set.jsonl"), sequence_length=100, **data)))


def test_a_record_with_a_video_has_its_frames_as_images(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4")
    write_video(tmp_path / "w.mp4", 20)
    parts = [{"type": "text", "text": "Compare "}, {"type": "video"}, {"type": "video"}]
    one, two, wrong, both = records(
        tmp_path,
        {"id": "1", "video": "v.mp4", "conversations": conversation("<video>\nWhat?", "Grey.")},
        {"id": "2", "videos": ["v.mp4", "w.mp4"], "messages": [
            {"role": "user", "content": parts}, {"role": "assistant", "content": "Longer."}]},
        {"id": "3", "video": "v.mp4", "conversations": conversation("<video><video>?", "No.")},
        {"id": "4", "video": "v.mp4", "image": "x.png", "conversations": conversation("<video>?", "No.")},
        video_frames=3,
    )  # fmt: skip
    assert isinstance(one, Sample) and one.turns[0].question == "<image><image><image>\nWhat?"
    assert [frame_in(image) for image in one.images] == [6, 20, 33]
    assert isinstance(two, Sample) and two.turns[0].question.count("<image>") == len(two.images) == 6
    assert isinstance(wrong, Reject) and wrong.code == RejectCode.CONV_IMAGE_COUNT
    assert isinstance(both, Reject) and both.message == "0 <image> marks for 1 images"
