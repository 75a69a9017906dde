"""Prepares chunks of one source, in this process or in several."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.job import JobConfig
from trainer.data.malloc_trim import trim_memory
from trainer.data.prepare.chunks.chunk import Report, build_chunk
from trainer.data.prepare.chunks.plan import Chunk
from trainer.data.prepare.chunks.store import ChunkStore
from trainer.data.prepare.validate_sample import Entry, SampleValidator
from trainer.data.rejects import Reject
from trainer.data.sample import Sample
from trainer.data.sources import Source
from trainer.data.sources.base import records_from
from trainer.errors import os_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChunkMaker:
    """Reads the source from chunk to chunk: each record once, going forward, and no part that has none of a chunk."""

    def __init__(
        self,
        config: JobConfig,
        source: Source,
        part_starts: Sequence[int],
        tokenizer: PreTrainedTokenizerFast,
        settings: str,
        threads: int,
    ) -> None:
        """`part_starts`: number of each part's first record. `settings`: what fingerprints stand for beside records."""
        self._config, self._settings, self._threads = config, settings, threads
        self._parts, self._part_starts = source.parts(), part_starts
        self._examine = SampleValidator(config, tokenizer)
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
        trim_memory()

    def _entries(self, chunk: Chunk) -> Iterator[Entry | Reject]:
        records, position = records_from(self._parts, self._part_starts, chunk.start)
        if not position <= self._position <= chunk.start:
            self._records, self._position = records, position
        for _ in islice(self._records, chunk.start - self._position):
            pass
        self._position = chunk.start
        for entry in chunk.entries(self._records, self._config.data.source):
            self._position += 1
            yield entry
