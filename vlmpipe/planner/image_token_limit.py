"""Check whether the largest image of a model fits into a packed sequence, so far as its configuration is at hand."""

from __future__ import annotations

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.grid_images import stated, vision_of
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.storage.model_folders import local_folder

SMALL = (64, 64)  # an image's width and height in pixels


def image_token_limit(model: ModelConfig, data: DataConfig) -> str:
    """How many tokens an image takes, in words; empty where weights must be read to know.

    Raises ConfigError for an image size that the tower does not take and for images that fit into no packed sequence.
    """
    if model.image_kind == "published":
        return _published_limit(model, data.sequence_length)
    if model.image_kind == "grids":
        return _grid_limit(model, data.sequence_length)
    tower = vision_of(stated(model.tower))
    patch_size = tower.get("patch_size")
    if not isinstance(patch_size, int) or patch_size < 1:
        return ""
    own_size = tower.get("image_size", model.image_size)
    if own_size != model.image_size:
        problem = f"model.image_size is {model.image_size}, but the tower's image_size is {own_size}"
        raise ConfigError(problem, fix=f"set model.image_size to {own_size}")
    if model.image_size % patch_size:
        raise ConfigError(
            f"model.image_size {model.image_size} is not a multiple of the tower's patch_size {patch_size}"
        )
    tokens = (model.image_size // patch_size) ** 2
    text = f"{tokens} per image, data.sequence_length is {data.sequence_length}"
    if tokens >= data.sequence_length:
        raise ConfigError(f"{text}: no image fits into a packed sequence")
    return text


def _published_limit(model: ModelConfig, sequence_length: int) -> str:
    """Return the tokens per image of a model with its publisher's image processor; empty if they are not known here.

    Preparation rejects samples whose images do not fit. Raises ConfigError if not even the smallest image fits.
    """
    if model.tower.weights and not local_folder(model.tower.weights, model.tower.revision, weights=False):
        return ""
    images = image_form_of(model).published
    assert images is not None
    least, most = sum(images.texts((SMALL,))[0].runs), images.max_tokens
    text = f"{least} to {most} per image by its size, data.sequence_length is {sequence_length}"
    if least >= sequence_length:
        raise ConfigError(f"{text}: no image fits into a packed sequence")
    return text


def _grid_limit(model: ModelConfig, sequence_length: int) -> str:
    """Return the tokens per image of a model whose images differ in tokens; empty if they are not known here.

    Raises ConfigError if the largest image, of model.max_pixels, does not fit into a packed sequence.
    """
    if model.tower.weights and not local_folder(model.tower.weights, model.tower.revision, weights=False):
        return ""
    grids = image_form_of(model).grids
    assert grids is not None and model.max_pixels is not None
    side = grids.patch * grids.merge
    text = (
        f"at most {grids.max_tokens} per image (model.max_pixels, {side} x {side} pixels a token), "
        f"data.sequence_length is {sequence_length}"
    )
    if model.max_pixels < side**2:
        raise ConfigError(f"model.max_pixels is less than a token's {side**2}")
    if grids.max_tokens >= sequence_length:
        raise ConfigError(f"{text}: the largest image fits into no packed sequence")
    return text
