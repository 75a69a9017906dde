"""Writers of small data sets in the layouts that people have."""

from __future__ import annotations

import base64
import csv
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.data.formats import add_member
from tests.support.data.prepared import conversation, png

ROWS = 6
Row = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """A data set and its reading. `write`: into a folder, returns the source's name in it.

    images, labels (answers that are learned): of all accepted samples; None: refused. refused: words of the refusal, or
    code of all rejects.
    """

    write: Callable[[Path], str]
    images: int | None = None
    labels: int = ROWS
    refused: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # fields of the run file's section
    has_folder: bool = False  # data.image_folder is the folder's `images`


def pictures(folder: Path, suffix: str = "png") -> None:
    (folder / "images").mkdir(exist_ok=True)
    for number in range(ROWS):
        (folder / "images" / f"{number}.{suffix}").write_bytes(png(number))


def lines(*of: Callable[[int], Row], name: str = "set.jsonl") -> Callable[[Path], str]:
    """JSON lines, with pictures beside them; records are made by `of` in turn."""

    def write(folder: Path) -> str:
        pictures(folder)
        rows = [of[number % len(of)](number) for number in range(ROWS)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    return write


def placed(of: Callable[[int, Path], Row]) -> Callable[[Path], str]:
    """JSON lines whose records know the folder they are in; a link leads to its pictures, which it has twice."""

    def write(folder: Path) -> str:
        pictures(folder)
        (folder / "linked").symlink_to(folder / "images")
        for number in range(ROWS):
            (folder / "images" / f"of {number % 2}").mkdir(exist_ok=True)
            (folder / "images" / f"of {number % 2}" / f"{number}.png").write_bytes(png(number))
        rows = [of(number, folder) for number in range(ROWS)]
        (folder / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return "set.jsonl"

    return write


def array(of: Callable[[int], Row], name: str = "set.json") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        pictures(folder)
        (folder / name).write_text(json.dumps([of(number) for number in range(ROWS)]))
        return name

    return write


def rows(of: Callable[[int], Row], name: str = "set.parquet") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        pictures(folder)
        pq.write_table(pa.Table.from_pylist([of(number) for number in range(ROWS)]), folder / name)
        return name

    return write


def tar(of: Callable[[int], Sequence[tuple[str, bytes]]], name: str = "set.tar") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        pictures(folder)
        with tarfile.open(folder / name, "w") as file:
            for number in range(ROWS):
                for suffix, data in of(number):
                    add_member(file, f"{number:04d}.{suffix}", data)
        return name

    return write


def table(columns: Sequence[str], of: Callable[[int], Sequence[str]]) -> Callable[[Path], str]:
    """A folder of pictures with metadata.csv."""

    def write(folder: Path) -> str:
        pictures(folder)
        with (folder / "images" / "metadata.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(of(number) for number in range(ROWS))
        return "images"

    return write


def tsv(columns: Sequence[str], of: Callable[[int], Sequence[str]]) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        with (folder / "set.tsv").open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(columns)
            writer.writerows(of(number) for number in range(ROWS))
        return "set.tsv"

    return write


def twice(folder: Path) -> str:
    line = '{"id": 1, "messages": [], "id": 2}'
    (folder / "set.jsonl").write_text(f"{line}\n" * ROWS)
    return "set.jsonl"


def asked(number: int, mark: str = "<image>\n") -> list[Row]:
    """LLaVA's conversation."""
    return conversation(f"{mark}Which?", f"Number {number}.")


def said(number: int, mark: str = "<image>", **of_answer: Any) -> list[Row]:
    """OpenAI's."""
    return [
        {"role": "user", "content": f"{mark}Which?"},
        {"role": "assistant", "content": f"Number {number}.", **of_answer},
    ]


def parts(number: int, *of_user: Row) -> list[Row]:
    return [
        {"role": "user", "content": [*of_user, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": f"Number {number}."}]},
    ]


def inline(number: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(number)).decode()


def struct(number: int) -> Row:
    return {"bytes": png(number), "path": f"{number}.png"}
