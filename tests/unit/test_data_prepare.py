"""Preparation from end to end on LLaVA files: nothing is lost, nothing half-made stays, equal input, equal bytes."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data_fixture import (
    conversation,
    corrupt,
    encode,
    job_config,
    llava_folder,
    picture,
    png,
    prepare_llava,
    record,
    run_prepare,
    write_json,
)
from trainer.data import prepare as prepare_module
from trainer.data.index import Index
from trainer.data.prepare import fingerprint
from trainer.data.rejects import Ledger, Reject, RejectCode
from trainer.data.samples import SPLITS, split_of
from trainer.data.shards import ShardReader, key_of
from trainer.errors import DataError, ExitCode, UserError
from trainer.storage import open_storage

ROOT = Path(__file__).parents[2]
Line = dict[str, Any] | bytes


def write_lines(path: Path, lines: list[Line]) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def prepared_files(uri: str) -> dict[str, bytes]:
    return {str(path.relative_to(uri)): path.read_bytes() for path in Path(uri).rglob("*") if path.is_file()}


# ---- the whole way


def test_a_llava_file_comes_back_as_it_was(tmp_path: Path) -> None:
    config, prepared = prepare_llava(tmp_path, shard_samples=7)
    index, reader = Index.load(prepared.uri), ShardReader(open_storage(prepared.uri))
    records = {line["id"]: line for line in json.loads(Path(config.data.source).read_text())}
    seen = set()
    for name in SPLITS:
        split = index.split(name)
        assert split.ids == sorted(split.ids)
        for number, identity in enumerate(split.ids):
            place = split.sample_location(number)
            turns = [text for turn in reader.turns(place) for text in (turn.question, turn.answer)]
            assert turns == [message["value"] for message in records[identity]["conversations"]]
            file = Path(config.data.image_folder, records[identity]["image"])
            assert reader.images(place) == [file.read_bytes()]
            assert split_of(identity, config.data.held_out_fraction) == name
            seen.add(identity)
    assert seen == set(records)
    assert prepared.counts == {
        "read": 40,
        "accepted": 40,
        "rejected": 0,
        "repaired": 0,
        "train": len(index.split("train")),
        "eval": len(index.split("eval")),
    }


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    _, prepared = prepare_llava(tmp_path, shard_samples=100)
    (shard,) = Path(prepared.uri, "shards").glob("train-*.tar")
    samples = list(webdataset.WebDataset(str(shard), shardshuffle=False))
    assert len(samples) == prepared.counts["train"]
    assert all({"__key__", "json", "0.png"} <= sample.keys() for sample in samples)


def test_the_index_describes_each_sample(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, count=10)
    rows = pq.read_table(Path(prepared.uri, "index.parquet")).to_pylist()
    for row in rows:
        assert (row["image_widths"], row["image_heights"], row["turns"]) == ([24], [24], 2)
        assert (row["image_tokens"], row["image_token_counts"]) == (16, [16])  # 32 pixels in patches of 8
        assert row["slices"] == ["all", "all"]
        with tarfile.open(Path(prepared.uri, row["shard"])) as tar:
            member = tar.getmember(row["key"] + ".0.png")
            assert (member.offset_data, member.size) == (row["image_offsets"][0], row["image_bytes"][0])
            assert tar.getmember(row["key"] + ".json").offset_data == row["json_offset"]


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    config, prepared = prepare_llava(tmp_path)
    other = config.model_copy(update={"run": config.run.model_copy(update={"root_uri": str(tmp_path / "other")})})
    again = run_prepare(other)
    assert not again.reused
    assert prepared_files(again.uri) == prepared_files(prepared.uri)


def test_several_images_of_one_sample_keep_their_order(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 3)
    turns = conversation("<image>\n<image>\nSame?", "no", "And <image>?", "no")
    lines = [record(n, image=["2.png", "0.png", "1.png"], conversations=turns) for n in range(20)]
    source = write_json(tmp_path / "a.json", lines)
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    uri = run_prepare(config).uri
    split = Index.load(uri).split("train")
    stored = ShardReader(open_storage(uri)).images(split.sample_location(0))
    assert stored == [png(2), png(0), png(1)]
    assert split.image_count[0] == 3 and split.image_token_counts(0) == [16, 16, 16]


def test_stats_say_what_guessing_scores(tmp_path: Path) -> None:
    lines = [
        {"id": str(n), "split": "train" if n < 8 else "eval", "conversations": conversation("q?", answer)}
        for n, answer in enumerate(["yes"] * 5 + ["no"] * 3 + ["yes", "no", "no", "no"])
    ]
    config = job_config(tmp_path / "root", source=str(write_json(tmp_path / "a.json", lines)))
    stats = json.loads(Path(run_prepare(config).uri, "stats.json").read_text())
    assert stats["slices"]["all"] == {
        "train_questions": 8,
        "eval_questions": 4,
        "majority_answer": "yes",
        "chance": 0.25,
    }
    assert stats["splits"]["train"]["samples"] == 8


def test_a_picture_in_both_splits_is_counted(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 2)
    lines = [record(0, id="a", split="train"), record(0, id="b", split="eval"), record(1, id="c", split="eval")]
    source = write_json(tmp_path / "a.json", lines)
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    stats = json.loads(Path(run_prepare(config).uri, "stats.json").read_text())
    assert stats["eval_images_also_in_train"] == 1


# ---- rejects: one fixture a code


def _unsafe(folder: Path) -> Line:
    (folder / "secret.png").write_bytes(png())
    return record(0, id="bad", image="../secret.png")


def _file(data: bytes) -> Callable[[Path], Line]:
    def make(folder: Path) -> Line:
        (folder / "images" / "bad.png").write_bytes(data)
        return record(0, id="bad", image="bad.png")

    return make


def _line(line: Line) -> Callable[[Path], Line]:
    return lambda folder: line


def _talk(*texts: str, **changes: Any) -> Callable[[Path], Line]:
    return _line(record(0, id="bad", conversations=conversation(*texts), **changes))


BAD: dict[RejectCode, Callable[[Path], Line]] = {
    RejectCode.JSON_ENCODING: _line(b'{"id": "\xff"}'),
    RejectCode.JSON_PARSE: _line(b'{"id": "bad", '),
    RejectCode.JSON_RECORD: _line({"id": "bad", "caption": "no conversations"}),
    RejectCode.ID_DUPLICATE: _line(record(0)),
    RejectCode.CONV_ROLES: _line(record(0, id="bad", conversations=conversation("<image>\nWhat?", "This.", "And?"))),
    RejectCode.CONV_IMAGE_COUNT: _talk("What?", "This."),
    RejectCode.CONV_TOO_LONG: _talk("<image>\nWhat?", "long " * 300),
    RejectCode.CONV_TOO_MANY_IMAGES: _talk("<image><image><image>\nWhat?", "This.", image=["0.png"] * 3),
    RejectCode.TEXT_EMPTY: _talk("<image>\nWhat?", " \n"),
    RejectCode.TEXT_SPECIAL_TOKEN: _talk("<image>\nWhat?", "This.</s>"),
    RejectCode.REF_MISSING: _line(record(0, id="bad", image="nothing.png")),
    RejectCode.REF_UNSAFE_PATH: _unsafe,
    RejectCode.IMAGE_EMPTY: _file(b""),
    RejectCode.IMAGE_UNIDENTIFIED: _file(b"<html>404</html>"),
    RejectCode.IMAGE_TOO_LARGE: _file(png(side=100)),
    RejectCode.IMAGE_TRUNCATED: _file(encode(picture(), "JPEG")[:-2]),
    RejectCode.IMAGE_DECODE_ERROR: _file(corrupt(png())),
    RejectCode.IMAGE_MODE: _file(encode(Image.new("F", (8, 8)), "TIFF")),
}


def prepare_with_bad(folder: Path, codes: list[RejectCode], **data: Any) -> str:
    images, records = llava_folder(folder, 20)
    lines: list[Line] = [*records, *(BAD[code](folder) for code in codes)]
    source = write_lines(folder / "data.jsonl", lines)
    settings = {"max_reject_fraction": 0.5, "max_image_pixels": 5000, "row_images": 2} | data
    config = job_config(folder / "root", source=str(source), image_folder=str(images), **settings)
    return run_prepare(config).uri


def test_every_code_has_a_fixture() -> None:
    assert set(BAD) == set(RejectCode)


@pytest.mark.parametrize("code", RejectCode)
def test_each_fault_is_rejected_with_its_own_code(tmp_path: Path, code: RejectCode) -> None:
    uri = prepare_with_bad(tmp_path, [code])
    (line,) = Path(uri, "rejects.jsonl").read_text().splitlines()
    reject = json.loads(line)
    assert reject["code"] == code
    assert reject["where"] == "data.jsonl line 21"
    summary = json.loads(Path(uri, "rejects_summary.json").read_text())
    assert (summary["read"], summary["accepted"], summary["rejected"]) == (21, 20, 1)
    assert summary["by_code"] == {code: 1}
    assert summary["examples"][code][0].startswith("data.jsonl line 21: ")


def test_every_code_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "data-formats.md").read_text().partition("## Reject codes")[2]
    assert set(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", page, re.MULTILINE)) == {str(code) for code in RejectCode}


@settings(max_examples=10, deadline=None)
@given(codes=st.lists(st.sampled_from(list(RejectCode)), max_size=12))
def test_accepted_and_rejected_add_up_to_read(
    tmp_path_factory: pytest.TempPathFactory, codes: list[RejectCode]
) -> None:
    uri = prepare_with_bad(tmp_path_factory.mktemp("law"), codes)
    summary = json.loads(Path(uri, "rejects_summary.json").read_text())
    index = Index.load(uri)
    assert summary["accepted"] + summary["rejected"] == summary["read"] == 20 + len(codes)
    assert sum(len(index.split(name)) for name in SPLITS) == summary["accepted"] == 20
    assert sum(summary["by_code"].values()) == len(Path(uri, "rejects.jsonl").read_text().splitlines())


def test_the_ledger_notices_a_lost_sample() -> None:
    ledger = Ledger(0.5)
    assert list(ledger.counting([1, 2])) == [1, 2]
    ledger.accept([])
    with pytest.raises(AssertionError, match="lost"):
        ledger.summary()
    ledger.reject(Reject("here", "id", RejectCode.TEXT_EMPTY, "why"))
    assert ledger.summary()["rejected"] == 1


def test_messages_from_the_data_cannot_write_to_a_terminal() -> None:
    ledger = Ledger(1.0)
    list(ledger.counting([1]))
    ledger.reject(Reject("here", "id", RejectCode.TEXT_EMPTY, "\x1b[2J\n" + "x" * 1000))
    (example,) = ledger.summary()["examples"][RejectCode.TEXT_EMPTY]
    assert example.isprintable() and len(example) < 350


def test_too_many_rejects_fail_with_the_top_codes_and_leave_nothing(tmp_path: Path) -> None:
    codes = [RejectCode.IMAGE_EMPTY] * 3 + [RejectCode.CONV_ROLES]
    with pytest.raises(DataError) as caught:
        prepare_with_bad(tmp_path, codes, max_reject_fraction=0.1)
    text = str(caught.value)
    assert caught.value.code == ExitCode.DATA
    assert "4 of 24 samples" in text and "data.max_reject_fraction" in text
    assert text.index("image.empty (") < text.index("conv.roles (")
    assert "data.jsonl line 24" in text
    assert not (tmp_path / "root" / "prepared").exists()


# ---- ids


def test_other_content_under_a_used_id_is_kept_apart_in_the_same_split(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 20)
    other = record(1, conversations=conversation("<image>\nAnother question?", "Yes."))
    source = write_json(tmp_path / "a.json", [*records, other])
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    prepared = run_prepare(config)
    index = Index.load(prepared.uri)
    ids = index.split(split_of("sample-1", config.data.held_out_fraction)).ids
    assert sum(identity == "sample-1" or identity.startswith("sample-1~") for identity in ids) == 2
    assert prepared.counts["repaired"] == 1


@given(st.text(max_size=150), st.text(max_size=150))
def test_keys_are_safe_and_tell_ids_apart(first: str, second: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,128}", key_of(first))
    assert (key_of(first) == key_of(second)) == (first == second)


# ---- long samples


def test_truncate_drops_the_last_turns_and_their_images(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 2)
    turns = conversation("<image>\nWhat?", "A picture.", "<image>\nAnd this?", "word " * 40)
    lines = [record(n, image=["0.png", "1.png"], conversations=turns) for n in range(20)]
    source = write_json(tmp_path / "a.json", lines)
    settings = {"source": str(source), "image_folder": str(images), "row_tokens": 70, "over_long": "truncate"}
    prepared = run_prepare(job_config(tmp_path / "root", **settings))
    split = Index.load(prepared.uri).split("train")
    assert set(split.turns.tolist()) == {1} and set(split.image_count.tolist()) == {1}
    assert split.tokens.max() <= 70
    assert prepared.counts["repaired"] == 20


# ---- reuse and leftovers


def test_a_second_run_reuses_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, prepared = prepare_llava(tmp_path)
    monkeypatch.setattr(prepare_module, "_build", None)
    again = run_prepare(config)
    assert again.reused
    assert (again.uri, again.fingerprint, again.counts) == (prepared.uri, prepared.fingerprint, prepared.counts)


def test_leftovers_without_done_are_cleaned_and_rebuilt(tmp_path: Path) -> None:
    config, prepared = prepare_llava(tmp_path)
    whole = prepared_files(prepared.uri)
    Path(prepared.uri, "DONE").unlink()
    Path(prepared.uri, "shards", "train-000099.tar").write_bytes(b"left over")
    Path(prepared.uri, "index.parquet").write_bytes(b"half")
    again = run_prepare(config)
    assert not again.reused
    assert prepared_files(again.uri) == whole


def test_prepared_data_with_a_file_missing_is_made_anew(tmp_path: Path) -> None:
    config, prepared = prepare_llava(tmp_path)
    whole = prepared_files(prepared.uri)
    Path(prepared.uri, "shards", "train-000000.tar").unlink()
    assert not run_prepare(config).reused
    assert prepared_files(prepared.uri) == whole


def test_an_interrupted_build_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_llava(tmp_path)
    assert not (tmp_path / "root" / "prepared").exists()


def test_a_full_disk_is_a_sentence_and_the_same_command_then_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="no space left") as caught:
        patch.setattr("tarfile.TarFile.addfile", full)
        prepare_llava(tmp_path)
    assert caught.value.code == ExitCode.CANNOT_WRITE
    images, source = tmp_path / "images", tmp_path / "data.json"
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    assert run_prepare(config).counts["accepted"] == 40


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"pack": False}, True),
        ({"held_out_fraction": 0.3}, False),
        ({"row_tokens": 300}, False),
        ({"max_samples": 5}, False),
        ({"max_reject_fraction": 0.5}, False),
        ({"image_size": 64}, False),
        ({"tokenizer": "train:301"}, False),
    ],
)
def test_the_fingerprint_changes_with_what_changes_the_bytes(
    tmp_path: Path, change: dict[str, Any], same: bool
) -> None:
    images, records = llava_folder(tmp_path, 3)
    source = write_json(tmp_path / "a.json", records)
    settings = {"source": str(source), "image_folder": str(images)}
    first = fingerprint(job_config(tmp_path, **settings))
    assert (fingerprint(job_config(tmp_path, **settings | change)) == first) is same


def test_the_fingerprint_does_not_depend_on_the_root(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 3)
    settings = {"source": str(write_json(tmp_path / "a.json", records)), "image_folder": str(images)}
    first, second = (fingerprint(job_config(tmp_path / root, **settings)) for root in ("a", "b"))
    assert first == second


def test_max_samples_uses_the_first_ones(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, max_samples=15)
    ids = {identity for name in SPLITS for identity in Index.load(prepared.uri).split(name).ids}
    assert ids == {f"sample-{number}" for number in range(15)}


def test_an_empty_split_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 held out"):
        prepare_llava(tmp_path, count=5, held_out_fraction=0.0001)


def test_nothing_held_out_is_allowed_when_asked_for(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, count=5, held_out_fraction=0.0)
    assert (prepared.counts["train"], prepared.counts["eval"]) == (5, 0)


def test_a_small_built_in_set_can_be_prepared(tmp_path: Path) -> None:
    prepared = run_prepare(job_config(tmp_path, source="builtin:digits", max_samples=60))
    assert prepared.counts["accepted"] == 60
    assert os.listdir(tmp_path / "prepared") == [prepared.fingerprint]


def test_a_stored_image_opens_as_grey_or_colour(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 20)
    (images / "3.png").write_bytes(encode(picture(103, mode="RGBA")))
    (images / "4.png").write_bytes(encode(picture(104), "WEBP"))
    source = write_json(tmp_path / "a.json", records)
    prepared = run_prepare(job_config(tmp_path / "root", source=str(source), image_folder=str(images)))
    index, reader = Index.load(prepared.uri), ShardReader(open_storage(prepared.uri))
    locations = index.unique_images().values()
    assert len(locations) == 20 and prepared.counts["repaired"] == 2
    for place in locations:
        image = Image.open(io.BytesIO(reader.read(place.shard, place.offset, place.bytes)))
        assert image.mode in ("L", "RGB") and image.format in ("PNG", "JPEG")
