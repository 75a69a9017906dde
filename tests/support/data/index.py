"""An index of prepared data whose samples have no bytes: for what reads ids and images only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.data.prepared import seal
from vlmpipe.trainer.data.sample import Split
from vlmpipe.trainer.data.shards.index import IndexWriter


def write_index(folder: Path, samples: Mapping[str, Sequence[str]], split: Split = "eval") -> Path:
    """Write prepared data of one split. samples: content hashes of the images of each sample, by its id."""
    folder.mkdir()
    index = IndexWriter()
    for identity, images in samples.items():
        ones = [1] * len(images)
        index.add(
            id=identity,
            key=identity,
            split=split,
            shard="shard",
            json_offset=0,
            json_bytes=1,
            image_offsets=ones,
            image_bytes=ones,
            image_sha256=list(images),
            image_widths=ones,
            image_heights=ones,
            image_token_counts=ones,
            image_tokens=len(images),
            tokens=2,
            label_tokens=1,
            turns=1,
            slices=["all"],
            content="",
        )
    index.write(folder)
    seal(folder)
    return folder
