"""The curves of built-in sets: what is asked about which images, and that their run files are valid."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from benchmarks.evaluation import curve_sets as part
from vlmpipe.config.run_config import load_run_file

SIZES = part.Sizes(samples=6)


def written(folder: Path, name: str) -> list[dict[str, Any]]:
    part._write(folder, part.CASES[name], SIZES)
    records: list[dict[str, Any]] = json.loads((folder / "labels.json").read_text())
    return records


def test_two_draws_of_a_set_share_no_image_and_have_the_answers_of_the_set(tmp_path: Path) -> None:
    for source in ("digits", "easy-vqa"):
        first, other = (name for name in part.CASES if name.startswith(source))
        images = set[bytes]()
        for name in (first, other):
            folder = tmp_path / name
            records = written(folder, name)
            assert len(records) == SIZES.samples
            images |= {(folder / "images" / record["image"]).read_bytes() for record in records}
            answers = {record["conversations"][1]["value"] for record in records}
            assert len(answers) > 1 and all(answer.isdigit() == (source == "digits") for answer in answers)
        assert len(images) == 2 * SIZES.samples


def test_a_case_is_a_valid_run_file_of_equal_steps(tmp_path: Path) -> None:
    written(tmp_path, "digits")
    config = load_run_file(tmp_path / "curve.yaml")
    assert config.train.max_steps == SIZES.max_steps and config.train.early_stopping is None
    assert config.data.source == str(tmp_path / "labels.json") and not config.data.slices


def test_the_main_colour_is_that_of_the_area_and_not_of_outlines() -> None:
    sample: Any = None
    colours = [part.main_colour(sample, drawn(fill)) for fill in ("red", "blue", "#bbbbbb")]
    assert colours == ["red", "blue", "grey"]


def drawn(fill: str) -> bytes:
    """A square with a black outline on white paper."""
    image, written = Image.new("RGB", (64, 64), "white"), io.BytesIO()
    ImageDraw.Draw(image).rectangle((8, 8, 56, 56), fill=fill, outline="black", width=4)
    image.save(written, "PNG")
    return written.getvalue()
