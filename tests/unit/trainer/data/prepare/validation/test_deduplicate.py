"""What preparation keeps on disk: ids, duplicates, leakage, answers and the sorted index."""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.data.formats import captioned, write_source
from tests.support.data.index import index_rows, lines_of, sort_lines
from tests.support.data.prepared import conversation, job_config, llava_folder, png, record, run_prepare, write_json
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.prepare import digest_files
from vlmpipe.trainer.data.prepare.validation import deduplicate
from vlmpipe.trainer.data.prepare.validation.deduplicate import (
    LONGEST_COUNTED_ANSWER,
    AnswerCounts,
    ContentCounts,
    SeenIds,
)
from vlmpipe.trainer.data.rejects import RejectCode
from vlmpipe.trainer.data.sample import SPLITS, Split, Turn
from vlmpipe.trainer.data.shards import index_lines, sorted_lines
from vlmpipe.trainer.data.shards.index_lines import LINES, SCHEMA, IndexLines

splits = st.sampled_from(SPLITS)


def stats_of(uri: str) -> dict[str, Any]:
    return dict(json.loads(Path(uri, "stats.json").read_text(encoding="utf-8")))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))))
def test_ids_are_new_once_and_then_the_same_or_other(pairs: list[tuple[str, str]]) -> None:
    seen, before = SeenIds(), []
    for identity, content in pairs:
        ids = {known for known, _ in before}
        times = before.count((identity, content))
        expected = f"same {times}" if times else "other" if identity in ids else "new"
        assert seen.add(identity, hashlib.sha256(content.encode()).hexdigest()) == expected
        before.append((identity, content))


digests = st.sampled_from([bytes([first]) * 15 + bytes([last]) for first in (0, 1, 255) for last in (0, 7)])


@given(st.lists(st.tuples(digests, splits)), st.integers(1, 5))
def test_content_is_counted_as_a_dictionary_would(things: list[tuple[bytes, Split]], at_once: int) -> None:
    with mock.patch.object(digest_files, "BUFFERED_ROWS", at_once):
        counts = ContentCounts()
        for start in range(0, len(things), at_once):
            piece = things[start : start + at_once]
            counts.add(
                digest_files.digests_of([digest for digest, _ in piece]),
                np.array([split == "train" for _, split in piece], np.bool_),
            )
        totals = counts.totals()
    found = {split: {digest for digest, where in things if where == split} for split in SPLITS}
    assert totals.distinct == {split: len(found[split]) for split in SPLITS}
    assert totals.in_both_splits == len(found["train"] & found["eval"])
    assert totals.repeats == len(things) - len(found["train"] | found["eval"])


def test_memory_of_counted_contents_does_not_grow_with_them() -> None:
    """A quarter of them is one content; the others are distinct."""
    piece, random = 1 << 12, np.random.default_rng(0)
    peaks = []
    for pieces in (1 << 5, 1 << 8):
        with mock.patch.multiple(digest_files, BUFFERED_ROWS=piece, SPOOLED_BYTES=piece):
            tracemalloc.start()
            counts = ContentCounts()
            for _ in range(pieces):
                contents = random.integers(0, 256, (piece, digest_files.DIGEST_BYTES), dtype=np.uint8)
                contents[::4] = 0
                counts.add(contents, np.ones(piece, np.bool_))
            assert counts.totals().repeats == pieces * piece // 4 - 1
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1 << 19, peaks


@given(st.lists(st.tuples(digests, st.integers(0, 5))), st.integers(1, 5))
def test_rows_that_are_not_summed_follow_each_other(things: list[tuple[bytes, int]], at_once: int) -> None:
    with mock.patch.object(digest_files, "BUFFERED_ROWS", at_once):
        files = digest_files.DigestFiles(summed=False)
        for digest, chunk in things:
            files.add(digest_files.digests_of([digest]), first=chunk)
        rows = [
            pair for some in files for pair in zip(digest_files.digest_bytes(some), some["first"].tolist(), strict=True)
        ]
        again = [pair for some in files for pair in digest_files.digest_bytes(some[digest_files.repeat_before(some)])]
    assert rows == sorted(things)
    assert len(again) == len(things) - len({digest for digest, _ in things})


answers_given = st.tuples(
    splits, st.sampled_from("pq"), st.sampled_from(["a", "b", "?" * 201]), st.sampled_from(["yes", "no", "y" * 65])
)


@given(st.lists(answers_given, max_size=60), st.integers(1, 4))
def test_answers_are_counted_as_a_counter_would(given_answers: list[tuple[Split, str, str, str]], least: int) -> None:
    counts, merged = AnswerCounts(), AnswerCounts()
    for split, name, question, answer in given_answers:
        counts.add(split, [Turn(f"{IMAGE_TOKEN}\n{question}", answer, name)])
    for part in (counts.rows()[:1], counts.rows()[1:]):
        merged.add_counted(part)
    with mock.patch.object(deduplicate, "MIN_REPEATS", least):
        found = merged.slices()
    assert set(found) == {name for _, name, _, _ in given_answers}
    for name, of_slice in found.items():
        mine = [(split, q, a) for split, n, q, a in given_answers if n == name]

        def majority(answers: list[str]) -> str | None:
            short = Counter(answer for answer in answers if len(answer) <= LONGEST_COUNTED_ANSWER)
            return min(short, key=lambda answer: (-short[answer], answer)) if short else None

        trained = [(q, a) for split, q, a in mine if split == "train"]
        times = Counter(q for q, _ in trained if len(q) == 1)
        constants = {q: majority([a for text, a in trained if text == q]) for q in times if times[q] >= least}
        constants = {q: answer for q, answer in constants.items() if answer}
        held_out = [(q, a) for split, q, a in mine if split == "eval"]
        assert of_slice["majority_answer"] == majority([a for _, a in trained])
        assert of_slice["question_answers"] == constants
        assert of_slice["eval_questions"] == len(held_out)
        right = [constants.get(q, of_slice["majority_answer"]) == a for q, a in held_out]
        assert of_slice["chance"] == (sum(right) / len(right) if right else None)


@settings(max_examples=12)
@given(ids=st.lists(st.text(max_size=8), unique=True, max_size=40), data=st.data())
def test_index_is_sorted_and_whole(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str], data: st.DataObject
) -> None:
    lines = [(data.draw(splits), identity) for identity in ids]
    folder = tmp_path_factory.mktemp("index")
    sizes = {"EVERY": data.draw(st.integers(1, 3)), "SORTED_ROWS": data.draw(st.integers(1, 9)), "MAX_FILES": 3}
    chunks = []
    with mock.patch.object(index_lines, "GROUP_LINES", 3), mock.patch.multiple(sorted_lines, **sizes):
        for start in range(0, max(1, len(lines)), 7):
            writer = IndexLines()
            for split, identity in lines[start : start + 7]:
                writer.add(**next(lines_of({identity: ["x"] * (len(identity) % 3)}, split)))
            chunks.append(folder / str(start))
            chunks[-1].mkdir()
            writer.write_lines(chunks[-1])
        sort_lines(folder, chunks)
    table = pq.read_table(chunks[0] / LINES)
    assert table.schema == SCHEMA
    assert list(zip(*table.select(["split", "id"]).to_pydict().values(), strict=True)) == sorted(lines[:7])
    rows = index_rows(folder)
    assert [(row["split"], row["id"], len(row["images"])) for row in rows] == [
        (split, identity, len(identity) % 3) for split, identity in sorted(lines)
    ]


@pytest.mark.parametrize(("every", "max_keys"), [(16, 1 << 15), (4, 256)])
def test_no_more_lines_than_asked_for_are_sorted_at_once(tmp_path: Path, every: int, max_keys: int) -> None:
    """Also of chunks of few lines whose ids are spread alike, as hashes of images are, and of few ids that are kept."""
    chance = random.Random(57)
    lengths: list[int] = []
    sorted_before: list[weakref.ref[pa.Table]] = []
    in_order = sorted_lines._in_order

    def counted(lines: pa.Table) -> pa.Table:
        assert not any(ref() for ref in sorted_before), "lines that were sorted before are freed"
        lengths.append(len(lines))
        result = in_order(lines)
        sorted_before.append(weakref.ref(result))
        return result

    sizes = {"EVERY": every, "MAX_KEYS": max_keys, "SORTED_ROWS": 256, "MAX_FILES": 4, "_in_order": counted}
    with mock.patch.multiple(sorted_lines, **sizes):
        lines = sorted_lines.SortedLines()
        for _ in range(64):
            table = pa.Table.from_pylist(
                [next(lines_of({f"{chance.getrandbits(64):016x}": []}, "eval")) for _ in range(64)], SCHEMA
            ).sort_by("id")
            lines.add(table, partial(lambda table: table, table))
        assert sum(map(len, lines._keys)) == 256
        lines.write_index(tmp_path, {"train": [], "eval": ["shard"]})
    assert sum(lengths) == 64 * 64 and max(lengths) <= 256 + 64, sorted(lengths)[-3:]


# ---- duplicates and leakage, from end to end


def test_repeated_images_and_samples_are_counted_whatever_their_ids(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 12)
    (images / "copy.png").write_bytes(png(1))
    other_text = conversation("<image>\nWhat else?", "Nothing.")
    lines = [
        *[record(n, split="train" if n < 10 else "eval") for n in range(12)],
        record(1, id="copy", image="copy.png", split="train"),  # the bytes and the text of sample-1
        record(2, id="talk", conversations=other_text, split="eval"),  # an image of train, with other text
        record(3, id="leak", split="eval"),  # a sample of train
    ]
    source = write_json(tmp_path / "a.json", lines)
    config = job_config(tmp_path / "root", source=str(source), image_folder=str(images))
    stats = stats_of(run_prepare(config).uri)
    assert stats["duplicates"] == {"images": 3, "samples": 2, "samples_dropped": 0}
    assert (stats["eval_images_also_in_train"], stats["eval_samples_also_in_train"]) == (2, 1)
    assert (stats["splits"]["train"]["unique_images"], stats["splits"]["eval"]["unique_images"]) == (10, 4)

    dropping = config.model_copy(update={"data": config.data.model_copy(update={"duplicates": "drop"})})
    prepared = run_prepare(dropping)
    stats = stats_of(prepared.uri)
    assert stats["duplicates"] == {"images": 1, "samples": 2, "samples_dropped": 2}
    assert stats["eval_samples_also_in_train"] == 0
    assert (prepared.counts["accepted"], prepared.counts["rejected"]) == (13, 2)
    rejects = Path(prepared.uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["code"] for line in rejects] == [RejectCode.SAMPLE_DUPLICATE] * 2


def test_histograms_hold_every_sample(tmp_path: Path) -> None:
    samples = [replace(s, caption="word " * n) for n, s in enumerate(captioned(20), 1)]
    source = write_source("webdataset", tmp_path / "set", samples)
    stats = stats_of(run_prepare(job_config(tmp_path / "root", source=source)).uri)
    for split in stats["splits"].values():
        histogram = split["sample_tokens_histogram"]
        assert sum(histogram["samples"]) == split["samples"] > 0
        assert len(histogram["edges"]) == len(histogram["samples"]) + 1
        assert split["images_per_sample"] == [0, split["samples"]]


@pytest.mark.parametrize(("duplicates", "accepted"), [("keep", 20), ("drop", 15)])
def test_repeated_records_without_ids_follow_the_run_file(tmp_path: Path, duplicates: str, accepted: int) -> None:
    images, records = llava_folder(tmp_path, 15)
    rows = [{key: value for key, value in one.items() if key != "id"} for one in [*records, *records[:4], records[0]]]
    source = write_json(tmp_path / "a.json", rows)
    settings = {"source": str(source), "image_folder": str(images), "duplicates": duplicates}
    prepared = run_prepare(job_config(tmp_path / "root", max_reject_fraction=0.0, **settings))
    assert (prepared.counts["accepted"], prepared.counts["rejected"]) == (accepted, 20 - accepted)
    ids = [row["id"] for row in index_rows(prepared.uri)]
    assert len(set(ids)) == accepted
