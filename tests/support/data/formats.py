"""The same pictures with captions, written in every format that a source may have."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.data.prepared import conversation, png

QUESTION = "Describe this image."


@dataclass(frozen=True)
class Captioned:
    """A picture and what is said about it."""

    name: str
    image: bytes
    caption: str


def captioned(count: int) -> list[Captioned]:
    return [Captioned(f"picture-{n:03d}", png(n), f"Noise of the number {n}.") for n in range(count)]


def add_member(tar: tarfile.TarFile, name: str, data: bytes, **header: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in header.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def write_pictures(folder: Path, samples: Sequence[Captioned]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for sample in samples:
        (folder / f"{sample.name}.png").write_bytes(sample.image)


def llava_records(samples: Sequence[Captioned]) -> list[dict[str, Any]]:
    return [
        {
            "id": sample.name,
            "image": f"{sample.name}.png",
            "conversations": conversation(f"<image>\n{QUESTION}", sample.caption),
        }
        for sample in samples
    ]


def write_llava_json(folder: Path, samples: Sequence[Captioned]) -> str:
    write_pictures(folder, samples)
    (folder / "set.json").write_text(json.dumps(llava_records(samples)))
    return "set.json"


def write_llava_lines(folder: Path, samples: Sequence[Captioned]) -> str:
    write_pictures(folder, samples)
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, llava_records(samples))))
    return "set.jsonl"


def parts_of(samples: Sequence[Captioned], count: int) -> list[Sequence[Captioned]]:
    ends = [len(samples) * part // count for part in range(count + 1)]
    return [samples[start:end] for start, end in pairwise(ends)]


def write_tars(folder: Path, samples: Sequence[Captioned], count: int = 2) -> str:
    """Two tars or more, as a folder: text in txt in the first one, in json in the others."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts_of(samples, count)):
        with tarfile.open(folder / f"part-{number:06d}.tar", "w") as tar:
            for sample in part:
                add_member(tar, f"{sample.name}.png", sample.image)
                if number:
                    add_member(tar, f"{sample.name}.json", json.dumps({"caption": sample.caption}).encode())
                else:
                    add_member(tar, f"{sample.name}.txt", sample.caption.encode())
    return ""


def write_parquet(folder: Path, samples: Sequence[Captioned], count: int = 2) -> str:
    """Two files or more, as a pattern with braces."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts_of(samples, count)):
        rows = [
            {"id": sample.name, "image": {"bytes": sample.image, "path": f"{sample.name}.png"}, "text": sample.caption}
            for sample in part
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"train-{number:05d}.parquet", row_group_size=3)
    return f"train-{{00000..{count - 1:05d}}}.parquet"


def write_coco(folder: Path, samples: Sequence[Captioned]) -> str:
    write_pictures(folder, samples)
    images = [{"id": n, "file_name": f"{sample.name}.png", "width": 24} for n, sample in enumerate(samples)]
    annotations = [
        {"id": sample.name, "image_id": number, "caption": sample.caption} for number, sample in enumerate(samples)
    ]
    content = {"info": {"year": 2026}, "images": images, "licenses": [], "annotations": annotations}
    (folder / "captions.json").write_text(json.dumps(content))
    return "captions.json"


def write_image_folder(folder: Path, samples: Sequence[Captioned]) -> str:
    write_pictures(folder, samples)
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "text", "id"])
        writer.writerows((f"{sample.name}.png", sample.caption, sample.name) for sample in samples)
    return ""


# Each writes into a folder and returns the source relative to it.
FORMATS: dict[str, Callable[[Path, Sequence[Captioned]], str]] = {
    "llava-json": write_llava_json,
    "llava-lines": write_llava_lines,
    "webdataset": write_tars,
    "parquet": write_parquet,
    "coco": write_coco,
    "image-folder": write_image_folder,
}


def write_source(name: str, folder: Path, samples: Sequence[Captioned]) -> str:
    """Write the samples; returns `data.source`."""
    relative = FORMATS[name](folder, samples)
    return f"{folder}/{relative}".rstrip("/")
