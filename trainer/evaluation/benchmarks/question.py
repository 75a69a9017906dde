"""A question of a benchmark, whatever the format of its file."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpipe.trainer.data.sample import DEFAULT_SLICE, ImageRef


@dataclass(frozen=True, slots=True)
class BenchmarkQuestion:
    """One question about one image.

    answers: right ones; of vqav2 and textvqa ten people's, of coco-captions all captions of the image.
    choices: letters and texts of a multiple choice.
    group: questions that are taken or left out together, and scored together by circular evaluation.
    """

    id: str
    text: str
    image: ImageRef
    answers: tuple[str, ...]
    slice: str = DEFAULT_SLICE
    choices: tuple[tuple[str, str], ...] = ()
    group: str = ""
