"""Questions of easy-vqa, each a record of its own, about images of noise."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import numpy as np
from PIL import Image


def write_questions(folder: Path, images: int, side: int) -> Path:
    """LLaVA records: easy-vqa's questions about its first images, one a record, and one image for validation."""
    import easy_vqa

    asked = sorted(zip(*reversed(easy_vqa.get_train_questions()), strict=True))  # by image, answer and question
    records = []
    folder.mkdir(parents=True)
    by_image = itertools.groupby(asked, key=lambda one: one[0])
    for number, (_, of_image) in enumerate(itertools.islice(by_image, images + 1)):
        noise = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, "PNG")
        (folder / f"{number}.png").write_bytes(buffer.getvalue())
        split = "train" if number < images else "validation"
        for place, (_, answer, question) in enumerate(of_image):
            said = [("human", f"<image>\n{question}"), ("gpt", str(answer))]
            turns = [{"from": role, "value": text} for role, text in said]
            record = {"id": f"{number}-{place}", "split": split, "image": f"{number}.png", "conversations": turns}
            records.append(record)
    (folder / "questions.json").write_text(json.dumps(records), encoding="utf-8")
    return folder / "questions.json"
