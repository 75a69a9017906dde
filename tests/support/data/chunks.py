"""A small LLaVA set that is cut into several chunks, for the tests of preparation in chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.data.prepared import conversation, corrupt, job_config, llava_folder, png, record
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.tokenize import make_tokenizer
from vlmpipe.trainer.progress import Progress

CHUNK = 8
RECORDS = 60


def fixed_tokenizer(folder: Path) -> str:
    """A tokenizer that does not change with the data, as one that comes with a language model."""
    make_tokenizer("train:300", ["What is this? A picture. Which one? Number 7."]).save_pretrained(folder)
    return str(folder)


def progress_of(config: JobConfig) -> Progress:
    return Progress(config.run.run_uri, "prepare-data", quiet=True)


class ChunkedSet:
    """A LLaVA file with its pictures, and a root to prepare it under."""

    def __init__(self, folder: Path, tokenizer: str) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.images, self.records = llava_folder(folder, RECORDS)

    def config(self, root: str = "root", **data: Any) -> JobConfig:
        source = self.folder / "set.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in self.records)
        if not source.exists() or source.read_text() != text:  # a source's fingerprint covers when it was written
            source.write_text(text)
        chosen = {"source": str(source), "image_folder": str(self.images), "chunk_samples": CHUNK, "workers": 1} | data
        return job_config(self.folder / root, tokenizer=self.tokenizer, max_reject_fraction=0.9, **chosen)

    def spoil(self) -> None:
        """Faults of every kind that chunks could get wrong: rejects, used ids, and repeats far from the first one."""
        (self.images / "5.png").write_bytes(corrupt(png(5)))
        (self.images / "44.png").unlink()
        self.records[20] = {"id": "no conversation"}
        self.records[33] = record(3)  # the same again
        self.records[40] = record(4, conversations=conversation("<image>\nWhat else?", "Nothing."))
        self.records[50] = record(7, id="seven again")
        self.records[51] = record(7, id="and again")
