"""Pixels that transformers' image processors make by Pillow and by torchvision, on photographs.

    build/recipes/vllm/bin/python benchmarks/evaluation/resampling.py PHOTOGRAPH...

prints a table; `make recipe-vllm` makes the environment, which has torchvision. Each photograph is shown whole, and as
quarters. Settings are those of published models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name as named

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIP, 336 pixels (LLaVA 1.5)": (
        "CLIPImageProcessor", {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    ),
    "SigLIP, 384 pixels": ("SiglipImageProcessor", {"size": {"height": 384, "width": 384}}),
    "Gemma 3, 896 pixels": ("Gemma3ImageProcessor", {"size": {"height": 896, "width": 896}}),
    "Qwen2.5-VL, at most 448 x 448": (
        "Qwen2VLImageProcessor", {"size": {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}}
    ),
    "SmolVLM, tiles of 512 pixels": (
        "SmolVLMImageProcessor", {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    ),
}  # fmt: skip


def shown(paths: list[Path]) -> Iterator[Image.Image]:
    for path in paths:
        whole = Image.open(path).convert("RGB")
        width, height = whole.size
        yield whole
        for left in (0, width // 2):
            for upper in (0, height // 2):
                yield whole.crop((left, upper, left + width // 2, upper + height // 2))


def main(paths: list[Path]) -> None:
    pictures = list(shown(paths))
    print(f"transformers {transformers.__version__}, torchvision {version('torchvision')}, {len(pictures)} pictures\n")
    print("| processor | pixels that differ | mean difference | 99.9 % are at most | largest |")
    print("|---|---|---|---|---|")
    for title, (name, settings) in CASES.items():
        by_pillow, by_torchvision = named(f"{name}Pil")(**settings), named(name)(**settings)
        found = []
        for picture in pictures:
            first, second = (
                np.asarray(one([picture], return_tensors="pt")["pixel_values"], np.float64)
                for one in (by_pillow, by_torchvision)
            )
            assert first.shape == second.shape
            levels = 255 * np.mean(by_pillow.image_std)  # of a normalized unit: in levels of 0 to 255
            found.append(np.abs(first - second).ravel() * levels)
        all_of = np.concatenate(found)
        print(
            f"| {title} | {(all_of > 0.5).mean():.1%} | {all_of.mean():.2f} | {np.quantile(all_of, 0.999):.1f} "
            f"| {all_of.max():.1f} |"
        )


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
