"""A published model's processor: how an image becomes tensors, and what stands for it in a text.

Video processors need torchvision even where a processor never sees a video, so processors are made without them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import PROCESSOR_NAME

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError, UserError
from vlmpipe.trainer.models.hf.tiles import cuts_tiles, drawn_processor, fit_tiles, tile_counter
from vlmpipe.trainer.models.hf_native.pretrained import load_pretrained, part_config
from vlmpipe.trainer.models.image_inputs import NamedImages
from vlmpipe.trainer.models.published import published_json

Size = tuple[int, int]  # width and height in pixels
Tensors = dict[str, Tensor]
SPELLS_NUMBERS = "num2words"  # package without which SmolVLM's processor is not made
BLANK = (64, 64)  # of an image without content, in pixels
LONGEST_CAUSE_CHARS = 300
# In the words of transformers' errors.
LACKS_PACKAGE = re.compile(r"(?:requires the|[Pp]ackage|Missing optional dependencies:) `?(\w+)`?")
KEPT_TEXTS = 1 << 16  # of samples' image sizes
KEPT_LAYOUTS = 1 << 8  # of images' sizes; some hold a mask of all pixels
FEATURES, PIXEL_SHAPE = "features", "pixel_shape"  # in place of pixel values that were encoded before
PIXEL_MASK = "pixel_attention_mask"
TYPES = ("mm_token_type_ids", "token_type_ids")  # names under which models take what each token is
POOLING = "image_token_pooling"  # input of Molmo2
LARGE = ((640, 480), (1024, 1024), (2048, 2048), (2048, 1024), (1024, 2048))
SIZE_AXES = 2  # of inputs that tell images' sizes: (images, numbers)
SAMPLE_AXES = 5  # of pixel values whose first axis is the sample: (samples, images, channels, height, width)


@dataclass(frozen=True, slots=True)
class ImageText:
    """Text for one image: `text` with one `<image>` for each run of image tokens, and the runs' lengths."""

    text: str
    runs: tuple[int, ...]


class PublishedImages:
    """The image half of a published processor. Safe to use from several threads: each has a copy of it.

    placeholder: what a chat template writes for an image. image_token: what features replace; often the same.
    """

    def __init__(self, part: WeightsConfig, settings: Mapping[str, object]) -> None:
        config = part_config(part)
        self.inputs = frozenset(inspect.signature(kind_of(type(config)).forward).parameters)  # of the model, by name
        self.processor = _processor(part, config, settings)
        fit_tiles(self.processor, config)
        self._cuts_tiles = cuts_tiles(self.processor, config)
        self._writer = tile_counter(self.processor) if self._cuts_tiles else self.processor
        self._sizes_of_texts: dict[str, Size] = {}  # the first image size with each text
        tokenizer = self.processor.tokenizer
        self.hidden, self._patch_size = int(config.get_text_config().hidden_size), config.vision_config.patch_size
        self.image_token_id = int(config.image_token_id)
        if part.config or self.image_token_id >= len(tokenizer):  # a default, of some other tokenizer
            self.image_token_id = int(tokenizer.convert_tokens_to_ids(self.processor.image_token))
        self.image_token = str(tokenizer.convert_ids_to_tokens(self.image_token_id))
        # One processor (Qianfan-OCR) has a token of its own for what templates write.
        self.placeholder = str(getattr(self.processor, "image_placeholder_token", "") or self.processor.image_token)
        self.typed_token_ids = [int(token) for token in self.processor.image_token_ids if token is not None]
        merged = self.processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt")
        names = inspect.getfullargspec(self.processor._process_images).args
        self._images_kwargs = merged["images_kwargs"] | {name: merged[name] for name in names if name in merged}
        self._of_thread = threading.local()
        self.texts = functools.lru_cache(KEPT_TEXTS)(self._texts)
        self.layout = functools.lru_cache(KEPT_LAYOUTS)(self._layout)

    def rule(self) -> dict[str, object]:
        """Everything that decides tensors and texts, as plain JSON."""
        content = {name: value for name, value in self.processor.to_dict().items() if name != "video_processor"}
        return dict(json.loads(json.dumps(content | {"tokens": [self.placeholder, self.image_token]}, default=str)))

    @functools.cached_property
    def largest(self) -> Size:
        """The common image size that gives most tokens, (width, height) in pixels."""
        return max(LARGE, key=lambda size: sum(self.texts((size,))[0].runs))

    @property
    def max_tokens(self) -> int:
        return sum(self.texts((self.largest,))[0].runs)

    @functools.cached_property
    def patches(self) -> tuple[int, int]:
        """The patches of the largest image: (count, numbers in each)."""
        return self.patches_of(self.largest)

    @property
    def image_input_bytes(self) -> int:
        """Bytes of the largest image's inputs other than pixels."""
        return sum(tensor.nbytes for name, tensor in self.layout(self.largest).items() if name != "pixel_values")

    def patches_of(self, size: Size) -> tuple[int, int]:
        """Patches of an image as the encoder takes it, and numbers of one."""
        pixels = self.layout(size)["pixel_values"]
        side = self._patch_size if isinstance(self._patch_size, int) else self._patch_size[0]
        in_patch = int(pixels.shape[-1]) if pixels.ndim < 4 else 3 * side**2
        return pixels.numel() // in_patch, in_patch

    @functools.cached_property
    def first_tokens(self) -> list[int]:
        """Text that the processor puts before each text, whatever the chat template begins with. Empty for a processor
        that takes no text without an image."""
        text = {"text": ["text"], "add_special_tokens": False}
        try:
            made, plain = (list(call(**text)["input_ids"][0]) for call in (self.processor, self.processor.tokenizer))
        except (ValueError, TypeError):
            return []
        return made[: len(made) - len(plain)]

    def types(self, input_ids: Tensor) -> Tensors:
        """Type of each token, for models that ask: 1 of an image, 0 of a text."""
        name = next((kind for kind in TYPES if kind in self.inputs), None)
        if name is None:
            return {}
        is_image = torch.zeros_like(input_ids)
        for token in self.typed_token_ids:
            is_image |= input_ids == token
        return {name: is_image}

    def tensors(self, images: Sequence[Image.Image]) -> Tensors:
        """The model's inputs for the images of one sample."""
        return self._processed(images, self.processor)[0]

    def _layout(self, size: Size) -> Tensors:
        """Return the tensors of an image of this size; pixel values have a shape only."""
        if self._cuts_tiles:  # photographs have thousands of sizes, and as many tiles as a few of them
            first = self._sizes_of_texts.setdefault(self.texts((size,))[0].text, size)
            if first != size:
                return self.layout(first)
        made = self.tensors([Image.new("RGB", size)])
        with unset_fake_temporarily():
            return made | {"pixel_values": made["pixel_values"].to("meta")}

    def encoded(self, features: Tensor, sizes: Sequence[Size]) -> NamedImages:
        """Inputs of a training module for images of these sizes with stored features, (rows of all, width)."""
        if not sizes:
            return {}
        inputs = join([self.layout(size) for size in sizes])
        return inputs | {FEATURES: features, PIXEL_SHAPE: tuple(inputs.pop("pixel_values").shape)}

    def without_pixels(self, sizes: Sequence[Size]) -> NamedImages:
        """Inputs of a later pipeline stage for images of these sizes: such as their grids, which positions follow from,
        and nothing by pixel."""
        inputs = join([self.layout(size) for size in sizes])
        return {name: value for name, value in inputs.items() if name != "pixel_values" and value.ndim <= SIZE_AXES}

    def _texts(self, sizes: tuple[Size, ...]) -> tuple[ImageText, ...]:
        """Texts of a sample's images. Asked with all of them: some processors cut one image finer than several.

        Raises ValueError for sizes that the processor cannot take.
        """
        if not sizes:
            return ()
        try:
            written = self._processed([Image.new("RGB", size) for size in sizes], self._writer)[1]
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(f"the model's image processor takes no images of {sizes}: {error}") from error
        return tuple(_in_runs(text, self.image_token) for text in written)

    def _processed(self, images: Sequence[Image.Image], by: ProcessorMixin) -> tuple[Tensors, list[str]]:
        text = [self.placeholder * len(images)]
        with unset_fake_temporarily():  # in traces it is asked for sizes
            processor = self._own_copy(by)
            laid_out = processor.prepare_inputs_layout(images=list(images), text=text)[0]
            made, written = processor._process_images(laid_out, **self._images_kwargs)
        tensors = {name: torch.as_tensor(value) for name, value in made.items() if name in self.inputs}
        if self._cuts_tiles and PIXEL_MASK in tensors:  # of 64-bit numbers, it takes two thirds of the pixels' memory
            tensors[PIXEL_MASK] = tensors[PIXEL_MASK].bool()
        return tensors, written

    def _own_copy(self, processor: ProcessorMixin) -> ProcessorMixin:
        """This thread's: what one keeps while it works is its model's own affair."""
        copies: dict[int, ProcessorMixin] = vars(self._of_thread).setdefault("copies", {})
        if id(processor) not in copies:
            copied = copies[id(processor)] = copy.copy(processor)
            copied.image_processor = copy.deepcopy(processor.image_processor)
        return copies[id(processor)]

    def save(self, tokenizer: PreTrainedTokenizerFast, folder: Path, published: WeightsConfig) -> None:
        """Write what `AutoProcessor` reads, with the published video processor's settings where there are any."""
        tokenizer._set_processor_class(type(self.processor).__name__)
        tokenizer.save_pretrained(folder)
        self.processor.image_processor.save_pretrained(folder)
        content = self.processor.to_dict() | {"processor_class": type(self.processor).__name__}
        if videos := published_json(published, PROCESSOR_NAME).get("video_processor"):
            content["video_processor"] = videos
        content = {name: value for name, value in content.items() if value is not None}
        (folder / PROCESSOR_NAME).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@functools.lru_cache(8)
def _published(source: str, settings: str) -> PublishedImages:
    """Raises ConfigError for a processor that cannot be made, or that does not say what stands for an image: whatever
    it raises, since its code is that of any model type."""
    part = WeightsConfig.model_validate_json(source)
    weights = part.weights or "model.pretrained"
    try:
        images = PublishedImages(part, json.loads(settings))
        images.texts((BLANK,))
    except UserError as error:
        if isinstance(cause := error.__cause__, Exception) and LACKS_PACKAGE.search(str(cause)):
            raise needs_package(f"the image processor of {weights}", cause) from error
        raise
    except NotImplementedError as error:
        raise ConfigError(
            f"the processor of {weights}, a {part_config(part).model_type} model, does not say what stands for an "
            "image in a text",
            expected="a model whose processor of transformers writes the tokens of each image",
        ) from error
    except Exception as error:
        if isinstance(error, ImportError) or LACKS_PACKAGE.search(str(error)):
            raise needs_package(f"the processor of {weights}", error) from error
        raise ConfigError(
            f"the processor of {weights}, a {part_config(part).model_type} model, cannot be made or fails on an image: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_CAUSE_CHARS]}",
            expected="a folder or hub id with the tokenizer and the processor that the model was published with",
        ) from error
    return images


def needs_package(what: str, error: Exception) -> ConfigError:
    """The refusal of a model whose code or processor asks for a package that is not installed."""
    named = LACKS_PACKAGE.search(str(error))
    package = named[1].lower() if named else ""
    fix = f"pip install {package}" if package else "install it"
    if package == "torchvision":
        fix = torchvision_release()
    elif package == "timm":  # which asks for torchvision
        fix = f"{torchvision_release()}; then pip install timm"
    return ConfigError(
        f"{what} needs {package or 'a package'}, which is not installed",
        expected=f"{package or ' '.join(str(error).split())}, here and in the trainer image",
        fix=fix,
    )


def torchvision_release() -> str:
    """Return how torchvision is installed beside the torch of this machine.

    Releases come together, torch 2.x and torchvision 0.(x + 15), and so do builds (the table in torchvision's README).
    """
    release, _, build = torch.__version__.partition("+")
    _, minor, patch = release.split(".")[:3]
    fitting = f"torchvision==0.{int(minor) + 15}.{patch}"
    if not build:
        return f"pip install {fitting}"
    return (
        f"pip install {fitting}+{build} from the index that torch {torch.__version__} came from; PyPI has that release "
        "for its own build of torch only, and it fails beside this one"
    )


def published_images(part: WeightsConfig, settings: Mapping[str, object] | None) -> PublishedImages:
    """The processor of a published model, loaded once."""
    return _published(part.model_dump_json(), json.dumps(settings or {}, sort_keys=True))


def kind_of(config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """transformers' class of a model. Raises ConfigError for a type that takes no images and text."""
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(config, None)
    if kind is None:
        raise ConfigError(
            f"model.pretrained is a {config.model_type} model, which is no image-text model of transformers",
            expected="a model that AutoModelForImageTextToText loads",
        )
    return kind[0] if isinstance(kind, tuple) else kind


def join(samples: Sequence[Tensors]) -> Tensors:
    """Inputs of several samples as one: joined along the axis of images, and padded with zeros along the others."""
    if not samples:
        return {}
    if POOLING in samples[0]:
        samples = list(_behind_each_other(samples))
    names = dict.fromkeys(name for sample in samples for name in sample)
    pixels = samples[0].get("pixel_values")
    by_sample = PIXEL_MASK in names and pixels is not None and pixels.ndim == SAMPLE_AXES
    return {name: _joined([item[name] for item in samples if name in item], axis=int(by_sample)) for name in names}


def _behind_each_other(samples: Sequence[Tensors]) -> Iterator[Tensors]:
    """Places among the patches of one sample as places among those of all; -1 is none."""
    before = 0
    for sample in samples:
        places = sample[POOLING]
        yield sample | {POOLING: torch.where(places >= 0, places + before, places)}
        before += sample["pixel_values"].shape[:2].numel()


def without_video(kind: type) -> type[ProcessorMixin]:
    """A processor class that takes no video processor."""
    module = sys.modules.get(kind.__module__)
    if getattr(module, SPELLS_NUMBERS, str) is None:
        setattr(module, SPELLS_NUMBERS, str)  # the number of a video's frames alone is spelled
    changes = {"check_argument_for_proper_class": lambda self, name, value: type(value), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), changes)


def _processor(part: WeightsConfig, config: PreTrainedConfig, settings: Mapping[str, object]) -> ProcessorMixin:
    kind: type[ProcessorMixin] | None = PROCESSOR_MAPPING.get(type(config), None)
    if part.config and kind:
        return drawn_processor(without_video(kind), config, settings)
    if kind is None:  # as of GLM-OCR, whose files name it
        named = str(published_json(part, PROCESSOR_NAME).get("processor_class") or "")
        kind = getattr(transformers, named, None) if named.endswith("Processor") else None
    if kind is None:
        raise ConfigError(
            f"transformers has no processor for {part.weights}", expected="a model whose images it knows how to prepare"
        )
    try:
        options = {
            "image_processor": load_pretrained(AutoImageProcessor, part, backend="pil", **settings),
            "tokenizer": load_pretrained(AutoTokenizer, part, use_fast=True),
        }
        bare = without_video(kind)
        arguments = [options.get(name) for name in bare.get_attributes()]
        return bare.from_args_and_dict(arguments, published_json(part, PROCESSOR_NAME))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if "'NoneType' object has no attribute" in str(error) and "video_processor" in bare.get_attributes():
            raise ConfigError(
                f"the processor of {part.weights} ({kind.__name__}) asks for a video processor, and none is made here: "
                "it needs torchvision",
                expected="a model whose processor of transformers takes images without one",
            ) from error
        raise


def _in_runs(text: str, image_token: str) -> ImageText:
    runs = re.compile(f"(?:{re.escape(image_token)})+")
    lengths = tuple(len(run.group()) // len(image_token) for run in runs.finditer(text))
    return ImageText(runs.sub(IMAGE_TOKEN, text), lengths)


def _joined(tensors: Sequence[Tensor], axis: int) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [0 if place == axis else shape[place] - size for place, size in enumerate(tensor.shape)]
        padding = [number for less in reversed(missing) for number in (0, less)]
        padded.append(F.pad(tensor, padding) if any(missing) else tensor)
    return torch.cat(padded, dim=axis)
