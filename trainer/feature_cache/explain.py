"""Explains cache hits and misses of features: the key, and how existing caches differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import DONE
from vlmpipe.trainer.feature_cache.reader import FeatureShards
from vlmpipe.trainer.feature_cache.store import DESCRIPTION, describe_features, features_key, features_uri
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.records import read_record

State = Literal["hit", "part", "miss", "data not prepared"]
NOT_THERE = "nothing"


@dataclass(frozen=True)
class OtherStore:
    """Features of another key under the same root."""

    key: str
    described: bool  # earlier versions wrote no description
    differences: dict[str, tuple[object, object]]  # by field, what this run has and what that store has


@dataclass(frozen=True)
class Explanation:
    """Features of this run's images, if there are any, and how other stores differ."""

    state: State
    uri: str
    images: int  # distinct ones of the prepared data; 0 when it is not prepared
    missing: int
    description: dict[str, object] = field(repr=False)
    others: tuple[OtherStore, ...]

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        return [*self._found(), *self._elsewhere()]

    def _found(self) -> Iterator[str]:
        there = self.images - self.missing
        if self.state == "data not prepared":
            yield f"The data is not prepared yet, so which images are wanted is not known. Features: {self.uri}"
        elif self.state == "hit":
            yield f"Hit: all {self.images:,} images have features in {self.uri}"
        else:
            yield f"{self.state.capitalize()}: {there:,} of {self.images:,} images have features in {self.uri}"
            yield f"The next run encodes {self.missing:,}."
        yield "The key stands for:"
        yield from (f"  {name} = {_short(value)}" for name, value in sorted(_flat(self.description).items()))

    def _elsewhere(self) -> Iterator[str]:
        for other in self.others:
            if not other.described:
                yield f"{other.key} is also there, without a description: an earlier version wrote it."
                continue
            yield f"{other.key} is also there. It differs in:"
            for name, (ours, theirs) in other.differences.items():
                yield f"  {name}: {_short(ours)} here, {_short(theirs)} there"


def explain(job: JobConfig) -> Explanation:
    """Examine the stores under the run's root, without reading features."""
    root, precision = job.run.features_root, job.train.precision
    uri, description = features_uri(root, job.model, precision), describe_features(job.model, precision)
    others = tuple(_others(root, features_key(job.model, precision), description))
    prepared = join_uri(job.run.prepared_root, fingerprint(job))
    if open_storage(prepared).stat(DONE) is None:
        return Explanation("data not prepared", uri, 0, 0, description, others)
    images = Index.load(prepared).unique_images()
    missing = int(images.lacking(FeatureShards(uri).images.find).sum())
    state: State = "hit" if not missing else "miss" if missing == len(images) else "part"
    return Explanation(state, uri, len(images), missing, description, others)


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Fields that differ, by dotted name; None for a missing one."""
    flat = [_flat(description) for description in (ours, theirs)]
    names = sorted({*flat[0], *flat[1]})
    pairs = {name: (flat[0].get(name), flat[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _others(root: str, key: str, description: dict[str, object]) -> Iterator[OtherStore]:
    storage = open_storage(root)
    names = [info.name.split("/") for info in storage.list()]
    described = {parts[0] for parts in names if parts[1:] == [DESCRIPTION]}
    for other in sorted({parts[0] for parts in names if len(parts) > 1} - {key}):
        theirs = read_record(storage, f"{other}/{DESCRIPTION}") if other in described else {}
        yield OtherStore(other, other in described, differences(description, theirs) if theirs else {})


def _flat(description: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in description.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _short(value: object) -> str:
    return NOT_THERE if value is None else str(value)
