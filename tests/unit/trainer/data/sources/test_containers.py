"""Tars, Parquet, COCO and CSV: what each may hold, and that no part of a damaged one gets lost in silence."""

from __future__ import annotations

import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.data.formats import add_member, captioned, write_source
from tests.support.data.prepared import conversation, png
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.data.sources.tar_reader import members, read_member
from vlmpipe.trainer.errors import DataError


def read(source: Path | str, **data: Any) -> list[Sample | Reject]:
    return list(open_source(DataConfig(source=str(source), sequence_length=100, **data)))


def samples_in(source: Path | str, **data: Any) -> list[Sample]:
    found = read(source, **data)
    assert all(isinstance(item, Sample) for item in found), found
    return [item for item in found if isinstance(item, Sample)]


# ---- tars


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_tar_dialect_is_read_like_the_standard_library(tmp_path: Path, tar_format: int) -> None:
    long = "x" * 90 + "/" + "y" * 90 + ".txt"  # 184 bytes: a prefix, a long link or a pax record
    with tarfile.open(tmp_path / "a.tar", "w", format=tar_format) as tar:
        for number, name in enumerate(["1.txt", long, "\u00e9t\u00e9.json", "2.0.png"]):
            add_member(tar, name, bytes(range(number, 200)) * number, mtime=1.5 if tar_format != 0 else 1)
        add_member(tar, "folder", b"", type=tarfile.DIRTYPE)
    with tarfile.open(tmp_path / "a.tar") as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar.getmembers() if m.isreg()]
    found = list(members(tmp_path / "a.tar"))
    assert [(m.name, m.offset, m.size_bytes) for m in found] == expected
    assert read_member(tmp_path / "a.tar", found[1]) == bytes(range(1, 200))


def test_every_cut_of_a_tar_is_noticed(tmp_path: Path) -> None:
    """At a member boundary too, where other readers see a shorter archive."""
    whole = Path(write_source("webdataset", tmp_path / "set", captioned(4)), "part-000000.tar").read_bytes()
    path = tmp_path / "cut.tar"
    content = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for size in {*range(0, content + 1, 512), 100, content - 700}:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is damaged"):
            read(path)


@pytest.mark.parametrize("percent", range(0, 100, 5))
def test_a_tar_that_arrived_in_part_is_damaged(tmp_path: Path, percent: int) -> None:
    """Its file has the whole size, and zeros where bytes are missing: up to a member or within one."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(120):
            add_member(tar, f"{number}.png", random.Random(number).randbytes(3000))
            add_member(tar, f"{number}.txt", b"A picture.")
        offsets = [member.offset for member in tar.getmembers()]
    whole = path.read_bytes()
    arrived = len(whole) * percent // 100
    for place in (arrived, max((offset for offset in offsets if offset <= arrived), default=0)):
        path.write_bytes(whole[:place] + bytes(len(whole) - place))
        with pytest.raises(DataError, match=r"is damaged: .*(zeros from byte|needs|cannot be read)"):
            read(path)


@pytest.mark.parametrize("size", ["9" * 5000, "-1", "1e3", "", "9" * 19])
def test_a_size_in_pax_records_that_no_member_has_is_damage(tmp_path: Path, size: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add_member(tar, "a.txt", b"A", pax_headers={"size": size})
    with pytest.raises(DataError, match="is damaged"):
        read(tmp_path / "a.tar")


def test_padding_of_every_length_that_writers_use_is_the_end(tmp_path: Path) -> None:
    for members_bytes in range(0, 24, 3):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            add_member(tar, "a.txt", b"A" * 512 * members_bytes)
        whole = (tmp_path / "a.tar").read_bytes()
        content = 512 * (1 + members_bytes)
        for size in (content + 512, content + 1024, len(whole)):  # a lone block, the two of the standard, a record
            (tmp_path / "a.tar").write_bytes(whole[:size])
            assert len(list(members(tmp_path / "a.tar"))) == 1


@pytest.mark.parametrize("name", ["webdataset", "parquet"])
def test_a_shard_without_samples_is_named(tmp_path: Path, name: str) -> None:
    write_source(name, tmp_path / "set", captioned(4))
    first = next(path for path in (tmp_path / "set").iterdir() if path.suffix in (".tar", ".parquet"))
    empty = first.with_name(f"zz-empty{first.suffix}")
    if first.suffix == ".tar":
        empty.write_bytes(bytes(tarfile.RECORDSIZE))
    else:
        pq.write_table(pq.read_table(first).slice(0, 0), empty)
    found = open_source(DataConfig(source=str(first.parent / f"*{first.suffix}"), sequence_length=100))
    assert len(list(found)) == 4
    assert [note for note in found.notes() if "no samples" in note] == [f"no samples in '{empty.name}'"]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_damaged_header_is_detected(tmp_path: Path, place: int) -> None:
    path = Path(write_source("webdataset", tmp_path / "set", captioned(4)), "part-000000.tar")
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[place].offset
    for damage in (bytes(512), bytes([whole[offset] ^ 1]) + whole[offset + 1 : offset + 512]):
        path.write_bytes(whole[:offset] + damage + whole[offset + 512 :])
        with pytest.raises(DataError, match=f"at byte {offset}\\b.*samples come before"):
            read(path)


def test_json_takes_precedence_over_txt(tmp_path: Path) -> None:
    record = {"id": 7, "split": "eval", "slice": "ocr", "conversations": conversation("<image>\nA?", "B.", "C?", "D.")}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "one.json", json.dumps(record).encode())
        add_member(tar, "one.txt", b"not used")
        add_member(tar, "one.jpg", png())
        add_member(tar, "two.json", b'{"url": "https://x", "width": NaN}')
        add_member(tar, "two.txt", b"Used.")
        add_member(tar, "two.cls", b"3")
        add_member(tar, "two.jpg", png())
    one, two = samples_in(tmp_path / "a.tar", caption_question="What?")
    assert (one.id, one.split, one.turns[1].slice, len(one.turns), len(one.images)) == ("7", "eval", "ocr", 2, 1)
    assert (two.id, two.turns[0].question, two.turns[0].answer, len(two.images)) == (
        "two",
        "<image>\nWhat?",
        "Used.",
        1,
    )


def test_images_of_a_sample_keep_their_order_in_the_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, seed in (("s.b.png", 1), ("s.a.png", 2)):
            add_member(tar, name, png(seed))
        add_member(tar, "s.txt", b"Two.")
    (sample,) = samples_in(tmp_path / "a.tar")
    assert [image.read() for image in sample.images] == [png(1), png(2)]
    assert sample.turns[0].question.startswith("<image>\n<image>\n")


# ---- Parquet


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("columns", "turns"),
    [
        ({"question": "A?", "answer": "B."}, [("<image>\nA?", "B.")]),
        ({"caption": "B."}, [("<image>\nWhat?", "B.")]),
        ({"conversations": conversation("<image>\nA?", "B.")}, [("<image>\nA?", "B.")]),
        ({"texts": [{"user": "A?", "assistant": "B."}, {"user": "C?", "assistant": "D."}]},
         [("<image>\nA?", "B."), ("C?", "D.")]),
        ({"turns": [{"question": "<image>\nA?", "answer": "B.", "slice": "x"}]}, [("<image>\nA?", "B.")]),
        ({"messages": [{"role": "user", "content": "<image>\nA?"}, {"role": "assistant", "content": "B."}]},
         [("<image>\nA?", "B.")]),
    ],
)  # fmt: skip
def test_text_may_stand_in_any_known_column(
    tmp_path: Path, columns: dict[str, Any], turns: list[tuple[str, str]]
) -> None:
    path = write_rows(tmp_path / "a.parquet", [{"image": {"bytes": png(), "path": "x.png"}} | columns])
    (sample,) = samples_in(path, caption_question="What?")
    assert [(turn.question, turn.answer) for turn in sample.turns] == turns
    assert [image.read() for image in sample.images] == [png()]


def test_an_image_may_be_bytes_a_list_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(3))
    for value, expected in (
        (png(1), [png(1)]),
        ([{"bytes": png(1), "path": None}, {"bytes": png(2), "path": None}], [png(1), png(2)]),
        ({"bytes": None, "path": "x.png"}, [png(3)]),
    ):
        name = "images" if isinstance(value, list) else "image"
        path = write_rows(tmp_path / "a.parquet", [{name: value, "text": "B."}])
        (sample,) = samples_in(path, image_folder=str(tmp_path))
        assert [image.read() for image in sample.images] == expected


def test_rows_without_an_id_have_one_by_content(tmp_path: Path) -> None:
    rows = [{"image": png(n % 2), "text": "B."} for n in range(3)]
    first, second, third = samples_in(write_rows(tmp_path / "a.parquet", rows))
    assert (first.id == third.id, first.id == second.id) == (True, False)
    assert first.content_digest() == third.content_digest()


def test_a_bad_row_is_one_reject(tmp_path: Path) -> None:
    rows = [{"image": png(), "text": "B."}, {"image": png(), "text": None}, {"image": None, "text": "B."}]
    good, bad, alone = read(write_rows(tmp_path / "a.parquet", rows))
    assert isinstance(good, Sample) and isinstance(alone, Reject) and alone.code == RejectCode.CONV_NO_MEDIA
    assert isinstance(bad, Reject) and (bad.code, bad.where) == (RejectCode.RECORD_FORM, "a.parquet row 2")


def write_arrow(path: Path, rows: list[dict[str, Any]], *, batch: int = 3) -> Path:
    """As Hugging Face's `save_to_disk` does: an Arrow stream of record batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch)
    return path


def test_a_data_set_saved_to_disk_is_read_with_its_splits(tmp_path: Path) -> None:
    for folder, first in (("train", 0), ("test", 5), ("extra", 10)):
        rows = [{"image": {"bytes": png(n), "path": None}, "text": f"Number {n}."} for n in range(first, first + 5)]
        write_arrow(tmp_path / "set" / folder / "data-00000-of-00001.arrow", rows)
        (tmp_path / "set" / folder / "state.json").write_text("{}")
    found = samples_in(tmp_path / "set")
    assert [sample.turns[0].answer for sample in found] == [
        f"Number {n}." for n in (*range(10, 15), *range(5, 10), *range(5))
    ]
    assert [sample.split for sample in found] == [None] * 5 + ["eval"] * 5 + ["train"] * 5
    assert [sample.images[0].read() for sample in found[-5:]] == [png(n) for n in range(5)]


def test_every_cut_of_an_arrow_stream_is_noticed(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", [{"image": png(n), "text": f"{n}"} for n in range(6)], batch=2)
    whole = path.read_bytes()
    assert len(samples_in(path)) == 6
    for size in range(0, len(whole), 64):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cannot be read after row|has the columns"):
            read(path)


def test_unusable_parquet_is_reported(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", [{"image": png(), "label": 3}])
    with pytest.raises(DataError, match="has the columns image, label"):
        read(path)
    path = write_rows(tmp_path / "b.parquet", [{"image": png(n), "text": "x"} for n in range(9)])
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match="cannot be read after row 0"):
        read(path)


# ---- COCO and CSV


def test_faults_of_single_captions_are_counted(tmp_path: Path) -> None:
    notes = [
        {"id": 1, "image_id": 1, "caption": "Good."},
        {"id": 2, "image_id": 5, "caption": "No such image."},
        {"id": 3, "caption": "No image."},
        {"id": 4, "image_id": 1},
        "no object",
        {"id": 5, "image_id": 2, "caption": "Outside."},
    ]
    images = [{"id": 1, "file_name": "1.png"}, {"id": 2, "file_name": "../2.png"}, {"file_name": "3.png"}, 7]
    (tmp_path / "coco.json").write_text(json.dumps({"images": images, "annotations": notes}))
    found = [item.code if isinstance(item, Reject) else item.id for item in read(tmp_path / "coco.json")]
    form = RejectCode.RECORD_FORM
    assert found == ["1", RejectCode.REF_MISSING, form, form, form, RejectCode.REF_UNSAFE_PATH]


def test_faults_of_single_lines_are_counted(tmp_path: Path) -> None:
    lines = [
        b'file_name,question,answer,split',
        b'1.png,"What, then?","A ""cat"".",eval',
        b'2.png,What?,,',
        b'3.png,What?',
        b',What?,That.,',
        b'4.png,What?,\xff,',
        b'../5.png,What?,That.,',
    ]  # fmt: skip
    (tmp_path / "metadata.csv").write_bytes(b"\r\n".join(lines))
    good, *bad = read(tmp_path)
    assert isinstance(good, Sample) and good.split == "eval"
    assert [(turn.question, turn.answer) for turn in good.turns] == [("<image>\nWhat, then?", 'A "cat".')]
    form = RejectCode.RECORD_FORM
    codes = [form, form, form, RejectCode.RECORD_ENCODING, RejectCode.REF_UNSAFE_PATH]
    assert [item.code for item in bad if isinstance(item, Reject)] == codes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has the columns none"),
        ("file,text\n1.png,x\n", "has the columns 'file', 'text'"),
        ("file_name,text\n", "holds no lines but the header"),
        ('file_name,text\n1.png,"open\n2.png,x\n', "is not CSV at line"),
    ],
)
def test_unusable_csv_is_reported(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "metadata.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)
