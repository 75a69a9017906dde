"""Rejects: every code has exactly one fixture, nothing read is lost, and too many stop the step."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.data.formats import add_member
from tests.support.data.prepared import (
    conversation,
    corrupt,
    encode,
    job_config,
    llava_folder,
    picture,
    png,
    preferring,
    record,
    run_prepare,
)
from tests.support.paths import ROOT
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.rejects import Ledger, Reject, RejectCode, rejected_for_tiles
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import DataError, ExitCode

Line = dict[str, Any] | bytes


def write_lines(path: Path, lines: list[Line]) -> Path:
    path.write_bytes(b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines))
    return path


# ---- one fixture a code


def _unsafe(folder: Path) -> Line:
    (folder / "secret.png").write_bytes(png())
    return record(0, id="bad", image="../secret.png")


def _file(data: bytes) -> Callable[[Path], Line]:
    name = f"bad-{zlib.crc32(data)}.png"

    def make(folder: Path) -> Line:
        (folder / "images" / name).write_bytes(data)
        return record(0, id="bad", image=name)

    return make


def _page(number: int, data: bytes) -> Callable[[Path], Line]:
    def make(folder: Path) -> Line:
        (folder / "images" / f"{number}.pdf").write_bytes(data)
        return record(0, id="bad", image=f"{number}.pdf#page={number}")

    return make


def _line(line: Line) -> Callable[[Path], Line]:
    return lambda folder: line


def _talk(*texts: str, **changes: Any) -> Callable[[Path], Line]:
    return _line(record(0, id="bad", conversations=conversation(*texts), **changes))


def _animation() -> bytes:
    frames = [picture(seed) for seed in (1, 2)]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:])


# vlmpipe's own format writes no thinking.
_THOUGHT_OVER = [turn | {"thinking": "Hm."} for turn in conversation("<image>\nWhat?", "This.")]

IN_LINES: dict[RejectCode, Callable[[Path], Line]] = {
    RejectCode.RECORD_ENCODING: _line(b'{"id": "\xff"}'),
    RejectCode.RECORD_PARSE: _line(b'{"id": "bad", '),
    RejectCode.RECORD_FORM: _line({"id": "bad", "title": "no conversations"}),
    RejectCode.ID_UNSAFE: _line(record(0, id="../bad")),
    RejectCode.ID_DUPLICATE: _line(record(0)),
    RejectCode.SAMPLE_DUPLICATE: _line(record(0, id="bad")),
    RejectCode.CONV_ROLES: _line(record(0, id="bad", conversations=conversation("<image>\nWhat?", "This.", "And?"))),
    RejectCode.CONV_IMAGE_COUNT: _talk("What?", "This."),
    RejectCode.RECORD_CONFLICT: _line(record(0, id="bad", images=["1.png"])),
    RejectCode.CONV_NO_MEDIA: _talk("<image>\n<audio> What?", "This."),
    RejectCode.CONV_LABELS: _line(record(0, id="bad", functions=[{"name": "look"}])),
    RejectCode.CONV_OBJECTS: _talk("<image>\nWhere is it?", "At <bbox>."),
    RejectCode.CONV_TEMPLATE: _line(record(0, id="bad", conversations=_THOUGHT_OVER)),
    RejectCode.CONV_TOO_LONG: _talk("<image>\nWhat?", "long " * 300),
    RejectCode.CONV_TOO_MANY_IMAGES: _talk("<image><image><image>\nWhat?", "This.", image=["0.png"] * 3),
    RejectCode.PAIR_INCOMPLETE: _talk("<image>\nWhat?", "This."),
    RejectCode.TEXT_EMPTY: _talk("<image>\nWhat?", " \n"),
    RejectCode.TEXT_SPECIAL_TOKEN: _talk("<image>\nWhat?", "This.</s>"),
    RejectCode.REF_MISSING: _line(record(0, id="bad", image="nothing.png")),
    RejectCode.REF_UNSAFE_CHARACTERS: _line(record(0, id="bad", image="a\u202egnp.png")),
    RejectCode.REF_UNSAFE_PATH: _unsafe,
    RejectCode.MEDIA_UNREADABLE: _page(1, b"%PDF-1.4 and no more"),
    RejectCode.MEDIA_MISSING_PART: _page(2, encode(picture(), "PDF")),
    RejectCode.IMAGE_EMPTY: _file(b""),
    RejectCode.IMAGE_UNIDENTIFIED: _file(b"<html>404</html>"),
    RejectCode.IMAGE_TOO_LARGE: _file(png(side=100)),
    RejectCode.IMAGE_TOO_SMALL: _file(png(side=3)),
    RejectCode.IMAGE_ASPECT: _file(encode(Image.new("RGB", (4, 100)))),
    RejectCode.IMAGE_ANIMATED: _file(_animation()),
    RejectCode.IMAGE_TRUNCATED: _file(encode(picture(), "JPEG")[:-2]),
    RejectCode.IMAGE_DECODE_ERROR: _file(corrupt(png())),
    RejectCode.IMAGE_MODE: _file(encode(Image.new("F", (8, 8)), "TIFF")),
}

IN_TARS: dict[RejectCode, Callable[[tarfile.TarFile], None]] = {
    RejectCode.TAR_UNSAFE_MEMBER: lambda tar: add_member(tar, "../bad.txt", b"Outside."),
    RejectCode.TAR_INCOMPLETE: lambda tar: add_member(tar, "bad.png", png()),
}

# Tokenizers of bytes, as trained ones are, know each character (prepare/validation/test_validate_sample.py); exclusions
# have a file of their own (exclusions/test_exclusion_file.py).
ELSEWHERE = frozenset({RejectCode.TEXT_NO_TOKENS, RejectCode.SAMPLE_EXCLUDED})

GOOD = 20
LIMITS = {
    "max_reject_fraction": 0.5,
    "max_image_pixels": 5000,
    "max_image_aspect": 20,
    "max_images_per_sequence": 2,
    "animated": "reject",
    "duplicates": "drop",
}


def prepare_lines(folder: Path, codes: list[RejectCode], **data: Any) -> str:
    """20 good records and one with each fault, whose ids differ where the fault is not in them."""
    images, records = llava_folder(folder, GOOD)
    if in_pairs := RejectCode.PAIR_INCOMPLETE in codes:
        records = [one | {"rejected": "Something else."} for one in records]
    bad = [IN_LINES[code](folder) for code in codes]
    lines: list[Line] = [*records, *(_with_id(line, f"bad{number}") for number, line in enumerate(bad))]
    source = write_lines(folder / "data.jsonl", lines)
    config = job_config(folder / "root", source=str(source), image_folder=str(images), **LIMITS | data)
    return run_prepare(preferring(config) if in_pairs else config).uri


def _with_id(line: Line, identity: str) -> Line:
    return line | {"id": identity} if isinstance(line, dict) and line.get("id") == "bad" else line


def prepare_tar(folder: Path, codes: list[RejectCode], **data: Any) -> str:
    with tarfile.open(folder / "data.tar", "w") as tar:
        for number in range(GOOD):
            add_member(tar, f"{number}.txt", f"Number {number}.".encode())
            add_member(tar, f"{number}.png", png(number))
        for code in codes:
            IN_TARS[code](tar)
    return run_prepare(job_config(folder / "root", source=str(folder / "data.tar"), **LIMITS | data)).uri


def test_every_code_has_exactly_one_fixture() -> None:
    assert sorted([*IN_LINES, *IN_TARS, *ELSEWHERE]) == sorted(RejectCode)


IN_PAIRS = [RejectCode.PAIR_INCOMPLETE]
ALONE = [code for code in IN_LINES if code not in IN_PAIRS]


@pytest.mark.parametrize(
    ("codes", "prepare", "where"),
    [
        (ALONE, prepare_lines, "data.jsonl line {}"),
        (IN_PAIRS, prepare_lines, "data.jsonl line {}"),
        ([*IN_TARS], prepare_tar, "data.tar "),
    ],
    ids=["lines", "pairs", "tars"],
)
def test_each_fault_is_rejected_with_its_own_code(
    tmp_path: Path, codes: list[RejectCode], prepare: Callable[..., str], where: str
) -> None:
    uri = prepare(tmp_path, codes, max_reject_fraction=1.0)
    lines = Path(uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    rejects = {reject["code"]: reject for reject in map(json.loads, lines)}
    summary = json.loads(Path(uri, "rejects_summary.json").read_text(encoding="utf-8"))
    assert (summary["read"], summary["accepted"], summary["rejected"]) == (GOOD + len(codes), GOOD, len(codes))
    assert summary["by_code"] == dict.fromkeys(codes, 1) and len(lines) == len(codes)
    for number, code in enumerate(codes, start=GOOD + 1):
        assert rejects[code]["where"].startswith(where.format(number)), rejects[code]
        assert summary["examples"][code][0].startswith(where.format(number))


def test_every_code_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "data-formats.md").read_text().partition("## Reject codes")[2]
    assert set(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", page, re.MULTILINE)) == {str(code) for code in RejectCode}


# ---- tars: what a member may be


def _link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Callable[[tarfile.TarFile], None]:
    return lambda tar: add_member(tar, name, b"", type=kind, linkname=target)


@pytest.mark.parametrize(
    ("code", "add"),
    [
        (RejectCode.TAR_UNSAFE_MEMBER, lambda tar: add_member(tar, "/abs/bad.txt", b"x")),
        (RejectCode.TAR_UNSAFE_MEMBER, lambda tar: add_member(tar, "a/../../bad.txt", b"x")),
        (RejectCode.TAR_UNSAFE_MEMBER, lambda tar: add_member(tar, "bad\nname.txt", b"x")),
        (RejectCode.TAR_UNSAFE_MEMBER, _link("bad.png", "/etc/passwd")),
        (RejectCode.TAR_UNSAFE_MEMBER, _link("bad.png", "0.png", tarfile.LNKTYPE)),
        (RejectCode.TAR_UNSAFE_MEMBER, _link("bad.png", "", tarfile.CHRTYPE)),
        (RejectCode.TAR_UNSAFE_MEMBER, _link("bad.png", "", tarfile.FIFOTYPE)),
        (RejectCode.TAR_INCOMPLETE, lambda tar: [add_member(tar, "bad.txt", b"x") for _ in range(2)]),
        (RejectCode.TAR_INCOMPLETE, lambda tar: [add_member(tar, f"bad.v{n}.txt", b"x") for n in range(2)]),
        (RejectCode.RECORD_PARSE, lambda tar: add_member(tar, "bad.json", b"{")),
        (RejectCode.RECORD_PARSE, lambda tar: add_member(tar, "bad.json", b"[" * 100_000)),
        (RejectCode.RECORD_PARSE, lambda tar: add_member(tar, "bad.json", b'{"id": ' + b"1" * 5000 + b"}")),
        (RejectCode.RECORD_FORM, lambda tar: add_member(tar, "bad.json", b"[1]")),
        (RejectCode.RECORD_ENCODING, lambda tar: add_member(tar, "bad.txt", b"\xff\xfe")),
        (RejectCode.RECORD_ENCODING, lambda tar: add_member(tar, "bad.json", b'{"caption": "\\ud800"}')),
    ],
)
def test_unsafe_member_is_rejected_without_its_neighbours(
    tmp_path: Path, code: RejectCode, add: Callable[[tarfile.TarFile], Any]
) -> None:
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        add_member(tar, "first.txt", b"One.")
        add(tar)
        add_member(tar, "last.txt", b"Two.")
    first, bad, last = open_source(DataConfig(source=str(tmp_path / "data.tar"), sequence_length=100))
    assert isinstance(bad, Reject) and bad.code == code
    assert (first.id, last.id) == ("first", "last")


# ---- the law, and the ledger that keeps it


@settings(max_examples=10)
@given(codes=st.lists(st.sampled_from(list(IN_LINES)), max_size=12))
def test_accepted_and_rejected_add_up_to_read(
    tmp_path_factory: pytest.TempPathFactory, codes: list[RejectCode]
) -> None:
    uri = prepare_lines(tmp_path_factory.mktemp("law"), codes)
    summary = json.loads(Path(uri, "rejects_summary.json").read_text(encoding="utf-8"))
    index = Index.load(uri)
    assert summary["accepted"] + summary["rejected"] == summary["read"] == 20 + len(codes)
    assert sum(len(index.split(name)) for name in SPLITS) == summary["accepted"] == 20
    assert sum(summary["by_code"].values()) == len(Path(uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines())


def test_the_ledger_notices_a_lost_sample() -> None:
    ledger = Ledger(0.5, io.StringIO())
    assert list(ledger.counting([1, 2])) == [1, 2]
    ledger.accept([])
    with pytest.raises(AssertionError, match="lost"):
        ledger.summary()
    ledger.reject(Reject("here", "id", RejectCode.TEXT_EMPTY, "why"))
    assert ledger.summary()["rejected"] == 1


def test_messages_from_the_data_cannot_write_to_a_terminal() -> None:
    ledger = Ledger(1.0, io.StringIO())
    list(ledger.counting([1]))
    ledger.reject(Reject("here\x1b", "id", RejectCode.TEXT_EMPTY, "\x1b[2J\n" + "x" * 1000))
    (example,) = ledger.summary()["examples"][RejectCode.TEXT_EMPTY]
    assert example.isprintable() and len(example) < 350


def test_too_many_rejects_fail_with_the_top_codes_and_leave_nothing(tmp_path: Path) -> None:
    codes = [RejectCode.IMAGE_EMPTY] * 3 + [RejectCode.CONV_ROLES]
    with pytest.raises(DataError) as caught:
        prepare_lines(tmp_path, codes, max_reject_fraction=0.1)
    text = str(caught.value)
    assert caught.value.code == ExitCode.DATA
    assert "4 of 24 samples" in text and "data.max_reject_fraction" in text
    assert text.index("image.empty (") < text.index("conv.roles (")
    assert "data.jsonl line 24" in text
    assert not (tmp_path / "root" / "prepared").exists()


def test_dropped_duplicates_do_not_count_as_faults(tmp_path: Path) -> None:
    codes = [RejectCode.SAMPLE_DUPLICATE]
    uri = prepare_lines(tmp_path, codes, max_reject_fraction=0.0)
    assert json.loads(Path(uri, "rejects_summary.json").read_text(encoding="utf-8"))["rejected"] == 1


def test_example_rejects_have_images(tmp_path: Path) -> None:
    uri = prepare_lines(tmp_path, [RejectCode.CONV_IMAGE_COUNT, RejectCode.IMAGE_EMPTY])
    pictures = json.loads(Path(uri, "rejects_summary.json").read_text(encoding="utf-8"))["pictures"]
    assert pictures[RejectCode.IMAGE_EMPTY] == [""]
    (name,) = pictures[RejectCode.CONV_IMAGE_COUNT]
    assert Image.open(Path(uri, name)).size == (24, 24)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("2 images in 34 tiles, more than data.max_images_per_sequence 32", 3),
        ("40 images, more than data.max_images_per_sequence 32", 0),
    ],
)
def test_data_of_a_version_that_counted_tiles_says_what_it_lacks(message: str, said: int) -> None:
    ledger = Ledger(1.0, io.StringIO())
    for number in ledger.counting(range(3)):
        ledger.reject(Reject(f"record {number}", "", RejectCode.CONV_TOO_MANY_IMAGES, message))
    summary = json.loads(json.dumps(ledger.summary()))
    notes = rejected_for_tiles(summary["by_code"], summary["examples"])
    assert [note.split()[0] for note in notes] == [str(said)] * bool(said)
