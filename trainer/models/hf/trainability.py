"""Examination of a model type with packed samples, on a small model of it before any training.

Layers that are no attention, masks that the library makes for image tokens and prefixes mix samples or show answers,
all without an error. Two samples in one sequence, and each alone, tell.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from vlmpipe.trainer.config.model import IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.hf.encoder import encoder_of, has_merger, merger_parts, names_from_end
from vlmpipe.trainer.models.hf.encoder_output import StoredOutput, find_before_mergers, find_stored_output
from vlmpipe.trainer.models.hf.model import HfVLM
from vlmpipe.trainer.models.hf.processor import BLANK, PublishedImages, join, kind_of, needs_package, published_images
from vlmpipe.trainer.models.hf_native.pretrained import part_config
from vlmpipe.trainer.models.layers.freeze import part_of
from vlmpipe.trainer.models.layers.parameter_counts import fewer_layers

SIZES = ((96, 64), (64, 80))  # of the two samples' images, in pixels
TEXTS = ("one two three", "four five")
WIDTH = 64  # of the small model's language model
NARROW = ("intermediate_size", "moe_intermediate_size")
# Types that the examination is made in: some models multiply in bf16 alone. The most that equal hidden states differ,
# of the largest: sums in another order make some 1e-6 and 2e-2; samples that see each other make more than 0.5.
DTYPES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Examination:
    """keeps_apart: samples in one sequence do not see each other. masked: why attention computes scores between
    samples, under a mask; empty where it does not. is_causal: no token sees a later one, but for those of its own
    image. has_plain_head: logits are what the head makes of hidden states. untrained: parameters of the
    encoder that get no gradient, by `names_from_end`. stored: how its output is stored by image; None where it
    cannot be."""

    keeps_apart: bool
    masked: str
    is_causal: bool
    has_plain_head: bool
    untrained: tuple[str, ...]
    stored: StoredOutput | None


def require_trainable(config: ModelConfig, *, pack: bool, cached: bool) -> None:
    """Raise ConfigError for a model that cannot be trained on packed sequences, or not at all. Takes seconds."""
    kind, examined = part_config(config.tower).model_type, examine(config)
    if not examined.is_causal:
        raise ConfigError(
            f"in a {kind} model attention is not causal, so answers would be visible to their own prediction",
            expected="a model whose texts are causal",
        )
    if not examined.has_plain_head:
        raise ConfigError(
            f"a {kind} model changes logits after its head, which the loss here would not see",
            expected="a model whose logits are its head's",
        )
    if pack and not examined.keeps_apart:
        layers = sorted(set(getattr(part_config(config.tower).get_text_config(), "layer_types", None) or ()))
        which = f" (its layers are {', '.join(layers)})" if layers else ""
        raise ConfigError(
            f"a {kind} model lets samples in one sequence see each other{which}", fix="set data.pack to false"
        )
    if cached and not examined.stored:
        raise ConfigError(
            f"features of a {kind} model cannot be stored: its encoder's output for an image changes with those "
            "beside it",
            fix="set features.cache to off",
        )


def examine(config: ModelConfig) -> Examination:
    """Cached: planner and trainer ask more than once."""
    with unset_fake_temporarily(), torch.device("cpu"):  # traces and shapes ask for it
        return _examine(config.model_dump_json())


@functools.lru_cache(8)
def _examine(section: str) -> Examination:
    config = ModelConfig.model_validate_json(section)
    images, problems = published_images(config.tower, config.image_settings), []
    kind = part_config(config.tower).model_type
    for whole in _small(part_config(config.tower)):
        whole.image_token_id = images.image_token_id
        for dtype in DTYPES:
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    torch.manual_seed(0)
                    return _found(config, images, whole, dtype)
            except ConfigError:
                raise
            except ImportError as error:
                raise needs_package(f"a {kind} model", error) from error
            except Exception as error:  # any code of any model type, with sizes that it was not made for
                problems.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    raise ConfigError(
        f"a {kind} model does not run on two packed samples: {problems[-len(DTYPES)]}",
        expected="a model type whose forward pass takes token ids, positions and its image processor's output",
    )


def _found(config: ModelConfig, images: PublishedImages, whole: PreTrainedConfig, dtype: torch.dtype) -> Examination:
    model = kind_of(type(whole))(whole).to(dtype)
    for weight in model.parameters():  # so large that attention tells tokens apart
        weight.copy_(torch.randn_like(weight) * (2 / weight.shape[-1] ** 0.5) if weight.ndim > 1 else weight)
    head = model.get_output_embeddings()
    _require_known_parts(model)
    _require_known_pixels(model, images)
    module = HfVLM(config, model, images).eval()
    samples = [Image.effect_noise(size, 64).convert("RGB") for size in SIZES]
    made = [images.tensors([image]) for image in samples]
    ids = [_ids(images, size, text) for size, text in zip(SIZES, TEXTS, strict=True)]

    def hidden(rows: list[Tensor], inputs: dict[str, Tensor]) -> Tensor:
        lengths = [len(row) for row in rows]
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        bounds = CuSeqlens.of([lengths], sum(lengths))
        return module.hidden_states(torch.cat(rows)[None], places, inputs, bounds)[0]

    alone = [hidden([row], inputs) for row, inputs in zip(ids, made, strict=True)]
    packed = hidden(ids, join(made))
    changed = ids[0].clone()
    changed[-3:] = changed[0]
    after = hidden([changed], made[0])
    types = images.types(ids[0][None])
    logits = model(input_ids=ids[0][None], attention_mask=torch.ones_like(ids[0][None]), **types, **made[0]).logits[0]
    with torch.enable_grad():
        hidden(ids[:1], made[0]).sum().backward()
    idle = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    _require_all_reached(config, model, idle)
    return Examination(
        stored=_stored(images, model, samples),
        untrained=tuple(end for end, name in names_from_end(model).items() if name in idle),
        keeps_apart=_equal(packed, torch.cat(alone)),
        masked=module.masked,
        is_causal=_equal(after[:-3], alone[0][:-3]),
        has_plain_head=_equal(head(alone[0]), logits),
    )


def _require_known_parts(model: PreTrainedModel) -> None:
    """Parts are told apart by parameters' names, here and in files."""
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"a {kind} model writes answers in a decoder of its own, after an encoder of images and questions",
            expected="a model that reads images and questions, and writes answers, as one sequence",
        )
    try:
        parts = (model.get_decoder(), model.get_output_embeddings(), encoder_of(model))
        modules = {module: f"{name}." for name, module in model.named_modules()}
        names = [modules[part] for part in parts]
    except (AttributeError, NotImplementedError, KeyError) as error:
        raise ConfigError(
            f"transformers does not say what a {kind} model's vision encoder, decoder and head are",
            expected="a model type with get_encoder, get_decoder and get_output_embeddings for its images and texts",
        ) from error
    if not hasattr(model.base_model, "get_image_features"):  # as in Mllama, which reads images in cross-attention
        raise ConfigError(
            f"a {kind} model has no image features that take the place of tokens",
            expected="a model that puts projected image features among the embeddings of tokens",
        )
    language = tuple(names[:2])
    for name, _ in model.named_parameters():
        if name.startswith(language) != (part_of(name) == "language_model"):
            raise ConfigError(
                f"{name} of a {kind} model has no name by which it is known as part of "
                + ("its language model" if name.startswith(language) else "its vision encoder or projector"),
                expected="one of the model types that are tested (vlmpipe docs model-types)",
            )


def _require_known_pixels(model: PreTrainedModel, images: PublishedImages) -> None:
    """Require pixels in one input and one encoder pass, which plans and features count."""
    more = sorted(name for name in images.inputs if name.startswith("pixel_values_") and "video" not in name)
    if more:
        raise ConfigError(
            f"images of a {model.config.model_type} model have pixels in {more[0]} too, which would not be counted",
            expected="a model type with all pixels of an image in pixel_values",
        )


def _require_all_reached(config: ModelConfig, model: PreTrainedModel, idle: Collection[str]) -> None:
    """Raise ConfigError for trained weights that images and texts do not reach, such as an audio encoder, which would
    count as a projector, or an indexer that learns by a loss of its own. Experts may be left out by a router."""
    apart = {encoder_of(model), model.get_output_embeddings()}  # hidden states are asked for, before the head
    names = tuple(f"{name}." for name, module in model.named_modules() if module in apart)
    without = [
        name
        for name in sorted(idle)
        if not name.startswith(names) and ".experts." not in name and part_of(name) not in config.frozen
        if not any(fnmatchcase(name, pattern) for pattern in config.freeze_parameters)
    ]
    if without:
        patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in without)
        raise ConfigError(
            f"{without[0]} of a {model.config.model_type} model gets no gradient from an image and its text",
            expected="trained weights that all get one",
            fix=f"set model.freeze_parameters to {[*config.freeze_parameters, *patterns]}",
        )


def _stored(images: PublishedImages, model: nn.Module, samples: Sequence[Image.Image]) -> StoredOutput | None:
    """Return the encoder output that a feature cache can store, or None if there is none.

    None also if an image's inputs depend on the other images, or inputs other than pixels on more than its size.
    """
    made = [images.tensors([image]) for image in samples]
    joined, together = join(made), images.tensors(samples)
    layout = join([images.layout(image.size) for image in samples])
    if any(not torch.equal(joined[name], together[name]) for name in together):
        return None
    if any(not torch.equal(joined[name], layout[name]) for name in layout if name != "pixel_values"):
        return None
    blank, encoder = images.tensors([Image.new("RGB", BLANK)]), encoder_of(model)
    if merger_parts(encoder):
        return find_before_mergers(model, made, blank)
    return None if has_merger(encoder) else find_stored_output(model, made, blank)


def _ids(images: PublishedImages, size: tuple[int, int], text: str) -> Tensor:
    """Tokens of an image with text before and after it."""
    (written,) = images.texts((size,))
    lengths = iter(written.runs)
    tokenizer, ids = images.processor.tokenizer, []
    mark = written.text.replace(IMAGE_TOKEN, images.image_token)
    for token in tokenizer(f"{text} {mark} {text}", add_special_tokens=False)["input_ids"]:
        ids += [token] * (next(lengths) if token == images.image_token_id else 1)
    return torch.tensor(ids)


def _equal(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= DTYPES[expected.dtype] * expected.abs().max())


def _small(whole: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Configurations of the same type with few layers, one of each kind: first narrow ones, then as wide as theirs."""
    for narrow in (True, False):
        small = copy.deepcopy(whole)
        text, vision = small.get_text_config(), small.vision_config
        kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))  # a layer of each kind, two at least
        few = min(int(text.num_hidden_layers), max(2, len(kinds)))
        fewer_layers(text, few)
        if kinds:
            text.layer_types = (kinds * few)[:few]
        fewer_tower_layers(small, vision)
        if narrow:
            _narrow(small, text, vision)
        yield small
    yield copy.deepcopy(whole)


def fewer_tower_layers(small: PreTrainedConfig, vision: PreTrainedConfig) -> None:
    """Keep as many as there are between the layer whose output is used, or the first level of several, and the end."""
    used = [getattr(small, name, -1) for name in ("vision_feature_layer", "vision_feature_layers")]
    used = [layer for item in used for layer in (item if isinstance(item, list | tuple) else [item])]
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    if max(used) >= 0:
        return
    few = min(int(vision.num_hidden_layers), max(2, -min(used), len(levels) + 1))
    vision.num_hidden_layers = few
    if levels:
        vision.deepstack_visual_indexes = list(range(len(levels)))
    if getattr(vision, "fullatt_block_indexes", None):
        vision.fullatt_block_indexes = [few - 1]


def _narrow(small: PreTrainedConfig, text: PreTrainedConfig, vision: PreTrainedConfig) -> None:
    hidden = int(text.hidden_size)
    text.head_dim = getattr(text, "head_dim", None) or hidden // int(text.num_attention_heads)
    for part in (small, text, vision):
        for name, value in part.to_dict().items():
            if name in NARROW and isinstance(value, int):
                setattr(part, name, min(value, WIDTH))
            if part is not vision and value == hidden and isinstance(value, int) and name != "head_dim":
                setattr(part, name, WIDTH)
    if getattr(vision, "out_hidden_size", None) == hidden:
        vision.out_hidden_size = WIDTH
