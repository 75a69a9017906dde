"""Builds a data set with planted faults: copies of images that were encoded again, and wrong labels."""

from __future__ import annotations

import io
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from PIL import Image, ImageEnhance

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import Sample, stable_shuffle
from vlmpipe.trainer.data.sources import open_source

COPIES_SHARE, WRONG_SHARE = 0.03, 0.05


def _encoded(image: Image.Image, form: str, **options: int | bool) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def _resized(image: Image.Image) -> bytes:
    size = (round(image.width * 0.8), round(image.height * 0.8))
    return _encoded(image.resize(size, Image.Resampling.BICUBIC), "PNG")


def _cropped(image: Image.Image) -> bytes:
    across, down = max(1, round(image.width * 0.03)), max(1, round(image.height * 0.03))
    return _encoded(image.crop((across, down, image.width - across, image.height - down)), "PNG")


# By kind: the bytes of a copy, and the suffix of its file.
KINDS: dict[str, tuple[Callable[[Image.Image], bytes], str]] = {
    "JPEG, quality 60": (lambda image: _encoded(image, "JPEG", quality=60), "jpg"),
    "0.8 times the size": (_resized, "png"),
    "cropped by 3 %": (_cropped, "png"),
    "WebP": (lambda image: _encoded(image, "WEBP", quality=80), "webp"),
    "brightness 1.15": (lambda image: _encoded(ImageEnhance.Brightness(image).enhance(1.15), "PNG"), "png"),
}


@dataclass(frozen=True)
class Planted:
    """The file of records, and what was planted. copies: kind of each copy by its id, with the id of its original."""

    records: Path
    samples: int
    copies: dict[str, tuple[str, str]]
    wrong: frozenset[str]


# By source: the questions that are kept, one for each sample; empty: the first of each.
ASKED = {
    "builtin:digits": ("what digit is this?",),
    "builtin:easy-vqa": ("what color is the shape?", "what shape does the image contain?", "what shape is present?"),
    "builtin:openmoji": (),
}


def plant(source: str, folder: Path, samples: int, seed: int = 0, skipped: int = 0) -> Planted:
    """Write `samples` samples of a source, each with one question, and faults, as LLaVA records.

    A wrong answer is that of another sample to the same question; of captions, which all have one question, too.
    skipped: samples that come before them. Fewer are written where fewer are left.
    """
    (folder / "images").mkdir(parents=True)
    records, contents = [], {}
    for number, sample in enumerate(islice(_samples(source), skipped, skipped + samples)):
        name, contents[number] = f"{number}.png", Image.open(io.BytesIO(sample.images[0].read())).convert("RGB")
        contents[number].save(folder / "images" / name)
        records.append(_record(f"sample-{number}", name, *_asked(sample, ASKED[source])))
    order = stable_shuffle(range(len(records)), f"planted {seed}")
    wrong = _with_wrong_labels(records, order[: round(WRONG_SHARE * len(records))], random.Random(seed))
    copied = order[-round(COPIES_SHARE * len(records)) :]
    copies: dict[str, tuple[str, str]] = {}
    for place, number in enumerate(copied):
        kind = list(KINDS)[place % len(KINDS)]
        encode, suffix = KINDS[kind]
        name = f"copy-{number}.{suffix}"
        (folder / "images" / name).write_bytes(encode(contents[number]))
        copies[f"copy-{number}"] = (kind, f"sample-{number}")
        records.append({**records[number], "id": f"copy-{number}", "image": name})
    path = folder / "records.json"
    path.write_text(json.dumps(records), encoding="utf-8")
    return Planted(path, len(records), copies, wrong)


def _samples(source: str) -> Sequence[Sample]:
    read = open_source(DataConfig(source=source, sequence_length=512))
    samples = [one for one in read if isinstance(one, Sample) and len(one.images) == 1 and _asked(one, ASKED[source])]
    return [samples[number] for number in stable_shuffle(range(len(samples)), "planted samples")]


def _asked(sample: Sample, questions: Sequence[str]) -> tuple[str, ...]:
    """Question and answer of the sample that are kept; empty where it has none of these questions."""
    turns = [(turn.question.replace(IMAGE_TOKEN, "").strip(), turn.answer) for turn in sample.turns]
    return next((turn for turn in turns if not questions or turn[0] in questions), ())


def _record(identity: str, image: str, question: str, answer: str) -> dict[str, object]:
    turns = [{"from": "human", "value": f"{IMAGE_TOKEN}\n{question}"}, {"from": "gpt", "value": answer}]
    return {"id": identity, "image": image, "conversations": turns}


def _with_wrong_labels(records: list[dict[str, object]], chosen: Sequence[int], draw: random.Random) -> frozenset[str]:
    answers: dict[str, list[str]] = defaultdict(list)
    for record in records:
        question, answer = (turn["value"] for turn in record["conversations"])  # type: ignore[attr-defined]
        answers[question].append(answer)
    wrong = set()
    for number in chosen:
        turns = records[number]["conversations"]
        others = [answer for answer in answers[turns[0]["value"]] if answer != turns[1]["value"]]  # type: ignore[index]
        if others:
            turns[1]["value"] = draw.choice(sorted(others))  # type: ignore[index]
            wrong.add(str(records[number]["id"]))
    return frozenset(wrong)
