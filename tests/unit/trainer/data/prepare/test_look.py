"""What `check` says of data is true of a sample that is spread over it, and it says how many of how many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.prepared import png
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.prepare import look
from vlmpipe.trainer.data.prepare.look import MAX_CHECKED, MAX_PARTS, Look, look_at
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted
from vlmpipe.trainer.data.rejects import Reject, RejectCode
from vlmpipe.trainer.data.sample import ImageRef, Sample, Turn
from vlmpipe.trainer.data.sources.base import Part, Records, Source
from vlmpipe.trainer.errors import ExitCode

PICTURE = png()
CONFIG = DataConfig.model_validate({"source": "set.jsonl", "sequence_length": 100})


class Files(Source):
    """As many samples as each file has; images are made by `image`, from the sample's number."""

    def __init__(self, sizes: Sequence[int], image: Callable[[int], bytes] = lambda _: PICTURE) -> None:
        self._sizes, self._image = sizes, image
        self.begun: list[int] = []

    def fingerprint(self) -> str:
        return ""

    def __iter__(self) -> Iterator[Sample | Reject]:
        return itertools.chain.from_iterable(self.parts())

    def parts(self) -> Sequence[Records]:
        starts = [0, *itertools.accumulate(self._sizes)]
        return [Part(lambda n=n: self._read(n, starts[n])) for n in range(len(self._sizes))]  # type: ignore[misc]

    def _read(self, file: int, start: int) -> Iterator[Sample]:
        self.begun.append(file)
        for number in range(start, start + self._sizes[file]):
            image = ImageRef(f"{number}.png", lambda number=number: self._image(number))  # type: ignore[misc]
            yield Sample(str(number), (Turn("<image>\nWhat?", "That."),), (image,), f"file {file} line {number}")


def clock(step_s: float) -> Callable[[], float]:
    return itertools.count(0.0, step_s).__next__


def test_bad_pictures_behind_the_first_ones_are_found() -> None:
    """As a set whose first pictures were downloaded and whose others are error pages."""
    found = look_at(Files([1000], lambda number: PICTURE if number < 400 else b"<html>"), CONFIG, clock=clock(0.001))
    assert found.read == 1000 and found.checked == 125 and 70 < len(found.bad) < 80
    state, text, code = found.verdict(CONFIG)
    assert (state, code) == ("warning", ExitCode.OK)
    assert f"{len(found.bad)} of 1,000 samples of set.jsonl are bad (texts and images of 125 of them" in text


def test_what_is_not_looked_at_is_not_spoken_of() -> None:
    small = look_at(Files([20]), CONFIG).verdict(CONFIG)
    assert small == (
        "ok", "20 samples of set.jsonl can be read: 20 images, 0 samples without one; texts and images of all were "
        "checked", ExitCode.OK,
    )  # fmt: skip
    slow = look_at(Files([10_000]), CONFIG, budget_s=10, clock=clock(0.5))
    text = slow.verdict(CONFIG)[1]
    assert text.startswith("9 samples of set.jsonl, which has more, can be read") and slow.is_part
    assert "texts and images of all were checked" in text
    ticks = itertools.chain((number / 100 for number in range(101)), itertools.count(2.0))  # reading, and checks
    slower = look_at(Files([100]), CONFIG, budget_s=10, clock=ticks.__next__)
    assert 0 < slower.checked < slower.read == 100
    assert f"of {slower.checked} of them, spread over all, were checked" in slower.verdict(CONFIG)[1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.floats(0, 1))
def test_at_least_one_sample_is_checked_and_time_bounds_the_rest(sizes: list[int], step_s: float) -> None:
    source = Files(sizes)
    found = look_at(source, CONFIG, budget_s=5, clock=clock(step_s))
    chosen = sizes if len(sizes) <= MAX_PARTS else [sizes[n * len(sizes) // MAX_PARTS] for n in range(MAX_PARTS)]
    assert (found.read > 0) == any(chosen) and (found.checked > 0) == (found.read > 0)
    assert found.checked <= min(found.read, MAX_CHECKED)
    assert found.is_part or found.read == sum(sizes)
    assert len(source.begun) <= MAX_PARTS and source.begun[0] == 0


def test_files_are_begun_at_even_distances() -> None:
    source = Files([3] * 100)
    found = look_at(source, CONFIG, clock=clock(0))
    assert source.begun == [0, 12, 25, 37, 50, 62, 75, 87] and found.read == 24 and found.is_part


def test_a_few_samples_are_the_first_of_the_source() -> None:
    few = CONFIG.model_copy(update={"max_samples": 5})
    found = look_at(Files([3] * 100), few, clock=clock(0))
    assert (found.read, found.checked, found.is_part) == (5, 5, False)


def test_tokens_are_checked_where_there_is_a_tokenizer() -> None:
    seen = []

    def too_long(entry: Entry | Reject) -> Accepted | Reject:
        assert isinstance(entry, Entry)
        seen.append(entry.sample.id)
        return Reject(entry.sample.where, entry.sample.id, RejectCode.CONV_TOO_LONG, "200 tokens")

    found = look_at(Files([3]), CONFIG, too_long, clock=clock(0))
    assert sorted(seen) == ["0", "1", "2"] and {reject.code for reject in found.bad} == {RejectCode.CONV_TOO_LONG}
    state, text, code = found.verdict(CONFIG)
    assert (state, code) == ("failed", ExitCode.DATA) and "texts, images and tokens of all" in text


def test_images_in_a_bucket_are_not_fetched() -> None:
    config = CONFIG.model_copy(update={"image_folder": "gs://bucket/images"})

    def unreachable(_number: int) -> bytes:
        raise AssertionError("check works offline")

    state, text, _ = look_at(Files([3], unreachable), config, clock=clock(0)).verdict(config)
    assert state == "ok" and "; texts of all were checked" in text


def test_few_images_within_records_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "MAX_HELD_BYTES", 10 * len(PICTURE))
    held = look._Spread()
    for record in Files([100]):
        assert isinstance(record, Sample)
        (image,) = record.images
        held.add(replace(record, images=(replace(image, size_bytes=lambda: len(PICTURE)),)))
    assert 5 <= len(held.held) <= 10
    numbers = [int(record.id) for record in held.held]
    assert len({after - before for before, after in itertools.pairwise(numbers)}) == 1


def test_a_source_without_samples_fails() -> None:
    assert Look("texts").verdict(CONFIG)[0] == "failed"
