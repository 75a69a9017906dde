"""Folders of pictures with texts, laid out in the ways that people have them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
NUM = 12


def pictures(folder: Path) -> list[tuple[str, str]]:
    """Names of images that are made, each with its colour."""
    folder.mkdir(parents=True, exist_ok=True)
    named = [(f"{number}.png", list(COLOURS)[number % 2]) for number in range(NUM)]
    for number, (name, colour) in enumerate(named):
        Image.new("RGB", (160 + number, 120), COLOURS[colour]).save(folder / name)
    return named


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def as_metadata(folder: Path) -> Path:
    rows = [{"file_name": name, "question": "Which?", "answer": colour} for name, colour in pictures(folder)]
    write_csv(folder / "metadata.csv", rows)
    return folder


def as_other_columns(folder: Path) -> Path:
    rows = [{"filename": n, "prompt": "Which?", "Response": c, "shelf": "a"} for n, c in pictures(folder / "images")]
    write_csv(folder / "labels.csv", rows)
    return folder


def as_captions(folder: Path) -> Path:
    for name, colour in pictures(folder):
        (folder / name).with_suffix(".txt").write_text(f"A {colour} picture.\n")
    return folder


def as_class_folders(folder: Path) -> Path:
    for name, colour in pictures(folder):
        (folder / f"{colour}_things").mkdir(exist_ok=True)
        (folder / name).rename(folder / f"{colour}_things" / name)
    return folder


def as_llava(folder: Path) -> Path:
    turns = [{"from": "human", "value": "<image>\nWelche Farbe ist das, und ist sie nicht schön?"}]
    records = [
        {"id": name, "image": name, "conversations": [*turns, {"from": "gpt", "value": colour}]}
        for name, colour in pictures(folder / "images")
    ]
    (folder / "chat.json").write_text(json.dumps(records))
    return folder


def as_json_lines(folder: Path) -> Path:
    rows = [{"image_path": f"{n}", "query": "Which?", "label": c} for n, c in pictures(folder)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def as_parquet(folder: Path) -> Path:
    rows = [
        {"image": {"bytes": (folder / name).read_bytes(), "path": name}, "question": "Which?", "answer": colour}
        for name, colour in pictures(folder)
    ]
    place = folder / "shards"
    place.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), place / "train-00000-of-00001.parquet")
    return place
