"""Image marks in prompts and image token counts, without torch if the model's configuration file is complete.

Data preparation needs nothing else of the model, and importing torch takes longer than preparing a thousand records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.grid_images import (
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    grids_of,
    stated,
    type_and_vision,
    vision_of,
)
from vlmpipe.trainer.models.published import image_token_in
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.sizing.image_grids import FRAMES_PER_PATCH, ImageGrids, VideoSize, patches_in_time
from vlmpipe.trainer.sizing.image_tiles import control_tokens

if TYPE_CHECKING:
    from vlmpipe.trainer.models.hf.processor import PublishedImages

ImageTokens = Callable[[int, int], int]  # (width, height) in pixels -> tokens
CLIP, DINOV2 = "clip_vision_model", "dinov2"
KNOWN_TOWERS = (CLIP, DINOV2, "siglip_vision_model")  # others need transformers, which also rejects what is no tower
# Model types whose positions tell times of videos, and whose videos have positions that are not known here.
TIMED, WITHOUT_VIDEOS = "qwen2_5_vl", "qwen2_vl"
BOXES: dict[str, Literal["resized", "thousandths"]] = {
    "qwen2_5_vl": "resized", "qwen3_vl": "thousandths", "qwen3_vl_moe": "thousandths",
}  # fmt: skip
TOKENS_PER_S = 4.0  # of a Qwen2.5-VL whose configuration has none: transformers' default
THOUSANDTHS = 1000
PROBE_SIZES = ((64, 64), (640, 480), (480, 640), (1024, 1024))  # pixels; distinguish image token rules


@dataclass(frozen=True)
class VideoForm:
    """How videos are represented by tokens of their own, one run for all patches or one for each."""

    token: str = VIDEO_TOKEN
    tokens_per_s: float = 0.0  # positions in time of a second; 0: text before each patch says its time

    def text(self, size: VideoSize) -> str:
        """Tokens that replace the one that a chat template has written, as by the family's processor."""
        if self.tokens_per_s:
            return self.token
        # The template's own start and end stay around all of it, as in transformers' Qwen3VLProcessor.
        return "".join(f"<{time_s:.1f} seconds>{VISION_START}{self.token}{VISION_END}" for time_s in size.times_s())


@dataclass(frozen=True)
class ImageForm:
    """How images are represented in a sequence of tokens."""

    mark: str = IMAGE_TOKEN  # text of an image in a prompt; its image token is then repeated
    grids: ImageGrids | None = None  # None: all images are resized to one square
    is_in_tokenizer: bool = False  # the tokenizer must already have the marks' tokens
    control_tokens: tuple[str, ...] = ()  # around images, where the tokenizer is to have one for each
    token: str = IMAGE_TOKEN  # image token of the family's published tokenizers
    published: PublishedImages | None = None  # the model's own processor says what stands for an image
    max_kept: int | None = None  # tokens of an image that training packs, where the model selects some; None: all
    selects: bool = False  # the model selects tokens of images for each question
    videos: VideoForm | None = None  # None: the model takes frames of videos as images
    # Coordinates of boxes in texts: pixels of the resized image, or thousandths of its sides; "": not known.
    boxes: Literal["", "resized", "thousandths"] = ""

    def placeholder_in(self, tokenizer: object) -> str:
        """Text that a chat template writes for an image."""
        return self.token if self.published else image_token_in(tokenizer, self.token)

    def box_area(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """Width and height of an image of `size` pixels in the coordinates of boxes; None where they are not known.

        Sources: Qwen2.5-VL's and Qwen3-VL's cookbooks "2D grounding" at https://github.com/QwenLM/Qwen3-VL.
        """
        if self.boxes == "thousandths":
            return THOUSANDTHS, THOUSANDTHS
        if not self.boxes or not self.grids or isinstance(size, VideoSize):
            return None
        rows, columns = self.grids.of(*size)
        return columns * self.grids.patch, rows * self.grids.patch

    def marks(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Text of each image of a sample in a prompt. sizes: (width, height) in pixels."""
        if self.published:
            return [form.text for form in self.published.texts(tuple(sizes))]
        return [self.mark.replace(IMAGE_TOKEN, self._of(size)) for size in sizes]

    def replacements(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Tokens that replace each image's token of a chat template, as by the family's processor."""
        return [self._of(size) for size in sizes] if self.grids else self.marks(sizes)

    def runs(self, sizes: Sequence[tuple[int, int]], counts: Sequence[int], parts: Sequence[int]) -> list[int]:
        """Lengths of the runs of image tokens in `marks`. counts, parts: tokens and runs of each image."""
        if self.published:
            return [length for form in self.published.texts(tuple(sizes)) for length in form.runs]
        return [count // part for count, part in zip(counts, parts, strict=True) for _ in range(part)]

    def _of(self, size: tuple[int, int]) -> str:
        """Tokens in place of one image token, for an image or a video."""
        return self.videos.text(size) if self.videos and isinstance(size, VideoSize) else IMAGE_TOKEN


SQUARES = ImageForm()


def image_form_of(config: ModelConfig) -> ImageForm:
    """Imports torch only if the configuration file is incomplete, and for images as a processor makes them.

    Raises ConfigError for a model type whose images are no grids here.
    """
    if config.image_kind == "published":
        from vlmpipe.trainer.models.hf.processor import published_images

        images = published_images(config.tower, config.image_settings)
        around = () if config.is_of_any_type else control_tokens(config.image_size, config.longest_edge)
        return ImageForm(is_in_tokenizer=True, token=images.placeholder, published=images, control_tokens=around)
    grids = grids_of(config)
    if grids is None:
        return SQUARES
    kind, vision = type_and_vision(config)
    selects = config.relevance is not None
    max_kept = config.relevance.max_tokens if config.relevance else None
    if max_kept is not None and max_kept > grids.max_tokens:
        raise ConfigError(
            f"model.relevance.max_tokens {max_kept} is more than the {grids.max_tokens} tokens of the largest image",
            expected="fewer tokens than an image has, which model.max_pixels bounds",
            fix="lower max_tokens, or set model.relevance.allocation to full",
        )
    mark = f"{VISION_START}{IMAGE_TOKEN}{VISION_END}"
    videos = None
    in_pairs = int(vision.get("temporal_patch_size", FRAMES_PER_PATCH)) == FRAMES_PER_PATCH
    if in_pairs and not selects and kind != WITHOUT_VIDEOS:
        tokens_per_s = float(vision.get("tokens_per_second", TOKENS_PER_S)) if kind == TIMED else 0.0
        videos = VideoForm(tokens_per_s=tokens_per_s)
    return ImageForm(
        mark,
        grids,
        token=config.image_token,
        max_kept=max_kept,
        selects=selects,
        videos=videos,
        boxes=BOXES.get(kind, ""),
    )


def image_rule(config: ModelConfig) -> object:
    """Settings that determine the tokens of images, as plain JSON. Part of prepared data's fingerprint."""
    form = image_form_of(config)
    if form.published:
        return form.published.rule() if config.is_of_any_type else _tile_rule(config, form.published)
    if form.grids:
        return {"mark": form.mark, "boxes": form.boxes, **form.grids.as_dict()}
    image_tokens = image_tokens_of(config)
    return [image_tokens(*size) for size in PROBE_SIZES]


def _tile_rule(config: ModelConfig, published: PublishedImages) -> dict[str, object]:
    """In the form in which earlier versions wrote it: their runs continue with the data that they have."""
    (smallest,) = published.texts(((1, 1),))
    if edge := config.longest_edge:
        sizes: dict[str, object] = {"side": config.image_size, "longest_edge": edge, "tokens": smallest.runs[0]}
    else:
        sizes = {"tokens": [sum(smallest.runs)] * len(PROBE_SIZES)}
    return {"mark": smallest.text, **sizes}


def sample_image_tokens(config: ModelConfig) -> Callable[[Sequence[tuple[int, int]]], list[int]]:
    """Counts tokens of each image of a sample, by the sizes of all its images."""
    if published := image_form_of(config).published:
        return lambda sizes: [sum(form.runs) for form in published.texts(tuple(sizes))]
    count = image_tokens_of(config)
    return lambda sizes: [count(*size) * patches_in_time(size) for size in sizes]


def image_tokens_of(config: ModelConfig) -> ImageTokens:
    """Counts tokens of a sample's only image. Imports torch only if the configuration file is incomplete."""
    form = image_form_of(config)
    if form.published:
        of_sample = sample_image_tokens(config)
        return lambda width, height: of_sample([(width, height)])[0]
    if form.grids:
        return cache(form.grids.tokens)
    content = stated(config.tower)
    vision = vision_of(content)
    if config.family == "llava" and vision.get("model_type") in KNOWN_TOWERS and "patch_size" in vision:
        count = square_tokens(config, str(vision["model_type"]), int(vision["patch_size"]))
        return lambda width, height: count
    count = family_of(config).feature_shape(config)[0]
    return lambda width, height: count


def square_tokens(config: ModelConfig, tower_type: str, patch_size: int) -> int:
    """Language-model tokens of an image resized to the square of `image_size`; `patch_size` in pixels."""
    side = config.image_size // patch_size
    return side * side + (class_tokens(tower_type) if config.feature_select == "full" else 0)


def class_tokens(tower_type: str) -> int:
    """Tokens that a tower puts before those of the patches."""
    return 1 if tower_type in (CLIP, DINOV2) else 0
