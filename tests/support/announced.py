"""A program's cases, one by one, with a line when each begins: somebody waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmpipe.trainer.distributed.process import ProcessContext

BEGINS = "begins: "  # how a module says which case it is at


def announced(names: Sequence[str], worker: ProcessContext, kind: str) -> Iterator[str]:
    """Each of these, once the first rank has said that it begins."""
    for number, name in enumerate(names, start=1):
        if worker.is_first:
            print(f"{BEGINS}{kind} {number} of {len(names)}, {name}", flush=True)
        yield name
