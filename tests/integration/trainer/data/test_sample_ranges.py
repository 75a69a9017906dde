"""Samples of a bucket read by range: the same as from whole shards, and damage is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.gcs.server import FakeGcs, Fault
from tests.support.data.bucket_shards import EPOCHS, SHUFFLE_SHARDS, BucketShards
from tests.support.gcs import QUICK_RETRY
from tests.support.trainer.shared_prefixes import LLAVA, job_of, write_questions
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.sample_ranges import SampleRanges
from vlmpipe.trainer.data.shards.shard_reading import LOOKED_UP, ShardReading
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.errors import DataError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage.gcs import GcsStorage
from vlmpipe.trainer.storage.local import LocalStorage

SHARD = r"/o/.*\.tar\?.*alt=media"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketShards]:
    with FakeGcs(["bucket"]) as server:
        yield BucketShards(tmp_path_factory.mktemp("data"), server)


@pytest.fixture
def data(prepared: BucketShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketShards]:
    """The data, with what a test changes in the bucket restored after it."""
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    server, remote = prepared.server, prepared.remote
    objects = dict(server.buckets["bucket"])
    yield prepared
    server.buckets["bucket"], prepared.remote = objects, remote
    server.faults.clear()
    server.requests.clear()


def samples_read(data: BucketShards) -> list[int]:
    """Numbers of the samples of all steps, in order."""
    plans = [data.sequence.plan(epoch) for epoch in range(EPOCHS)]
    return [number for plan in plans for row in range(len(plan)) for number in plan.members_of(row).tolist()]


@pytest.mark.parametrize("first_step", [0, 7])
def test_samples_by_range_are_those_of_whole_shards(data: BucketShards, first_step: int) -> None:
    assert data.rows_of(data.by_range(), first_step) == data.rows(data.local, 0, first_step)


@pytest.mark.parametrize("images", [True, False])
def test_a_sample_is_one_request_and_nothing_beside_it_is_read(data: BucketShards, images: bool) -> None:
    loader = data.by_range(images=images)
    data.server.downloads.clear()
    data.server.requests.clear()
    data.rows_of(loader)
    sent = [size for name, size in data.server.downloads if name.endswith(".tar")]
    assert len(sent) == len(data.server.requests) == len(samples_read(data))
    places = [data.split.sample_location(number) for number in samples_read(data)]
    needed = [place.json_bytes + (sum(place.image_bytes) if images else 0) for place in places]
    headers = sum(2 * 1024 * len(place.image_bytes) for place in places) if images else 0
    assert sum(needed) <= sum(sent) <= sum(needed) + headers
    assert sum(needed) == pytest.approx(len(needed) * data.split.mean_stored_bytes(images=images))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", path=SHARD, times=3),
        Fault("drop_before", path=SHARD, times=2),
        Fault("corrupt", path=SHARD),
        Fault("truncate", path=SHARD),
    ],
    ids=lambda fault: fault.action,
)
def test_faults_on_the_way_change_nothing(data: BucketShards, fault: Fault) -> None:
    loader = data.by_range()
    data.server.faults.append(replace(fault))
    assert data.rows_of(loader) == data.rows(data.local, 0)
    assert data.server.faults[0].times == 0


def test_a_store_that_stays_away_ends_the_job_in_words(data: BucketShards) -> None:
    quick = QUICK_RETRY.with_timeout(0.2)
    data.remote = GcsStorage(data.remote.root_uri, client=data.server.client(), retry=quick)
    loader = data.by_range(patience_s=0.3)
    data.server.faults.append(Fault("status", path="/o/", times=10_000))
    with pytest.raises(UserError, match=r"reading samples of a bucket failed since .*did not answer") as caught:
        loader.sequences_for_step(0, 0, 1)
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_a_shard_that_is_replaced_meanwhile_is_named(data: BucketShards) -> None:
    loader = data.by_range()
    shard = data.split.sample_location(samples_read(data)[0]).shard
    data.remote.write(shard, data.remote.read(shard))  # the same bytes: what matters is that it is another object
    with pytest.raises(DataError, match=f"{shard} is damaged: it was replaced while training read it"):
        data.rows_of(loader)


def test_shards_that_differ_from_the_manifest_are_refused_before_the_first_step(data: BucketShards) -> None:
    shard = data.split.shards[0]
    content = data.remote.read(shard)
    data.remote.write(shard, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=f"{shard} is damaged: its checksum .* differs from that in DONE"):
        data.by_range()
    data.remote.write(shard, content[:-1])
    with pytest.raises(DataError, match=f"{shard} is damaged: .* bytes instead of"):
        data.by_range()
    data.remote.delete(shard)
    with pytest.raises(DataError, match=f"{shard} is damaged: it is missing"):
        data.by_range()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_any_flipped_bit_that_training_uses_is_noticed(data: BucketShards, drawn: st.DataObject) -> None:
    """Also in the store itself, where the version stays the same."""
    number = drawn.draw(st.integers(0, len(data.split) - 1))
    place = data.split.sample_location(number)
    reader = SampleRanges(data.split, data.local, {place.shard: ""}, images=True, patience_s=1.0)
    reader.expect([number])
    turns, images = reader.turns(number), reader.images(number)
    path = data.local.path(place.shard)
    whole = path.read_bytes()
    parts = [(place.json_offset, place.json_bytes), *zip(place.image_offsets, place.image_bytes, strict=True)]
    offset, size = drawn.draw(st.sampled_from(parts))
    at = 8 * offset + drawn.draw(st.integers(0, 8 * size - 1))
    damaged = bytearray(whole)
    damaged[at // 8] ^= 1 << at % 8
    path.write_bytes(damaged)
    try:
        reader.expect([number])
        learned = [turn.identity() for turn in reader.turns(number)]
        assert (learned, reader.images(number)) == ([turn.identity() for turn in turns], images)
        assert offset == place.json_offset, "a bit of an image"
    except DataError as error:
        assert (
            place.shard in error.found and "differs from the index" in error.found
        ) or "cannot be read" in error.found
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("shares", [True, False])
def test_images_that_are_stored_with_another_sample_are_read_once_a_sequence(
    shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shares: whether samples of a sequence share the prefix of their images, too."""
    job = job_of(tmp_path, LLAVA, write_questions(tmp_path / "data") | {"share_prefix": "on"})
    uri = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True)).uri
    local, split = LocalStorage(uri), Index.load(uri).split("train")
    assert len({tuple(place) for place in split.image_places(np.arange(len(split.images()))).tolist()}) == 7
    reads: list[tuple[int, int]] = []

    def noted(shard: str, start: int, end: int, *, version: str) -> bytes:
        reads.append((start, end))
        return read_range(shard, start, end, version=version)

    read_range = local.read_range
    monkeypatch.setattr(local, "read_range", noted)
    groups = split.prefix_groups(0) if shares else None
    sampler = PackedBatchSampler(split, job.data, seed=0, global_batch_size=2, prefixes=groups)
    ranges = SampleRanges(split, local, dict.fromkeys(split.shards, ""), images=True, patience_s=1.0)
    chat, reader = Chat.load(local, image_form_of(job.model)), ShardReader.open(LocalStorage(uri))
    by_range = PackedLoader(split, sampler, chat, reader, images=True, ranges=ranges)
    whole = PackedLoader(split, sampler, chat, reader, images=True)
    for step in range(sampler.num_steps(1)):
        found, expected = (loader.sequences_for_step(step, 0, 1) for loader in (by_range, whole))
        assert [row.images for row in found] == [row.images for row in expected]
        assert [row.input_ids.tolist() for row in found] == [row.input_ids.tolist() for row in expected]
    own = {split.sample_location(number).json_offset for number in range(len(split))}
    of_images = [start for start, _ in reads if start not in own]
    assert len(reads) - len(of_images) == len(split), "a request a sample"
    assert len(of_images) <= 2 if shares else len(of_images) > len(split) / 2


@pytest.mark.parametrize("cached_shards", [100, 2 * SHUFFLE_SHARDS, 1])
def test_requests_of_whole_shards_are_about_what_is_calculated(data: BucketShards, cached_shards: int) -> None:
    """The calculation by which `auto` chooses, beside what the bucket was asked."""
    largest = max(data.sizes.values())
    data.server.downloads.clear()
    data.rows(data.remote, cached_shards * largest)
    steps = data.sequence.num_steps(EPOCHS)
    case = ShardReading(
        shards=len(data.sizes),
        shard_bytes=sum(data.sizes.values()) / len(data.sizes),
        sample_bytes=1.0,
        samples_drawn=len(samples_read(data)),
        epochs=EPOCHS,
        steps=steps,
        groups=1,
        machine_ranks=1,
        cache_bytes=cached_shards * largest,
        shuffle_shards=SHUFFLE_SHARDS,
    )
    calculated = case.whole().requests - LOOKED_UP * len(data.sizes)
    fetched = sum(count for name, count in data.downloads().items() if name.endswith(".tar"))
    assert fetched == pytest.approx(calculated, rel=0.35), (fetched, calculated)


def test_sequences_out_of_order_and_samples_drawn_twice_in_a_row_are_those_of_whole_shards(data: BucketShards) -> None:
    """A small source is drawn several times an epoch; the centre of questions is of the epoch's first sequences."""
    first, *others = data.sequence.first_sequences(2)
    for samples in ([*first, *first[-1:], *first[-1:]], *others):
        whole = data.loader(data.local, 0).pack_sequence(samples)
        by_range = data.by_range().pack_sequence(samples)
        assert (by_range.sample_ids, by_range.images) == (whole.sample_ids, whole.images)
        assert by_range.input_ids.tolist() == whole.input_ids.tolist()
