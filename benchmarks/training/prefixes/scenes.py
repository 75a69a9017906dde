"""Drawn scenes with questions in the numbers and kinds of GQA: attributes, existence, relations, places, counts."""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 64  # pixels
COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "rectangle", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")
MEAN_QUESTIONS, SPREAD = 13, 3  # about an image; GQA's balanced training split has 13.1


@dataclass(frozen=True)
class Scene:
    """Distinct shapes by their place."""

    shapes: dict[str, tuple[str, str]]  # colour and shape

    @classmethod
    def drawn(cls, numbers: random.Random) -> Scene:
        count = numbers.choice((2, 3))
        shapes = numbers.sample(SHAPES, count)
        places = sorted(numbers.sample(PLACES, count))
        return cls({place: (numbers.choice(list(COLOURS)), shape) for place, shape in zip(places, shapes, strict=True)})

    def questions(self) -> list[tuple[str, str]]:
        """All questions with their answers."""
        found = [("how many shapes are there?", str(len(self.shapes)))]
        place_of = {shape: place for place, (_, shape) in self.shapes.items()}
        for place in PLACES:
            found.append((f"what is at the {place}?", self.shapes[place][1] if place in self.shapes else "nothing"))
        for colour, shape in self.shapes.values():
            found += [(f"what color is the {shape}?", colour), (f"where is the {shape}?", place_of[shape])]
        there = set(self.shapes.values())
        for shape in SHAPES:
            found += [(f"is there a {colour} {shape}?", _yes_no((colour, shape) in there)) for colour in COLOURS]
        for one, other in permutations(place_of, 2):
            first, second = place_of[one].split()[1], place_of[other].split()[1]
            if first != second:
                found.append((f"is the {one} left of the {other}?", _yes_no(first == "left")))
        return found

    def png(self) -> bytes:
        image = Image.new("RGB", (SIDE, SIDE), (245, 245, 245))
        draw, half = ImageDraw.Draw(image), SIDE // 2
        for place, (colour, shape) in self.shapes.items():
            top, left = half * place.startswith("bottom"), half * place.endswith("right")
            box = (left + 4, top + 4, left + half - 5, top + half - 5)
            if shape == "circle":
                draw.ellipse(box, COLOURS[colour])
            elif shape == "rectangle":
                draw.rectangle(box, COLOURS[colour])
            else:
                draw.polygon([(box[0], box[3]), (box[2], box[3]), (left + half // 2, box[1])], COLOURS[colour])
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()


def write_scenes(folder: Path, train: int, validation: int) -> Path:
    """LLaVA records: one an image, with all its questions as turns in an order of chance."""
    folder.mkdir(parents=True)
    records = []
    for number in range(train + validation):
        numbers = random.Random(number)
        scene = Scene.drawn(numbers)
        (folder / f"{number}.png").write_bytes(scene.png())
        asked = scene.questions()
        count = min(len(asked), numbers.randint(MEAN_QUESTIONS - SPREAD, MEAN_QUESTIONS + SPREAD))
        turns: list[dict[str, str]] = []
        for question, answer in numbers.sample(asked, count):
            mark = "" if turns else "<image>\n"
            turns += [{"from": "human", "value": mark + question}, {"from": "gpt", "value": answer}]
        split = "train" if number < train else "validation"
        records.append({"id": f"scene-{number}", "split": split, "image": f"{number}.png", "conversations": turns})
    (folder / "scenes.json").write_text(json.dumps(records), encoding="utf-8")
    return folder / "scenes.json"


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
