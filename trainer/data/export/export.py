"""Exports prepared data for another trainer: the same samples in the same splits, images as they are stored."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.data.export.records import StoredSample
from vlmpipe.trainer.data.export.writers import FORMATS
from vlmpipe.trainer.data.sample import Split
from vlmpipe.trainer.data.shards.index import NAME, Index, SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.data.shards.verified_files import DataShards, damaged_file
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.storage.base import TEMPORARY_PREFIX

SPLIT_NAMES: dict[Split, str] = {"train": "train", "eval": "validation"}
PNG = b"\x89PNG"  # prepared images are PNG or JPEG


@dataclass(frozen=True)
class ExportedData:
    """Result of an export. Splits are `train` and `validation`."""

    folder: Path
    samples: dict[str, int]  # by split
    images: int  # of all samples; an image in several samples counts each time
    files: dict[str, tuple[str, ...]]  # by split: names in the folder, without images


def export_data(prepared_uri: str, data_format: str, folder: Path) -> ExportedData:
    """Write prepared data as files of this format. The folder appears when all is written.

    Memory does not grow with the data, apart from the index. Raises ConfigError for an unknown format, one that
    has no place for what a sample holds, and a folder with files in it; DataError for damaged prepared data.
    """
    form = FORMATS.get(data_format)
    if form is None:
        raise ConfigError(f"no data format {data_format!r}", expected=f"one of {', '.join(FORMATS)}")
    storage = open_prepared(prepared_uri)
    index, shards = Index.load(prepared_uri, storage), DataShards(storage)
    if any(index.split(split).has_videos for split in SPLIT_NAMES):
        raise ConfigError(
            "this data has videos that are not images (data.video native)",
            expected="data whose samples consist of texts and images",
            fix="set data.video: frames and prepare it again",
        )
    reader = ShardReader.open(storage)
    samples, files, images, pairs = {}, {}, 0, False
    with os_errors(f"writing {folder}"), _appears_whole(folder) as scratch:
        for split, name in SPLIT_NAMES.items():
            writer, count = form.open(scratch, name), 0
            for sample in _samples(index.split(split), reader):
                writer.add(sample)
                count, images, pairs = count + 1, images + len(sample.images), pairs or bool(sample.rejected)
            writer.close()
            stored = sum(shards.sidecar(shard).samples for shard in index.split(split).shards)
            if stored != count:
                raise damaged_file(storage.uri(NAME), f"it lists {count} samples of the split {split}, not {stored}")
            samples[name], files[name] = count, tuple(writer.names)
        if form.index:
            names = [name for split in files.values() for name in split]
            index_name, content = form.index(names, folder.absolute(), pairs=pairs)
            (scratch / index_name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return ExportedData(folder, samples, images, files)


def _samples(split: SplitIndex, reader: ShardReader) -> Iterator[StoredSample]:
    """Yield the samples in the order of the shards, so that each shard is read once."""
    for number in split.stored_order():
        place = split.sample_location(int(number))
        images = tuple(reader.images(place))
        names = (
            f"{digest}.{'png' if data.startswith(PNG) else 'jpg'}"
            for digest, data in zip(split.image_sha256(int(number)), images, strict=True)
        )
        yield StoredSample(split.ids[number], split.key(int(number)), reader.turns(place), images, tuple(names))


@contextmanager
def _appears_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name at the end; an interrupted export leaves at most a hidden one."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(
            f"{folder} {'is not empty' if folder.is_dir() else 'is a file'}",
            expected="a folder that is new or empty",
            fix="delete it or name another one",
        )
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=parent) as scratch:
        whole = Path(scratch, "data")
        whole.mkdir()
        yield whole
        whole.rename(folder)
