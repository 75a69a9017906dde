"""Preparation in chunks: the same bytes whoever does the work, and only what is new is done again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.chunks import RECORDS, ChunkedSet, fixed_tokenizer, progress_of
from tests.support.data.index import index_rows
from tests.support.data.prepared import conversation, png, prepared_files, record, run_prepare
from vlmpipe.components.runtime.prepared_data import prepare_run
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare.chunks import chunk as chunk_module
from vlmpipe.trainer.data.prepare.chunks import prepare as prepare_module
from vlmpipe.trainer.data.prepare.chunks.plan import LARGEST, SMALLEST, ends_chunk
from vlmpipe.trainer.data.prepare.chunks.prepare import processes_for
from vlmpipe.trainer.data.prepare.pipeline import ChunkCounts, plan_chunks, prepare_share
from vlmpipe.trainer.data.sample import SPLITS, Sample, stable_digest
from vlmpipe.trainer.data.sources.llava import LlavaSource
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fixed_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def data(memory: Path, tokenizer: str) -> ChunkedSet:
    return ChunkedSet(memory, tokenizer)


# ---- cuts


def cut(ids: list[str], size: int) -> list[list[str]]:
    chunks: list[list[str]] = [[]]
    for identity in ids:
        chunks[-1].append(identity)
        if ends_chunk(identity, len(chunks[-1]), size):
            chunks.append([])
    return [chunk for chunk in chunks if chunk]


@given(seed=st.integers(0, 1000), count=st.integers(1, 600), more=st.integers(1, 50), size=st.integers(2, 40))
def test_records_that_are_appended_change_the_last_chunk_only(seed: int, count: int, more: int, size: int) -> None:
    ids = [stable_digest(seed, number) for number in range(count + more)]
    before, after = cut(ids[:count], size), cut(ids, size)
    assert [identity for chunk in after for identity in chunk] == ids
    assert after[: len(before) - 1] == before[:-1]
    assert all(SMALLEST * size <= len(chunk) <= LARGEST * size for chunk in after[:-1])


@pytest.mark.parametrize("change", ["insert", "remove"])
def test_a_record_in_the_middle_changes_few_chunks(change: str) -> None:
    ids = [stable_digest("middle", number) for number in range(20_000)]
    place = len(ids) // 2
    changed = [*ids[:place], "new", *ids[place:]] if change == "insert" else ids[:place] + ids[place + 1 :]
    before, after = cut(ids, 100), cut(changed, 100)
    assert len({tuple(chunk) for chunk in after} - {tuple(chunk) for chunk in before}) <= 8 < len(after) / 20
    assert 80 < len(ids) / len(before) < 120


# ---- the same bytes, whoever does it


def in_tasks(config: JobConfig) -> None:
    tasks = config.data.tasks
    planned = plan_chunks(config, progress_of(config))
    assert planned.chunks > 3
    assert all(prepare_share(config, planned.fingerprint, task, tasks, progress_of(config)) for task in range(tasks))


@pytest.mark.parametrize(
    "fields",
    [pytest.param({"tasks": 3}, marks=pytest.mark.slow), {"tasks": 4, "duplicates": "drop"}],
    ids=["keep", "drop"],
)
def test_the_bytes_do_not_depend_on_the_number_of_tasks(data: ChunkedSet, fields: dict[str, Any]) -> None:
    data.spoil()
    alone = run_prepare(data.config("alone", duplicates=fields.get("duplicates", "keep")))
    config = data.config("together", **fields)
    in_tasks(config)
    together = run_prepare(config)
    assert together.fingerprint == alone.fingerprint and not together.reused
    assert alone.chunks and together.chunks and alone.chunks.total > 3
    # What repeats across chunks is only known when all are done: the one with it is prepared again, without it.
    assert together.chunks.prepared == (1 if "duplicates" in fields else 0)
    assert prepared_files(together.uri) == prepared_files(alone.uri)


def test_tasks_read_each_record_of_the_source_once(data: ChunkedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the records of a file before a task's first one."""
    lines = [json.dumps(line) + "\n" for line in data.records]
    folder = data.folder / "files"
    folder.mkdir()
    for start in range(0, RECORDS, 5):
        (folder / f"{start:03}.jsonl").write_text("".join(lines[start : start + 5]))
    config, tasks, read = data.config(source=str(folder)), 4, list[str]()
    plain = LlavaSource.sample

    def reading(self: LlavaSource, where: str, record: dict[str, Any]) -> Sample:
        read.append(where)
        return plain(self, where, record)

    planned = plan_chunks(config, progress_of(config))
    monkeypatch.setattr(LlavaSource, "sample", reading)
    for task in range(tasks):
        assert prepare_share(config, planned.fingerprint, task, tasks, progress_of(config))
    assert len(set(read)) == RECORDS and len(read) <= RECORDS + 5 * tasks


@pytest.mark.parametrize("duplicates", ["keep", pytest.param("drop", marks=pytest.mark.slow)])
def test_chunks_give_the_same_reports_as_the_whole(data: ChunkedSet, duplicates: str) -> None:
    """All but the shards' ends, and so the places in them, is as in one piece."""
    data.spoil()
    chunked = run_prepare(data.config("chunks", duplicates=duplicates))
    whole = run_prepare(data.config("whole", duplicates=duplicates, chunk_samples=1000))
    assert chunked.chunks and chunked.chunks.total > 3 and whole.chunks == ChunkCounts(1, 1)
    assert chunked.counts == whole.counts and whole.counts["read"] == RECORDS
    assert whole.counts["rejected"] == (6 if duplicates == "drop" else 4)
    found, expected = (index_rows(made.uri) for made in (chunked, whole))
    for row in (*found, *expected):
        del row["shard"], row["json_offset"]
        for image in row["images"]:
            del image["offset"]
    assert found == expected
    for made in (chunked, whole):
        lines = Path(made.uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["where"] for line in lines][:2] == ["set.jsonl line 6", "set.jsonl line 21"]
    for name in ("rejects.jsonl", "rejects_summary.json", "stats.json", "contact_sheet.json"):
        assert Path(chunked.uri, name).read_bytes() == Path(whole.uri, name).read_bytes()
    pictures = {name: data for name, data in prepared_files(whole.uri).items() if name.endswith(".png")}
    assert pictures and pictures.items() <= prepared_files(chunked.uri).items()


def test_killed_preparation_resumes(data: ChunkedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_prepare(data.config("whole"))
    built = []

    def build(*arguments: Any, **options: Any) -> str:
        if len(built) == 2:
            raise KeyboardInterrupt
        built.append(1)
        return str(chunk_build(*arguments, **options))

    chunk_build = chunk_module.build_chunk
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chunk_module, "build_chunk", build)
        run_prepare(data.config())
    assert not (data.folder / "root" / "prepared").exists()
    again = run_prepare(data.config())
    assert whole.chunks and again.chunks == ChunkCounts(whole.chunks.total, whole.chunks.total - 2)
    assert prepared_files(again.uri) == prepared_files(whole.uri)


def test_processes_are_started_for_records_that_take_longer_than_their_start(
    data: ChunkedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "cores", lambda: 4)
    assert [processes_for(chunks, 50_000) for chunks in (1, 3, 5, 100)] == [0, 1, 2, 4]
    assert [processes_for(100, records) for records in (999, 1_999, 2_000, 50_000)] == [0, 1, 2, 4]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert RECORDS > 4 * 2 and run_prepare(data.config(workers=0)).chunks, "a few records in many chunks"


def test_ended_worker_process_is_reported(data: ChunkedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="a process that prepared data ended with code 1"):
        run_prepare(data.config(workers=2))


def test_worker_error_is_raised_unchanged(data: ChunkedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"found": "the disk is upside down", "expected": "this side up", "fix": "turn it", "code": 73}
    program = data.folder / "python"
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'error': error})}'\ncat > /dev/null\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(UserError, match="upside down") as caught:
        run_prepare(data.config(workers=2))
    assert (caught.value.expected, caught.value.fix, caught.value.code) == ("this side up", "turn it", 73)


# ---- only what is new


def splits_of(uri: str) -> dict[str, str]:
    return {row["id"]: row["split"] for row in index_rows(uri)}


def shard_bytes(uri: str) -> set[bytes]:
    return {data for name, data in prepared_files(uri).items() if name.endswith(".tar")}


def test_only_the_chunks_of_new_records_are_prepared(data: ChunkedSet) -> None:
    before = run_prepare(data.config())
    assert before.changes is None
    for number in range(RECORDS, RECORDS + 6):
        (data.images / f"{number}.png").write_bytes(png(number))
        data.records.append(record(number))
    after = run_prepare(data.config())
    assert before.chunks and after.chunks and after.chunks.prepared <= 2 < after.chunks.total
    assert after.changes and after.changes.before == before.fingerprint
    assert (after.changes.new, after.changes.same) == (6, RECORDS)
    assert (after.changes.changed, after.changes.gone, after.changes.moved) == (0, 0, 0)
    assert splits_of(before.uri).items() <= splits_of(after.uri).items()
    # The last chunk has a last shard of each split; all others are as they were.
    assert len(shard_bytes(before.uri) - shard_bytes(after.uri)) <= len(SPLITS)
    assert prepared_files(run_prepare(data.config("fresh")).uri) == prepared_files(after.uri)
    assert run_prepare(data.config()).changes == after.changes.__class__(after.fingerprint, same=RECORDS + 6)


def test_changed_and_gone_samples_are_counted_and_rejects_keep_their_places(data: ChunkedSet) -> None:
    data.spoil()
    before = run_prepare(data.config())
    (data.images / "30.png").write_bytes(png(1030))  # as many pixels, other ones
    data.records.insert(0, record(59, id="in front", conversations=conversation("q?", "a"), image=None))
    del data.records[-1]
    after = run_prepare(data.config())
    assert after.chunks and after.chunks.prepared <= after.chunks.total - 2
    assert after.changes and (after.changes.new, after.changes.changed, after.changes.gone) == (1, 1, 1)
    assert after.changes.same == before.counts["accepted"] - 2
    fresh = run_prepare(data.config("fresh"))
    assert prepared_files(fresh.uri) == prepared_files(after.uri)
    lines = Path(after.uri, "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["where"] == "set.jsonl line 7"


def test_other_settings_prepare_all_chunks_anew_and_say_who_moved(data: ChunkedSet) -> None:
    before = run_prepare(data.config())
    after = run_prepare(data.config(validation_fraction=0.6))
    assert after.chunks and after.chunks.prepared == after.chunks.total
    old, new = splits_of(before.uri), splits_of(after.uri)
    assert after.changes and after.changes.same == RECORDS
    assert after.changes.moved == sum(old[identity] != new[identity] for identity in old) > 0


@pytest.mark.parametrize("name", ["shards/train-000000.tar", "index.parquet"])
def test_damaged_chunk_is_not_reused(data: ChunkedSet, name: str) -> None:
    prepared = run_prepare(data.config())
    whole = prepared_files(prepared.uri)
    (chunk, *_) = sorted((data.folder / "root" / "chunks").glob(f"*/{name}"))
    damaged = bytearray(chunk.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    chunk.write_bytes(damaged)  # a shard is one file with the set's own
    Path(prepared.uri, "DONE").unlink()
    again = run_prepare(data.config())
    assert again.chunks and again.chunks.prepared == 1
    assert prepared_files(again.uri) == whole


def test_without_the_chunks_a_set_is_whole(data: ChunkedSet) -> None:
    prepared = run_prepare(data.config())
    whole = prepared_files(prepared.uri)
    open_storage(str(data.folder / "root")).delete_folder("chunks")
    again = run_prepare(data.config())
    assert again.reused and again.changes is None
    assert prepared_files(again.uri) == whole


def test_run_records_the_changes_of_its_data(data: ChunkedSet) -> None:
    before = data.config()
    prepare_run(before, progress_of(before))
    data.records.append(record(3, id="one more"))
    config = data.config()
    for state in ("done", "reused"):  # the step runs again, and finds nothing new
        progress = progress_of(config)
        prepare_run(config, progress)
        assert progress.record.state == state
        noted = json.loads(open_storage(config.run.run_uri).read("data_changes.json"))
        assert (noted["changes"]["new"], noted["changes"]["same"], noted["chunks"]["prepared"]) == (1, RECORDS, 1)
        if state == "done":
            assert "1 new, 60 same; 1 of 8 chunks prepared here" in progress.record.message
