"""Parts of a source that can be read independently, so that reading can begin in the middle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from trainer.data.rejects import Reject
from trainer.data.sample import Sample

Records = Iterable[Sample | Reject]


@dataclass(frozen=True)
class Part:
    """One file of a source of many. `read` begins anew each time."""

    read: Callable[[], Iterator[Sample | Reject]]

    def __iter__(self) -> Iterator[Sample | Reject]:
        return self.read()


class OnePart(ABC):
    """A source that is always read from its beginning."""

    def parts(self) -> Sequence[Records]:
        return [self]

    @abstractmethod
    def __iter__(self) -> Iterator[Sample | Reject]: ...


class ManyParts(ABC):
    """A source that is its parts, one after the other."""

    @abstractmethod
    def parts(self) -> Sequence[Records]: ...

    def __iter__(self) -> Iterator[Sample | Reject]:
        return chain.from_iterable(self.parts())


def counted(parts: Sequence[Records], starts: list[int]) -> Iterator[Sample | Reject]:
    """All records. Adds to `starts` how many records came before each part that was begun."""
    read = 0
    for part in parts:
        starts.append(read)
        for record in part:
            read += 1
            yield record


def records_from(parts: Sequence[Records], starts: Sequence[int], record: int) -> tuple[Iterator[Sample | Reject], int]:
    """The records from the part on that holds the one of this number, and the number of the first of them."""
    part = bisect_right(starts, record) - 1
    return chain.from_iterable(parts[part:]), starts[part]
