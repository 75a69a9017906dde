"""Write 900 scans of handwritten digits as LLaVA records, with the faults that real labels have.

    python examples/good_enough/make_data.py

Wrong labels, scans that were delivered twice, and a pen that is hard to read are planted, so that what is found can be
compared with what there is: the ids are in my-data/planted.json. Labels of a new question, and questions that must not
be forgotten over them, are about other scans. Scans: scikit-learn, which is installed.
"""

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance
from sklearn.datasets import load_digits

SCANS, WRONG, COPIES = 900, 45, 27
NEW, KEPT = 400, 100  # scans of the new question, and of what must not be forgotten
DIGIT, EVEN = "which digit is this?", "is it even?"
PENS = ("ballpoint", "fountain pen", "pencil", "ballpoint", "ballpoint")  # a pencil is faint, and its paper not clean

folder = Path("my-data")
(folder / "images").mkdir(parents=True, exist_ok=True)
digits, draw, noise = load_digits(), random.Random(1), np.random.default_rng(1)


def paper() -> np.ndarray:
    """A sheet of its own for each scan; all are equal from run to run."""
    return np.clip(noise.normal(128, 60, (64, 64)), 0, 255).astype("uint8")


def scan_of(number: int, pen: str) -> Image.Image:
    grey = digits.images[number] * 255 / 16
    image = Image.fromarray(grey.astype("uint8")).resize((64, 64), Image.Resampling.NEAREST)
    if pen == "pencil":
        image = Image.blend(image, Image.fromarray(paper()), 0.75)
    return image


def record(name: str, pen: str, answer: object, question: str = DIGIT) -> dict[str, object]:
    turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": str(answer)}]
    return {"id": name, "image": f"{name}.png", "pen": pen, "conversations": turns}


labels = []
wrong = set(draw.sample(range(SCANS), WRONG))
for number in range(SCANS):
    pen, digit = PENS[number % len(PENS)], int(digits.target[number])
    answer = draw.choice([other for other in range(10) if other != digit]) if number in wrong else digit
    scan_of(number, pen).save(folder / "images" / f"scan-{number}.png")
    labels.append(record(f"scan-{number}", pen, answer))
copies = draw.sample([number for number in range(SCANS) if number not in wrong], COPIES)
for number in copies:
    pen = labels[number]["pen"]
    brighter = ImageEnhance.Brightness(scan_of(number, pen)).enhance(1.15)
    brighter.save(folder / "images" / f"again-{number}.png")
    labels.append(record(f"again-{number}", pen, int(digits.target[number])))
draw.shuffle(labels)
(folder / "labels.json").write_text(json.dumps(labels), encoding="utf-8")
planted = {"wrong": [f"scan-{number}" for number in sorted(wrong)], "copies": [f"again-{number}" for number in copies]}
(folder / "planted.json").write_text(json.dumps(planted), encoding="utf-8")
others = range(SCANS, SCANS + NEW + KEPT)
for number in others:
    scan_of(number, "ballpoint").save(folder / "images" / f"scan-{number}.png")
even = [record(f"scan-{n}", "ballpoint", "no" if digits.target[n] % 2 else "yes", EVEN) for n in others[:NEW]]
kept = [{"imgname": f"scan-{n}.png", "query": DIGIT, "label": str(digits.target[n])} for n in others[NEW:]]
(folder / "even.json").write_text(json.dumps(even), encoding="utf-8")
(folder / "kept.json").write_text(json.dumps(kept), encoding="utf-8")
print(f"{len(labels)} labels in my-data/labels.json: {WRONG} are wrong, {COPIES} scans are there twice")
print(f"{NEW} labels of a new question in my-data/even.json, {KEPT} questions in my-data/kept.json")
