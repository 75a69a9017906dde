"""Samples with videos for the families that take them as such, and what transformers itself makes of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers.video_utils import VideoMetadata

from tests.support.data.videos import write_video
from tests.support.trainer.chat_templates import IMAGE, PLAIN, tokenizer_with
from tests.support.trainer.native_models import picture
from tests.support.trainer.processors import PROCESSORS
from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.loader import PackedLoader
from vlmpipe.trainer.data.prepare.pipeline import prepare
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.models.grid_images import VIDEO_TOKEN
from vlmpipe.trainer.models.hf.processor import without_video
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.models.video_file import frames_of
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.sizing.image_grids import VideoSize

START, END = "<|vision_start|>", "<|vision_end|>"
WITH_VIDEOS = PLAIN.replace(
    "{% else %}{{ part.text }}",
    f"{{% elif part.type == 'video' %}}{START}{VIDEO_TOKEN}{END}{{% else %}}{{{{ part.text }}}}",
)
# 4 s at 1.5 frames a second, which is 6, and 1.7 s, which is 2: times are no whole numbers.
RECORDS: tuple[dict[str, Any], ...] = (
    {"id": "both", "videos": ["long.mp4"], "image": "a.png", "asked": "<image>\nbefore <video>\nwhat is this?"},
    {"id": "image", "image": "a.png", "asked": "<image>\nwhat is this?"},
    {"id": "two", "videos": ["short.mp4", "long.mp4"], "asked": "<video> and <video>\nwhat is this?"},
)


def video_job(folder: Path, family: str, *, template: str = WITH_VIDEOS, **changes: Any) -> JobConfig:
    """A run over RECORDS, all of them in the training split."""
    folder.mkdir(parents=True, exist_ok=True)
    write_video(folder / "long.mp4")
    write_video(folder / "short.mp4", 17)
    (folder / "a.png").write_bytes(picture(5, (40, 16)))
    (folder / "template.jinja").write_text(template)
    tokenizer_with(IMAGE, "<|end|>", None, VIDEO_TOKEN).save_pretrained(folder / "tokenizer")
    records = changes.pop("records", RECORDS)
    lines = [
        {**{name: value for name, value in one.items() if name != "asked"}, "messages": [
            {"role": "user", "content": one["asked"]}, {"role": "assistant", "content": f"a cat. {one['id']}"}]}
        for one in records
    ]  # fmt: skip
    (folder / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "source": str(folder / "set.jsonl"),
        "sequence_length": 512,
        "video": "native",
        "video_fps": 1.5,
        "validation_fraction": 0.0,
        "chat_template": str(folder / "template.jinja"),
    }
    section = model_section(family, tokenizer=str(folder / "tokenizer"))
    content = merged(TINY, {"model": section, "data": data, **changes})
    return JobConfig.model_validate(content | {"run": {"run_id": "run", "root_uri": str(folder / "root")}})


@dataclass
class Videos:
    """Prepared samples with videos, and a model that tells them apart."""

    job: JobConfig
    uri: str
    split: SplitIndex
    reader: ShardReader
    chat: Chat
    loader: PackedLoader
    plain: nn.Module

    @classmethod
    def prepared(cls, folder: Path, family: str) -> Videos:
        job = video_job(folder, family)
        uri = prepare(job, Progress(job.run.run_uri, "prepare-data", quiet=True)).uri
        storage = open_prepared(uri)
        chat, split, reader = (
            Chat.load(storage, image_form_of(job.model)), Index.load(uri).split("train"), ShardReader.open(storage)
        )  # fmt: skip
        sampler = PackedBatchSampler(split, job.data, seed=0, global_batch_size=1)
        plain = family_of(job.model).build(job.model, chat.tokenizer).eval()
        with torch.no_grad():
            for weight in plain.parameters():
                weight.mul_(4 if weight.ndim > 1 else 1)  # so large that attention tells tokens apart
        return cls(job, uri, split, reader, chat, PackedLoader(split, sampler, chat, reader, images=True), plain)

    def shown(self, number: int) -> list[tuple[tuple[int, int], list[Image.Image]]]:
        """Size and pictures of each image or video of a sample."""
        stored = self.reader.images(self.split.sample_location(number))
        pictures = [[Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames_of(data)] for data in stored]
        return list(zip(self.split.image_sizes(number), pictures, strict=True))

    def by_the_library(self, number: int, text: str) -> dict[str, Any]:
        """All arguments of the plain model for a sample whose template wrote `text`.

        Ids and times are the library's own processor's. Its video processors need torchvision: frames are resized as
        images are, and cut into patches by their arithmetic (`patchify`).
        """
        stills, videos = [], []
        for size, pictures in self.shown(number):
            (videos if isinstance(size, VideoSize) else stills).append((size, pictures))
        processor = self.processor()
        images: dict[str, Any] = {}
        if stills:
            images = dict(processor.image_processor([one for _, (one,) in stills], return_tensors="pt"))
        cut = [patchified(processor.image_processor, pictures) for _, pictures in videos]
        metadata = [
            VideoMetadata(total_num_frames=2 * size.patches, fps=2 / size.patch_s,
                          frames_indices=[place + 0.5 for place in range(2 * size.patches)])
            for size, _ in videos
        ]  # fmt: skip
        moving = {"video_grid_thw": torch.tensor([grid for _, grid in cut]), "video_metadata": metadata}
        (written,), _ = processor.get_text_with_replacements(
            [text],
            [processor.replace_image_token(images, place) for place in range(len(stills))],
            [processor.replace_video_token(moving, place) for place in range(len(videos))],
        )
        ids = processor.tokenizer(written, add_special_tokens=False)["input_ids"]
        given = images | {
            "input_ids": torch.tensor([ids]),
            "mm_token_type_ids": torch.tensor(processor.create_mm_token_type_ids([ids])),
        }
        if videos:
            given["video_grid_thw"] = moving["video_grid_thw"]
            given["pixel_values_videos"] = torch.from_numpy(np.concatenate([patches for patches, _ in cut]))
            if self.job.model.family == "qwen2_5_vl":
                given["second_per_grid_ts"] = torch.tensor([size.patch_s for size, _ in videos])
        return given

    def processor(self) -> Any:
        kind = without_video(PROCESSORS[self.job.model.family])
        made = kind(family_of(self.job.model).image_processor(self.job.model), self.chat.tokenizer, None)
        made.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
        return made


def patchified(processor: Any, pictures: Sequence[Image.Image]) -> tuple[np.ndarray, list[int]]:
    """Patches (patches, numbers) and grid of a video."""
    side, merge = processor.patch_size, processor.merge_size
    made = [processor([one], return_tensors="np") for one in pictures]
    ((_, rows, columns),) = made[0]["image_grid_thw"].tolist()
    # Back to pictures: an image's patches are (rows, columns, merge, merge, colours, time, side, side).
    shape = (rows // merge, columns // merge, merge, merge, 3, 2, side, side)
    stills = [one["pixel_values"].reshape(shape)[:, :, :, :, :, 0] for one in made]
    video = np.stack([one.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side) for one in stills])
    cut = video.reshape(-1, 2, 3, rows // merge, merge, side, columns // merge, merge, side)
    patches = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * side * side)
    return np.ascontiguousarray(patches), [len(pictures) // 2, rows, columns]
