"""A look at a source before a run: records as far as a time allows, and a spread sample of them checked whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.coverage import Coverage
from vlmpipe.trainer.data.exclusions.exclusion_file import read_exclusions
from vlmpipe.trainer.data.prepare.validation.checks import check_clip, check_image, check_turns
from vlmpipe.trainer.data.prepare.validation.deduplicate import NEW
from vlmpipe.trainer.data.prepare.validation.final_ids import Entry, final_entry
from vlmpipe.trainer.data.prepare.validation.validate_sample import Accepted
from vlmpipe.trainer.data.rejects import Reject, RejectedError
from vlmpipe.trainer.data.sample import Sample, stable_shuffle
from vlmpipe.trainer.data.sources.base import Source
from vlmpipe.trainer.errors import DataError, ExitCode
from vlmpipe.trainer.storage.base import in_bucket

BUDGET_S = 10.0  # of all sources of a run file
READING = 0.4  # share of it
MAX_PARTS = 8  # files that are begun, evenly spaced
MAX_CHECKED = 200  # samples of a source
MAX_HELD_BYTES = 256 << 20  # of images within records

Validate = Callable[[Entry | Reject], Accepted | Reject]


@dataclass
class Look:
    """Result of a look at samples. `checks`: what samples were checked for."""

    checks: str
    coverage: Coverage = field(default_factory=Coverage)
    read: int = 0
    of_web: int = 0  # images that are fetched when the run starts
    checked: int = 0
    unreadable: list[Reject] = field(default_factory=list)  # of the records that were read
    bad: list[Reject] = field(default_factory=list)  # of the samples that were checked
    is_part: bool = False  # there are further records

    def verdict(self, data: DataConfig) -> tuple[Literal["ok", "warning", "failed"], str, int]:
        """State of the source, a sentence for people, and the exit code of a failure."""
        if not self.read:
            return "failed", f"{data.source} holds no samples", ExitCode.DATA
        try:
            self.coverage.check(data.source)
        except DataError as error:
            return "failed", error.text(), int(error.code)
        of = f"{self.read:,} samples of {data.source}{', which has more,' if self.is_part else ''}"
        is_whole = self.checked + len(self.unreadable) == self.read
        looked = f"{self.checks} of {'all' if is_whole else f'{self.checked:,} of them, spread over all,'} were checked"
        bad = [*self.unreadable, *self.bad]
        if bad:
            text = f"{len(bad):,} of {of} are bad ({looked}), for example: {bad[0].sentence()}"
            too_many = is_whole and not self.is_part and len(bad) > data.max_reject_fraction * self.read
            if too_many or len(self.bad) == self.checked:
                return "failed", text, ExitCode.DATA
            return "warning", text, ExitCode.OK
        fetched = f"; {self.of_web:,} images are fetched from the web when the run starts" if self.of_web else ""
        text = f"{of} can be read: {self.coverage.described()}; {looked}{fetched}"
        if data.image_folder and not self.coverage.images:
            return "warning", f"{text}; data.image_folder is given, and none of these names an image", ExitCode.OK
        return "ok", text, ExitCode.OK


def look_at(
    source: Source,
    config: DataConfig,
    validate: Validate | None = None,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> Look:
    """Read records from the beginnings of up to MAX_PARTS of the source's files, then check a sample that is spread
    over them, until the time is used up. Raises what reading the source raises.

    Images in buckets are not looked at, and with `data.fetch` none is.

    Args:
        validate: makes the tokens; None where there is no tokenizer yet.
        budget_s: seconds for this source, after which no further record is begun.
    """
    check = _check_of(config, validate)
    parts, is_part = _parts(source, config)
    look, sample, start_s = Look(check.name, is_part=is_part), _Spread(), clock()
    for number, part in enumerate(parts, 1):
        until_s = start_s + READING * budget_s * number / len(parts)
        for record in part:
            look.read += 1
            if isinstance(record, Reject):
                look.unreadable.append(record)
            else:
                look.coverage.add(record)
                look.of_web += sum(bool(image.address) for image in record.images)
                sample.add(record)
            if clock() > until_s:
                look.is_part |= next(part, None) is not None
                break
    excluded = read_exclusions(config.exclude).ids
    for place in stable_shuffle(range(len(sample.held)), "look"):
        if look.checked and clock() > start_s + budget_s:
            break
        record = sample.held[place]
        if record.id in excluded:
            continue
        look.checked += 1
        try:
            check.run(record)
        except RejectedError as error:
            look.bad.append(Reject(record.where, record.id, error.code, str(error)))
    return look


class _Spread:
    """Records at even distances, at most MAX_CHECKED of them, and few images that records hold themselves."""

    def __init__(self) -> None:
        self.held: list[Sample] = []
        self._every, self._met, self._bytes = 1, 0, 0

    def add(self, record: Sample) -> None:
        if self._met % self._every == 0:
            self.held.append(record)
            self._bytes += _held_bytes(record)
        self._met += 1
        while len(self.held) > MAX_CHECKED or (self._bytes > MAX_HELD_BYTES and len(self.held) > 1):
            self.held = self.held[::2]
            self._every *= 2
            self._bytes = sum(map(_held_bytes, self.held))


def _held_bytes(record: Sample) -> int:
    """Return the bytes of images that are inside the record, not in files of their own."""
    return sum(image.size_bytes() for image in record.images if image.size_bytes and not image.is_file)


@dataclass(frozen=True)
class _Check:
    name: str
    run: Callable[[Sample], None]  # raises RejectedError


def _check_of(config: DataConfig, validate: Validate | None) -> _Check:
    if in_bucket(config.image_folder) or config.fetch:
        return _Check("texts", _check_texts)
    if validate is None:
        return _Check("texts and images", lambda record: _check_images(record, config))

    def check(record: Sample) -> None:
        result = validate(final_entry(record, NEW, "train"))
        if isinstance(result, Reject):
            raise RejectedError(result.code, result.message)

    return _Check("texts, images and tokens", check)


def _check_texts(record: Sample) -> None:
    check_turns(record.turns, len(record.images), ())


def _check_images(record: Sample, config: DataConfig) -> None:
    _check_texts(record)
    for image in record.images:
        data = image.read()
        if image.clip:
            check_clip(data, image.clip, config)
        else:
            check_image(data, config, name=image.name)


def _parts(source: Source, config: DataConfig) -> tuple[list[Iterator[Sample | Reject]], bool]:
    """Return the records to read, in order, and whether more is left out: of few samples these, else files at even
    distances.
    """
    parts = source.parts()
    if config.max_samples:
        return [islice(chain.from_iterable(parts), config.max_samples)], False
    chosen = [parts[number * len(parts) // MAX_PARTS] for number in range(MAX_PARTS)]
    return [iter(part) for part in (parts if len(parts) <= MAX_PARTS else chosen)], len(parts) > MAX_PARTS
