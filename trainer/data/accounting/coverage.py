"""Counts read and unread values of a source's records, and refuses media that nothing reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import yaml

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.keys import NO_COLUMNS
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.sample import Sample, Unread
from vlmpipe.trainer.errors import DataError

EARLY = 1000  # samples after which unread media end the step, without reading the rest
SHOWN = 8  # names in a line
COVERAGE = "coverage.json"  # beside the plan of a set's chunks


@dataclass
class Coverage:
    """Counts of one source's samples, and keys of their records that nothing read."""

    samples: int = 0
    images: int = 0
    without_images: int = 0  # samples
    unread: Counter[Unread] = field(default_factory=Counter)
    absent: Counter[str] = field(default_factory=Counter)  # samples without a value, by key of data.columns

    def add(self, sample: Sample) -> None:
        self.samples += 1
        self.images += len(sample.images)
        self.without_images += not sample.images
        for key in sample.unread:
            if key.absent:
                self.absent[key.name] += 1
            else:
                self.unread[key] += 1

    @property
    def never_met(self) -> set[str]:
        """Keys of data.columns under which no sample has a value."""
        return {name for name, count in self.absent.items() if count == self.samples}

    def check(self, source: str) -> None:
        """Raise DataError where samples have media that nothing read. `source` names them for people."""
        media = [(key, count) for key, count in self.unread.most_common() if key.media]
        if not media:
            return
        lines = [
            f"  {_shown(key.name)} in {count:,} of {self.samples:,} samples ({share(count, self.samples)}): {key.media}"
            for key, count in media[:SHOWN]
        ]
        more = [f"  and {len(media) - SHOWN} more"] if len(media) > SHOWN else []
        names = [key.name for key, _ in media]
        raise DataError(
            "\n".join([f"{source} has media that nothing reads and that training would lack", *lines, *more]),
            expected="images under the keys image or images, or as members of a tar that end in the suffix of a format "
            "that is read",
            fix=_mapping(names),
        )

    def check_folder(self, source: str, config: DataConfig) -> None:
        """Raise DataError where `data.image_folder` is given and no sample has an image."""
        if config.image_folder and self.samples and not self.images:
            raise DataError(
                f"data.image_folder is {config.image_folder!r}, and none of the {self.samples:,} samples of {source} "
                "names an image",
                expected="records that name images under image or images",
                fix="name their key, such as data.columns: {image: image_path}, or leave data.image_folder out",
            )

    def check_columns(self, source: str) -> None:
        """Raise DataError where no sample has a value under a key of data.columns."""
        require_met(self.never_met, self.samples, source)

    def described(self) -> str:
        """One line: images, samples without one, and keys that nothing read with their shares."""
        return images_sentence(self.images, self.without_images) + not_read(
            {key.name: count for key, count in self.unread.items()}, self.samples
        )


def require_met(keys: set[str], samples: int, source: str) -> None:
    """Raise DataError where there are keys of data.columns that none of the samples has."""
    if keys:
        names = ", ".join(_shown(name) for name in sorted(keys)[:SHOWN])
        raise DataError(
            f"data.columns names {names}, and none of the {samples:,} samples of {source} has a value there",
            expected="keys or columns of the records",
            fix="correct the name, or leave it out of data.columns",
        )


def images_sentence(images: int, without: int) -> str:
    """Such as "40 images, 2 samples without one"."""
    return f"{images:,} images, {without:,} samples without one"


def not_read(unread: dict[str, int], samples: int) -> str:
    """Such as "; not read: url (100%), lang (3%)"; "" where all was read."""
    if not unread:
        return ""
    ordered = sorted(unread.items(), key=lambda item: (-item[1], item[0]))
    names = [f"{_shown(name)} ({share(count, samples)})" for name, count in ordered[:SHOWN]]
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return f"; not read: {', '.join(names)}{more}"


def share(count: int, of: int) -> str:
    """A share in percent, of which neither 0% nor 100% is rounded."""
    percent = 100 * count / max(1, of)
    if count and percent < 1:
        return "below 1%"
    return f"{99 if count < of and percent > 99 else round(percent)}%"


def _shown(name: str) -> str:
    """Return a key of the user's data for a terminal, with escapes if a character is not printable."""
    return name if name.isprintable() else _yaml(name)


def _yaml(name: str) -> str:
    """The key as an element of a list in a run file."""
    style = None if name.isprintable() else '"'  # other quotes hold a line break as an empty line
    return str(yaml.safe_dump([name], default_flow_style=True, default_style=style, width=math.inf)).strip()[1:-1]


def _mapping(names: list[str]) -> str:
    """The lines of a run file that would read these keys, or leave them out."""
    keys = [_yaml(name) for name in names if not name.startswith("*") and "." not in name]
    ignored = f"data.columns: {{ignored: [{', '.join(keys)}]}}"
    if not keys:
        return "convert them to JPEG, PNG or WebP, or list images under images of the record"
    images = f"data.columns: {{image: [{', '.join(keys)}]}}" if len(keys) > 1 else f"data.columns: {{image: {keys[0]}}}"
    return f"to read them: {images}\nif they are not needed: {ignored}"


class Coverages:
    """The coverage of each source of a run. `of`: that of a sample."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self.by_source = {source.name: Coverage() for source in config.all_sources}

    def counting(self, records: Iterable[Sample | Reject]) -> Iterator[Sample | Reject]:
        """The records unchanged. Raises DataError as soon as it is clear that media are not read."""
        only = None if self._config.sources else next(iter(self.by_source.values()))
        for record in records:
            if isinstance(record, Sample):
                coverage = only or self.by_source[record.where.partition(":")[0]]
                coverage.add(record)
                if coverage.samples == EARLY:
                    self._check()
            yield record

    def check(self) -> None:
        """Raise DataError where media of a source are not read, or its image folder or columns were named in vain."""
        self._check()
        self._check_columns()
        for source in self._config.all_sources:
            self.by_source[source.name].check_folder(source.uri, self._config.of_source(source))

    def _check(self) -> None:
        for source in self._config.all_sources:
            self.by_source[source.name].check(source.uri)

    def _check_columns(self) -> None:
        """Sources that share data.columns may each have some of its keys; all of them together have each."""
        sharing: list[tuple[str, Coverage]] = []
        for source in self._config.all_sources:
            coverage = self.by_source[source.name]
            if source.replay:
                continue
            if self._config.sources and source.columns == NO_COLUMNS:
                sharing.append((source.uri, coverage))
            else:
                coverage.check_columns(source.uri)
        if met := [coverage for _, coverage in sharing if coverage.samples]:
            lacking = set.intersection(*(coverage.never_met for coverage in met))
            require_met(lacking, sum(coverage.samples for coverage in met), ", ".join(uri for uri, _ in sharing))

    def as_json(self) -> dict[str, object]:
        """Keys that nothing read, with the number of samples that have them, by source; and samples of each source."""
        return {
            name: {
                "samples": coverage.samples,
                "unread": {key.name: count for key, count in coverage.unread.most_common()},
            }
            for name, coverage in self.by_source.items()
        }
