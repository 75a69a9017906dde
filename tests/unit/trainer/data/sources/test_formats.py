"""Every format of a source: the same samples come out of it, its fingerprint follows every byte, on disk and in gs://."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.data.formats import FORMATS, QUESTION, Captioned, captioned, write_source
from tests.support.data.prepared import job_config, png, run_prepare
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.records import SHAPES, turns_of
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import SPLITS, Sample, Turn
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.data.sources import Source, open_source
from vlmpipe.trainer.data.sources.base import counted, records_from
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.gcs import GcsStorage

BUCKET = "gs://bucket/sets"


def opened(source: str) -> Source:
    return open_source(DataConfig(source=source, sequence_length=100))


def content(source: str) -> list[tuple[str, tuple[Turn, ...], list[bytes]]]:
    samples = list(opened(source))
    assert all(isinstance(sample, Sample) for sample in samples), samples
    return [(s.id, s.turns, [image.read() for image in s.images]) for s in samples if isinstance(s, Sample)]


def expected(samples: Sequence[Captioned]) -> list[tuple[str, tuple[Turn, ...], list[bytes]]]:
    return [(s.name, (Turn(f"<image>\n{QUESTION}", s.caption),), [s.image]) for s in samples]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGcs]:
    """A fake Cloud Storage behind every gs:// path."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    with FakeGcs(buckets=["bucket"]) as server:
        client = server.client()
        monkeypatch.setattr("vlmpipe.trainer.storage.gcs._default_client", lambda: client)
        yield server


def upload(folder: Path, source: str) -> str:
    """The folder's files in the bucket; returns the source there."""
    store = open_storage(BUCKET)
    assert isinstance(store, GcsStorage)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.upload(path, str(path.relative_to(folder)))
    return source.replace(str(folder), BUCKET)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_samples_each_time(name: str, tmp_path: Path) -> None:
    samples = captioned(7)
    source = write_source(name, tmp_path / "set", samples)
    assert content(source) == expected(samples)
    assert content(source) == expected(samples)


@pytest.mark.parametrize("name", FORMATS)
def test_bucket_and_folder_give_the_same_samples(name: str, tmp_path: Path, bucket: FakeGcs) -> None:
    samples = captioned(5)
    source = upload(tmp_path / "set", write_source(name, tmp_path / "set", samples))
    assert content(source) == expected(samples)


def change_image(samples: list[Captioned]) -> list[Captioned]:
    return [replace(samples[0], image=png(99)), *samples[1:]]


def change_text(samples: list[Captioned]) -> list[Captioned]:
    return [*samples[:-1], replace(samples[-1], caption="Something else.")]


@pytest.mark.parametrize("change", [change_image, change_text])
@pytest.mark.parametrize("name", FORMATS)
def test_a_fingerprint_stays_and_changes_with_the_data(
    name: str, change: Callable[[list[Captioned]], list[Captioned]], tmp_path: Path
) -> None:
    samples, folder = captioned(5), tmp_path / "set"
    source = write_source(name, folder, samples)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    first = opened(source).fingerprint()
    assert opened(source).fingerprint() == first
    write_source(name, folder, change(samples))
    for path in before:  # times that surely differ, however coarse the clock of the file system is
        os.utime(path, ns=(before[path] + 10**9, before[path] + 10**9))
    assert opened(source).fingerprint() != first


@pytest.mark.parametrize("name", FORMATS)
def test_a_fingerprint_in_a_bucket_follows_checksums_and_not_times(name: str, tmp_path: Path, bucket: FakeGcs) -> None:
    samples, folder = captioned(5), tmp_path / "set"
    source = upload(folder, write_source(name, folder, samples))
    first = opened(source).fingerprint()
    upload(folder, source)
    assert opened(source).fingerprint() == first
    write_source(name, folder, change_image(samples))
    upload(folder, source)
    assert opened(source).fingerprint() != first


@pytest.mark.parametrize("name", FORMATS)
def test_a_source_can_be_read_from_the_part_that_holds_a_record(name: str, tmp_path: Path) -> None:
    source = opened(write_source(name, tmp_path / "set", captioned(7)))
    whole, starts = [sample.where for sample in source], []  # type: list[str], list[int]
    assert [sample.where for sample in counted(source.parts(), starts)] == whole
    for number in range(len(whole)):
        records, first = records_from(source.parts(), starts, number)
        assert [sample.where for sample in records] == whole[first:]
        assert first == max(start for start in starts if start <= number)


def test_every_format_prepares_to_the_same_shards(tmp_path: Path) -> None:
    samples = captioned(12)
    found = {}
    for name in FORMATS:
        source = write_source(name, tmp_path / name, samples)
        # Captions of one picture stay together, so some formats split by the picture: hold nothing out here.
        prepared = run_prepare(job_config(tmp_path / "root" / name, source=source, validation_fraction=0.0))
        index, reader = Index.load(prepared.uri), ShardReader.open(open_storage(prepared.uri))
        split = index.split("train")
        found[name] = [
            (split.ids[n], reader.turns(split.sample_location(n)), reader.images(split.sample_location(n)))
            for n in range(len(split))
        ]
        assert sum(len(index.split(name)) for name in SPLITS) == 12
    assert all(content == expected(samples) for content in found.values())


def test_missing_image_is_a_reject_but_an_inaccessible_bucket_is_an_error(tmp_path: Path, bucket: FakeGcs) -> None:
    source = upload(tmp_path / "set", write_source("llava-json", tmp_path / "set", captioned(3)))
    open_storage(BUCKET).delete("picture-001.png")
    samples = [sample for sample in opened(source) if isinstance(sample, Sample)]
    assert samples[0].images[0].read() == captioned(1)[0].image
    with pytest.raises(RejectedError) as rejected:
        samples[1].images[0].read()
    assert rejected.value.code == RejectCode.REF_MISSING
    bucket.faults.append(Fault("status", code=403, times=100))
    with pytest.raises(UserError) as refused:
        samples[2].images[0].read()
    assert refused.value.code == ExitCode.NO_PERMISSION


ASKED, SAID, OTHER = ({"role": role, "content": text} for role, text in
                      (("user", "<image>\nWhat?"), ("assistant", "This."), ("assistant", "That.")))  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED, SAID], "rejected": "That."},
        {"messages": [ASKED, SAID], "rejected": [OTHER]},
        {"prompt": [ASKED], "chosen": [SAID], "rejected": [OTHER]},
        {"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]},
        {"question": "<image>\nWhat?", "answer": "This.", "rejected": " That. "},
    ],
)
def test_a_rejected_answer_is_found_beside_each_shape_of_a_conversation(record: dict[str, Any]) -> None:
    assert turns_of(Record(record), 1, "", tuple(SHAPES)) == (Turn("<image>\nWhat?", "This.", rejected="That."),)
