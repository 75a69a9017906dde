"""Prepares chunks of one source, in this process or in several."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import JobConfig
from trainer.data.chunk import Report, build_chunk
from trainer.data.chunk_plan import Chunk
from trainer.data.chunk_store import ChunkStore
from trainer.data.examine import Entry, Examination, final_entry
from trainer.data.rejects import Reject
from trainer.data.samples import Sample
from trainer.data.sources import Source
from trainer.errors import DataError, os_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChunkMaker:
    """Reads the source from chunk to chunk. Going forward it reads each record once; going back it starts again."""

    def __init__(
        self, config: JobConfig, source: Source, tokenizer: PreTrainedTokenizerFast, settings: str, threads: int
    ) -> None:
        """`settings`: what the chunks' fingerprints stand for beside their records."""
        self._config, self._source, self._settings, self._threads = config, source, settings, threads
        self._examine = Examination(config, tokenizer)
        self._store = ChunkStore(config.run.chunks_root)
        self._records: Iterator[Sample | Reject] = iter(())
        self._position = -1  # of the next record; nothing is open yet

    def make(self, chunk: Chunk, report: Report) -> None:
        """Prepare the chunk and store it under its fingerprint."""
        with tempfile.TemporaryDirectory(prefix="vlmpipe-chunk-") as scratch, os_errors(f"preparing data in {scratch}"):
            build_chunk(
                self._entries(chunk),
                Path(scratch),
                self._config.data,
                self._examine,
                threads=self._threads,
                repeats=frozenset(chunk.repeats),
                report=report,
            )
            self._store.put(chunk.fingerprint(self._settings), Path(scratch))

    def _entries(self, chunk: Chunk) -> Iterator[Entry | Reject]:
        if not 0 <= self._position <= chunk.start:
            self._records, self._position = iter(self._source), 0
        for _ in islice(self._records, chunk.start - self._position):
            pass
        self._position = chunk.start
        held_out_fraction = self._config.data.held_out_fraction
        for place in range(chunk.records):
            record = next(self._records, None)
            if record is None:
                raise DataError(
                    f"data.source {self._config.data.source!r} ended at record {chunk.start + place} of "
                    f"{chunk.start + chunk.records}",
                    expected="a source that does not change while it is prepared",
                    fix="run again: what is prepared then is what is there then",
                )
            self._position += 1
            yield final_entry(record, chunk.met.get(place, "new"), held_out_fraction)
