"""Data whose pictures differ in shape and number, for native vision-language models."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((16, 16), (40, 16), (24, 56), (64, 64), (17, 31))  # (width, height) in pixels


def picture(seed: int, size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_data(folder: Path, samples: int = 24, *, pairs: bool = False) -> dict[str, Any]:
    """LLaVA records with none, one or two pictures each. Returns the fields of the data section that read them. pairs:
    with a rejected answer."""
    folder.mkdir()
    records = []
    for number in range(samples):
        names = [f"{number}-{place}.png" for place in range(number % 3)]
        for place, name in enumerate(names):
            (folder / name).write_bytes(picture(number * 2 + place, SIZES[(number + place) % len(SIZES)]))
        question = "<image>\n" * len(names) + f"which number is this, {number} or {number + 1}?"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"it is {number}"}]
        rejected = {"rejected": f"it is {number + 1} or so"} if pairs else {}
        record = {"id": f"sample-{number:02}", "conversations": turns} | ({"image": names} if names else {})
        records.append(record | rejected)
    (folder / "records.json").write_text(json.dumps(records))
    return {
        "source": str(folder / "records.json"),
        "image_folder": str(folder),
        "sequence_length": 256,
        "shard_samples": 20,
    }
