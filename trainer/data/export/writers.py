"""Writers of one split in each format."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from PIL import Image

from vlmpipe.trainer.data.export import records
from vlmpipe.trainer.data.export.records import Build, Record, StoredSample
from vlmpipe.trainer.data.export.tfrecord import example, framed
from vlmpipe.trainer.data.sample import png_bytes
from vlmpipe.trainer.data.shards.tar import ShardWriter, shard_name

MEDIA = "media"
FILE_SAMPLES = 1000  # of a tar or a TFRecord file


class SplitWriter(Protocol):
    """Writes the samples of one split, one by one, into a folder that all splits share."""

    names: list[str]  # of its files, without images

    def add(self, sample: StoredSample) -> None: ...

    def close(self) -> None: ...


class JsonWriter:
    """Records in a file of JSON lines or one JSON array, images as files in `media`."""

    def __init__(self, folder: Path, split: str, build: Build, *, array: bool = False) -> None:
        self._folder, self._build, self._array = folder, build, array
        self.names = [f"{split}.{'json' if array else 'jsonl'}"]
        self._file = (folder / self.names[0]).open("w", encoding="utf-8")
        self._first = True

    def add(self, sample: StoredSample) -> None:
        paths = [self._media(name, data) for name, data in zip(sample.image_names, sample.images, strict=True)]
        text = json.dumps(self._build(sample, paths), ensure_ascii=False)
        self._file.write((("[" if self._first else ",") + f"\n{text}") if self._array else f"{text}\n")
        self._first = False

    def close(self) -> None:
        if self._array:
            self._file.write("\n]\n")
        self._file.close()

    def _media(self, name: str, data: bytes) -> str:
        relative = f"{MEDIA}/{name[:2]}/{name}"  # at most 256 folders: one with millions of files is slow
        path = self._folder / relative
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return relative


class TarWriter:
    """WebDataset: JSON and images of a sample share a key."""

    def __init__(self, folder: Path, split: str) -> None:
        self._shards, self._split = ShardWriter(folder, split, FILE_SAMPLES), split
        self.names: list[str] = []

    def add(self, sample: StoredSample) -> None:
        content = json.dumps(records.webdataset_record(sample), ensure_ascii=False).encode()
        images = [(name.rpartition(".")[2], data) for name, data in zip(sample.image_names, sample.images, strict=True)]
        self._shards.add(sample.key, content, images)

    def close(self) -> None:
        self._shards.close()
        self.names = [shard_name(self._split, number) for number in range(self._shards.shards)]


class TfRecordWriter:
    """Files of `tf.train.Example` with `id`, `messages` (JSON), `images` and, of a pair, `rejected`."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder, self._split, self._samples = folder, split, 0
        self.names: list[str] = []

    def add(self, sample: StoredSample) -> None:
        if self._samples % FILE_SAMPLES == 0:
            self.close()
            self.names.append(f"{self._split}-{len(self.names):06d}.tfrecord")
            self._file = (self._folder / self.names[-1]).open("wb")
        records.require_no_tools(sample, "tfrecord")
        features = {
            "id": [sample.id.encode()],
            "messages": [json.dumps(records.as_stored(sample), ensure_ascii=False).encode()],
            "images": [_as_tensorflow_reads(data) for data in sample.images],
        }
        if sample.rejected:
            features["rejected"] = [sample.rejected.encode()]
        self._file.write(framed(example(features)))
        self._samples += 1

    def close(self) -> None:
        if self.names:
            self._file.close()


def _as_tensorflow_reads(data: bytes) -> bytes:
    """The image, which `tf.io.decode_image` reads in every format but WebP."""
    if data[:4] != b"RIFF":
        return data
    with Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
        return png_bytes(image)


@dataclass(frozen=True)
class Format:
    """How a format is written."""

    open: Callable[[Path, str], SplitWriter]
    # Name and content of a file that lists the others; from their names, the folder's final address, and whether pairs.
    index: Callable[..., tuple[str, Record]] | None = None


def _json(build: Build, *, array: bool = False) -> Callable[[Path, str], SplitWriter]:
    return lambda folder, split: JsonWriter(folder, split, build, array=array)


FORMATS = {
    "messages": Format(_json(records.messages_record)),
    "llava": Format(_json(records.llava_record, array=True)),  # LLaVA's own loader reads no JSON lines
    "trl": Format(_json(records.trl_record)),
    "llama-factory": Format(_json(records.llama_factory_record), records.llama_factory_index),
    "nemo": Format(_json(records.nemo_record), records.nemo_index),
    "webdataset": Format(TarWriter),
    "tfrecord": Format(TfRecordWriter),
}
