"""Processors of models that cut images into tiles, Idefics3 and SmolVLM: tokens of a tile, tiles of an image without
its pixels, and models without files."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, ProcessorMixin
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.image_tiles import AROUND, SHOWS_ALL

UNKNOWN = "<unk>"
WORDS = ("one", "two", "three", "four", "five")  # of the texts that a model is examined with


class _Unsampled(PilBackend):
    """Resizes an image without its pixels: to one value, held once. Sizes, and so tiles, are as with pixels."""

    def resize(self, image: np.ndarray, size: SizeDict, *_: object, **__: object) -> np.ndarray:
        if min(size.height, size.width) < 1:  # as Pillow does
            raise ValueError("height and width must be > 0")
        return np.broadcast_to(image[:, :1, :1], (len(image), size.height, size.width))


def cuts_tiles(processor: ProcessorMixin, config: PreTrainedConfig) -> bool:
    """Return whether images become squares of one side, as many as their text says."""
    return hasattr(processor, "image_seq_len") and hasattr(config, "scale_factor")


def tile_counter(processor: ProcessorMixin) -> ProcessorMixin:
    """A copy of a processor that cuts tiles. It writes the same texts and computes no pixels."""
    counter, images = copy.copy(processor), copy.deepcopy(processor.image_processor)
    kind = type(images)
    images.__class__ = type(kind.__name__, (kind, _Unsampled), {})
    images.do_rescale = images.do_normalize = images.do_pad = False
    counter.image_processor = images
    return counter


def fit_tiles(processor: ProcessorMixin, config: PreTrainedConfig) -> None:
    """Have a processor write as many tokens for a tile as the model makes of one, whose side the run file may change.

    Raises ConfigError for a side that does not fit the model.
    """
    if not cuts_tiles(processor, config):
        return
    side, vision = int(processor.image_processor.max_image_size["longest_edge"]), config.vision_config
    token_side = int(vision.patch_size) * int(config.scale_factor)
    if side % token_side or side > int(vision.image_size):
        raise ConfigError(
            f"tiles of {side} pixels do not fit this model",
            expected=f"a multiple of {token_side} (patch_size x scale_factor), at most {vision.image_size}",
            fix="set model.image_size of family smolvlm, or max_image_size in model.image_processor of family hf",
        )
    processor.image_seq_len = (side // token_side) ** 2


def drawn_processor(
    kind: type[ProcessorMixin], config: PreTrainedConfig, settings: Mapping[str, object]
) -> ProcessorMixin:
    """The processor of a model whose weights are drawn.

    Its tokenizer knows an image's tokens alone: that of the run may not be trained yet.
    """
    vocabulary = (UNKNOWN, IMAGE_TOKEN, AROUND, SHOWS_ALL, *WORDS)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts = {
        "image_processor": IMAGE_PROCESSOR_MAPPING[type(config)]["pil"](**settings),
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token=UNKNOWN, extra_special_tokens=[IMAGE_TOKEN, AROUND, SHOWS_ALL]
        ),
    }
    return kind(*[parts.get(name) for name in kind.get_attributes()])
