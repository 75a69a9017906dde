"""Preparation from end to end on LLaVA files: what comes out is what went in, and equal input gives equal bytes."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.support.data.index import index_rows, lines_of, write_collected
from tests.support.data.prepared import (
    conversation,
    encode,
    job_config,
    llava_folder,
    picture,
    png,
    prepare_llava,
    prepared_files,
    record,
    run_prepare,
    write_json,
)
from vlmpipe.trainer.data.packing import plan_packing
from vlmpipe.trainer.data.prepare.statistics import Counts, describe
from vlmpipe.trainer.data.sample import SPLITS
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.index_lines import IndexLines
from vlmpipe.trainer.data.shards.tar import ShardReader, key_of
from vlmpipe.trainer.errors import DataError
from vlmpipe.trainer.storage import open_storage

# ---- the whole way


def test_a_llava_file_comes_back_as_it_was(tmp_path: Path) -> None:
    config, prepared = prepare_llava(tmp_path, shard_samples=7)
    index, reader = Index.load(prepared.uri), ShardReader.open(open_storage(prepared.uri))
    records = {line["id"]: line for line in json.loads(Path(config.data.source).read_text(encoding="utf-8"))}
    seen = set()
    for name in SPLITS:
        split = index.split(name)
        assert list(split.ids) == sorted(split.ids)
        for number, identity in enumerate(split.ids):
            place = split.sample_location(number)
            turns = [text for turn in reader.turns(place) for text in (turn.question, turn.answer)]
            assert turns == [message["value"] for message in records[identity]["conversations"]]
            file = Path(config.data.image_folder, records[identity]["image"])
            assert reader.images(place) == [file.read_bytes()]
            seen.add(identity)
    assert seen == set(records)
    assert prepared.counts == {
        "read": 40,
        "accepted": 40,
        "rejected": 0,
        "repaired": 0,
        "train": len(index.split("train")),
        "eval": len(index.split("eval")),
        "images": 40,
        "samples_without_images": 0,
    }


def test_a_tokenizer_learns_from_a_bounded_number_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer keeps every distinct word in memory, so what it reads must not grow with the data."""
    rare = "xylophone" * 3

    def vocabulary(name: str, at: int) -> tuple[dict[str, int], int]:
        images, records = llava_folder(tmp_path / name)
        for number in range(at, at + 5):
            records[number]["conversations"][1]["value"] = " ".join([rare] * 2)
        source = write_json(tmp_path / name / "set.json", records)
        config = job_config(tmp_path / name / "root", source=str(source), image_folder=str(images))
        prepared = run_prepare(config)
        tokenizer = json.loads(Path(prepared.uri, "tokenizer/tokenizer.json").read_text(encoding="utf-8"))
        return tokenizer["model"]["vocab"], prepared.counts["accepted"]

    monkeypatch.setattr("vlmpipe.trainer.data.prepare.pipeline.TOKENIZER_SAMPLES", 10)
    early, accepted_early = vocabulary("early", at=0)
    late, accepted_late = vocabulary("late", at=30)
    assert accepted_early == accepted_late == 40
    assert any("xyl" in word for word in early)
    assert not any("xyl" in word for word in late)


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    _, prepared = prepare_llava(tmp_path, shard_samples=100)
    (shard,) = Path(prepared.uri, "shards").glob("train-*.tar")
    samples = list(webdataset.WebDataset(str(shard), shardshuffle=False))
    assert len(samples) == prepared.counts["train"]
    assert all({"__key__", "json", "0.png"} <= sample.keys() for sample in samples)


def test_the_index_describes_each_sample(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, count=20)
    rows = index_rows(prepared.uri)
    for row in rows:
        (image,) = row["images"]
        assert (image["width"], image["height"], row["turns"]) == (24, 24, 2)
        assert (row["image_tokens"], image["tokens"]) == (16, 16)  # 32 pixels in patches of 8
        assert row["slices"] == ["all", "all"]
        with tarfile.open(Path(prepared.uri, row["shard"])) as tar:
            member = tar.getmember(row["key"] + ".0.png")
            assert (member.offset_data, member.size) == (image["offset"], image["bytes"])
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
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images), split_by="record")
    uri = run_prepare(config).uri
    split = Index.load(uri).split("train")
    stored = ShardReader.open(open_storage(uri)).images(split.sample_location(0))
    assert stored == [png(2), png(0), png(1)]
    assert split.image_count[0] == 3 and split.image_token_counts(0) == [16, 16, 16]


LINES = st.lists(st.tuples(st.sampled_from(SPLITS), st.integers(1, 64), st.integers(0, 4)), max_size=60)


@given(lines=LINES, at_once=st.integers(1, 80), group=st.integers(1, 30))
def test_lengths_are_described_from_pieces_as_from_the_whole(
    lines: list[tuple[str, int, int]], at_once: int, group: int
) -> None:
    data = job_config(Path("unused"), source="unused", sequence_length=64, max_images_per_sequence=4).data
    index = IndexLines()
    for number, (split, tokens, images) in enumerate(lines):
        (line,) = lines_of({f"{number:02}": ["x"] * images}, split)
        index.add(**line | {"tokens": tokens, "label_tokens": tokens // 2, "turns": 1 + images})
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlmpipe.trainer.data.prepare.statistics.PACKED_AT_ONCE", at_once)
        patch.setattr("vlmpipe.trainer.data.shards.index_file.ROWS_READ", group)
        write_collected(Path(folder), index)
        described = describe(Path(folder), Counts(), data)["splits"]
    for name in SPLITS:
        tokens = np.array([tokens for split, tokens, _ in lines if split == name], np.int64)
        images = np.array([images for split, _, images in lines if split == name], np.int64)
        found = described[name]
        assert (found["samples"], found["tokens"], found["images"]) == (len(tokens), tokens.sum(), images.sum())
        assert (found["label_tokens"], found["turns"]) == ((tokens // 2).sum(), (1 + images).sum())
        assert found["images_per_sample"] == np.bincount(images).tolist()
        for percent, value in found["sample_tokens_percentiles"].items():
            assert value == pytest.approx(np.percentile(tokens, int(percent)) if len(tokens) else 0.0, abs=0.0501)
        bars, _ = np.histogram(tokens, 24, (0, tokens.max(initial=1)))
        assert found["sample_tokens_histogram"]["samples"] == bars.tolist()
        rows = len(plan_packing(tokens, images, sequence_length=64, max_images_per_sequence=4, seed=0, epoch=0))
        assert found["packed_sequences"] == rows or at_once < len(tokens)
        assert tokens.sum() <= 64 * found["packed_sequences"]
        if rows:
            assert found["packed_fill"] == round(int(tokens.sum()) / (found["packed_sequences"] * 64), 4)


def test_stats_say_what_guessing_scores(tmp_path: Path) -> None:
    lines = [
        {"id": str(n), "split": "train" if n < 8 else "eval", "conversations": conversation("q?", answer)}
        for n, answer in enumerate(["yes"] * 5 + ["no"] * 3 + ["yes", "no", "no", "no"])
    ]
    config = job_config(tmp_path / "root", source=str(write_json(tmp_path / "a.json", lines)))
    stats = json.loads(Path(run_prepare(config).uri, "stats.json").read_text(encoding="utf-8"))
    assert stats["slices"]["all"] == {
        "train_questions": 8,
        "eval_questions": 4,
        "majority_answer": "yes",
        "question_answers": {},
        "chance": 0.25,
    }
    assert stats["splits"]["train"]["samples"] == 8


def test_a_picture_in_both_splits_is_counted(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 2)
    lines = [record(0, id="a", split="train"), record(0, id="b", split="eval"), record(1, id="c", split="eval")]
    source = write_json(tmp_path / "a.json", lines)
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    stats = json.loads(Path(run_prepare(config).uri, "stats.json").read_text(encoding="utf-8"))
    assert stats["eval_images_also_in_train"] == 1


def test_a_copy_of_a_training_picture_in_another_encoding_is_counted_and_named(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 3)
    (images / "copy.jpg").write_bytes(encode(picture(1), "JPEG", quality=80))
    lines = [
        *(record(number, split="train") for number in range(2)),
        record(2, id="new", split="eval"),
        record(3, id="copied", image="copy.jpg", split="eval"),
    ]
    source = write_json(tmp_path / "a.json", lines)
    prepared = run_prepare(job_config(tmp_path / "root", source=str(source), image_folder=str(images)))
    stats = json.loads(Path(prepared.uri, "stats.json").read_text(encoding="utf-8"))
    found = stats["near_duplicates"]
    assert (found["eval_images"], found["searched"], found["without_signature"], found["compared"]) == (1, 2, 0, 1.0)
    (pair,) = found["pairs"]
    assert (pair["eval"], pair["train"]) == (["copied", 0], ["sample-1", 0]) and pair["distance"] > 0
    assert stats["eval_images_also_in_train"] == 0, "its bytes are others"
    assert "; 1 of 2 validation images look like training images" in prepared.notes


def test_max_samples_uses_the_first_ones(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, max_samples=15)
    ids = {identity for name in SPLITS for identity in Index.load(prepared.uri).split(name).ids}
    assert ids == {f"sample-{number}" for number in range(15)}


def test_empty_split_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 held out"):
        prepare_llava(tmp_path, count=5, validation_fraction=0.0001)


def test_nothing_held_out_is_allowed_when_asked_for(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, count=5, validation_fraction=0.0)
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
    index, reader = Index.load(prepared.uri), ShardReader.open(open_storage(prepared.uri))
    locations = index.unique_images().values()
    assert len(locations) == 20 and prepared.counts["repaired"] == 2
    for place in locations:
        image = Image.open(io.BytesIO(reader.read(place.shard, place.offset, place.bytes)))
        assert image.mode in ("L", "RGB") and image.format in ("PNG", "JPEG", "WEBP")


def test_failed_preparation_keeps_its_rejects_until_one_succeeds(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 20)
    (images / "3.png").write_bytes(b"no picture")
    (images / "4.png").unlink()
    settings = {"source": str(write_json(tmp_path / "a.json", records)), "image_folder": str(images)}
    config = job_config(tmp_path / "root", **settings)
    with pytest.raises(DataError, match=r"2 of 20 samples cannot be used: image\.unidentified 1, ref\.missing 1"):
        run_prepare(config)
    left = Path(config.run.run_uri, "rejected")
    assert [json.loads(line)["id"] for line in (left / "rejects.jsonl").open()] == ["sample-3", "sample-4"]
    summary = json.loads((left / "rejects_summary.json").read_text())
    assert (summary["read"], summary["accepted"], summary["rejected"]) == (20, 18, 2)
    (images / "3.png").write_bytes(png(3))
    (images / "4.png").write_bytes(png(4))
    run_prepare(config)
    assert not left.exists()


# ---- ids


def test_other_content_under_a_used_id_is_kept_apart_in_the_same_split(tmp_path: Path) -> None:
    images, records = llava_folder(tmp_path, 20)
    other = record(1, conversations=conversation("<image>\nAnother question?", "Yes."))
    source = write_json(tmp_path / "a.json", [*records, other])
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    prepared = run_prepare(config)
    index = Index.load(prepared.uri)
    splits = [[i for i in index.split(name).ids if i == "sample-1" or i.startswith("sample-1~")] for name in SPLITS]
    assert sorted(map(len, splits)) == [0, 2]
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
    settings = {
        "source": str(source),
        "image_folder": str(images),
        "split_by": "record",
        "sequence_length": 70,
        "overlong_policy": "truncate",
    }
    prepared = run_prepare(job_config(tmp_path / "root", **settings))
    split = Index.load(prepared.uri).split("train")
    assert set(split.turns.tolist()) == {1} and set(split.image_count.tolist()) == {1}
    assert split.tokens.max() <= 70
    assert prepared.counts["repaired"] == 20
