"""Small benchmark files of our own in each published format, with images that the questions are about."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from PIL import Image

from vlmpipe.trainer.config.benchmarks import BenchmarkConfig, BenchmarkFormat
from vlmpipe.trainer.data.sample import png_bytes

COLOURS = {1: "red", 2: "blue"}  # of the images, by number
PEOPLE = 10


def picture(number: int) -> bytes:
    return png_bytes(Image.new("RGB", (48, 40), COLOURS[number]))


def contents(form: BenchmarkFormat) -> dict[str, Any]:
    """Parsed content of a format's files by name: JSON, JSON lines or rows of a table. Two questions each."""
    numbers = tuple(COLOURS)
    ten = {number: [COLOURS[number]] * (PEOPLE - 1) + ["grey"] for number in numbers}
    ask = "Which colour is it?"
    match form:
        case "vqav2":
            head = {"info": {"version": "2.0"}, "data_type": "mscoco", "data_subtype": "val2014"}
            annotations = [
                {"question_id": n * 1000, "image_id": n, "answer_type": "other", "question_type": "which",
                 "answers": [{"answer": text, "answer_id": i} for i, text in enumerate(ten[n], 1)]}
                for n in numbers
            ]  # fmt: skip
            questions = [{"question_id": n * 1000, "image_id": n, "question": ask} for n in numbers]
            return {
                "questions.json": head | {"task_type": "Open-Ended", "questions": questions},
                "annotations.json": head | {"annotations": annotations},
            }
        case "textvqa":
            records = [{"question_id": n, "image_id": f"i{n}", "question": ask, "answers": ten[n]} for n in numbers]
            return {"questions.json": {"dataset_name": "textvqa", "dataset_version": "0.5.1", "data": records}}
        case "docvqa":
            records = [
                {"questionId": n, "image": f"documents/{n}.png", "question": ask, "answers": [COLOURS[n]]}
                for n in numbers
            ]
            return {"questions.json": {"dataset_split": "val", "data": records}}
        case "pope":
            return {
                "questions.json": [
                    {"question_id": n, "image": f"{n}.png", "text": "Is it red?", "label": "yes" if n == 1 else "no"}
                    for n in numbers
                ]
            }
        case "mmbench":
            image = {n: base64.b64encode(picture(n)).decode() for n in numbers}
            row = {"question": ask, "hint": "nan", "C": "", "D": "", "category": "colour"}
            return {
                "questions.tsv": [
                    row | {"index": "1", "A": "red", "B": "blue", "answer": "A", "image": image[1]},
                    row | {"index": "2", "A": "red", "B": "blue", "answer": "B", "image": image[2], "hint": "Look."},
                    row | {"index": "1000001", "A": "blue", "B": "red", "answer": "B", "image": "1"},
                ]
            }
        case "chartqa":
            return {"questions.json": [{"imgname": f"{n}.png", "query": ask, "label": COLOURS[n]} for n in numbers]}
        case "coco-captions":
            captions = [{"image_id": n, "caption": f"{a} {COLOURS[n]} wall."} for n in numbers for a in ("A", "One")]
            images = [{"id": n, "file_name": f"{n}.png"} for n in numbers]
            return {"questions.json": {"images": images, "annotations": captions}}


IMAGE_NAMES = {"vqav2": "COCO_val2014_{:012}.jpg", "textvqa": "i{}.jpg", "docvqa": "documents/{}.png"}


def write(folder: Path, form: BenchmarkFormat, files: dict[str, Any] | None = None) -> BenchmarkConfig:
    """Write a format's files (given ones in place of `contents`) and images below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (files or contents(form)).items():
        if form == "pope":
            text = "".join(f"{json.dumps(record)}\n" for record in content)
        elif form == "mmbench":
            columns = list(content[0])
            text = "\n".join("\t".join(row) for row in (columns, *([row[c] for c in columns] for row in content)))
        else:
            text = json.dumps(content)
        (folder / name).write_text(text)
    settings: dict[str, Any] = {"name": form, "format": form, "uri": str(folder / "questions.json")}
    if form == "mmbench":
        return BenchmarkConfig.model_validate(settings | {"uri": str(folder / "questions.tsv")})
    for number in COLOURS:
        path = folder / "images" / IMAGE_NAMES.get(form, "{}.png").format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    if form == "vqav2":
        settings["annotations"] = str(folder / "annotations.json")
    return BenchmarkConfig.model_validate(settings | {"images": str(folder / "images")})
