"""Rules of videos that are not cut into images."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.trainer.config.job import JobSections
from vlmpipe.trainer.config.model import GRID_FAMILIES
from vlmpipe.trainer.hooks.rules import FeatureRules, obstacles_to
from vlmpipe.trainer.models.video_file import MAX_FRAMES
from vlmpipe.trainer.sizing.image_grids import FRAMES_PER_PATCH


class NativeVideoRules(FeatureRules):
    def problems(self, job: JobSections) -> Iterator[tuple[str, str]]:
        model, data, text = job.model, job.data, ""
        if model.image_kind != "grids":
            grids = f"{' or '.join(GRID_FAMILIES)}, or hf with max_pixels"
            text = f"with model.family {model.family}; expected {grids}, or frames"
        elif reasons := obstacles_to("native_video", job):
            text = reasons[0]
        elif model.tokenizer.startswith("train:"):
            text = f"with model.tokenizer {model.tokenizer}, which has no token of videos; expected a published one"
        elif job.train.trainer:
            text = "with train.trainer, whose program gets images; expected frames"
        if text:
            yield "data.video", f"found native {text}"
        if not FRAMES_PER_PATCH <= data.video_frames <= MAX_FRAMES:
            text = f"found {data.video_frames} with data.video native; expected {FRAMES_PER_PATCH} to {MAX_FRAMES}"
            yield "data.video_frames", text
        if data.video_times:
            text = "found true with data.video native, which gives times as the model's own processor does; expected "
            yield "data.video_times", f"{text}false"


RULES = NativeVideoRules()
