"""Memory of images' way through encoder and projector of family hf, measured on real tensors.

The library's encoders read numbers, which fake tensors do not have. So a small image goes through a few encoder layers
of real width, on the CPU and with zeros for weights. What that holds grows with layers, and but for casts of weights
with patches.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.models.hf.encoder import layers_of
from vlmpipe.trainer.models.hf.family import HfFamily
from vlmpipe.trainer.models.hf.model import HfVLM
from vlmpipe.trainer.models.hf.trainability import fewer_tower_layers
from vlmpipe.trainer.models.hf_native.pretrained import part_config
from vlmpipe.trainer.models.layers.deferred_weights import parameters_on_meta
from vlmpipe.trainer.models.layers.freeze import part_of
from vlmpipe.trainer.models.layers.parameter_counts import fewer_layers
from vlmpipe.trainer.models.layers.recompute_policy import recompute_tower
from vlmpipe.trainer.sizing.trace_results import Compute, Held
from vlmpipe.trainer.tracing.memory_tracker import MemoryTracker, cast_weights
from vlmpipe.trainer.tracing.traced_images import VisionBytes

MEASURED = (448, 448)  # pixels


@functools.lru_cache(64)
def vision_bytes(section: str, patches: int, compute: Compute, *, recomputes: bool = False) -> VisionBytes:
    """Return the bytes of the vision encoder's pass over images with `patches` patches in total.

    section: the model section as JSON. recomputes: the backward pass recomputes the encoder's layers.
    """
    config = ModelConfig.model_validate_json(section)
    with unset_fake_temporarily(), torch.device("cpu"):
        measured = dict(_by_depth(config, compute, recomputes))
    share = patches / HfFamily().images(config).patches_of(MEASURED)[0]
    layers = int(part_config(config.tower).vision_config.num_hidden_layers)
    (few, least), (more, most) = min(measured.items()), max(measured.items())
    totals = []
    for low, high in zip(least, most, strict=True):
        total = 0.0
        for category in low.bytes_by_category:
            start, end = (peaks.bytes_by_category[category] for peaks in (low, high))
            grown = start + (layers - few) * (end - start) / max(1, more - few)
            total += grown if category == "weight copies" else share * grown
        totals.append(round(total))
    return VisionBytes(*totals)


def _by_depth(config: ModelConfig, compute: Compute, recomputes: bool) -> Iterator[tuple[int, tuple[Held, Held, Held]]]:
    """For some numbers of encoder layers: what is held at the peak of the forward pass, after it, and at the peak of
    the backward pass."""
    whole = copy.deepcopy(part_config(config.tower))
    layers = int(whole.vision_config.num_hidden_layers)
    fewer_tower_layers(whole, whole.vision_config)
    few = int(whole.vision_config.num_hidden_layers)
    for depth in {few, min(few + 1, layers)}:
        shallow = copy.deepcopy(whole)
        shallow.vision_config.num_hidden_layers = depth
        yield depth, _measured(config, shallow, compute, recomputes)


def _measured(
    config: ModelConfig, whole: PreTrainedConfig, compute: Compute, recomputes: bool
) -> tuple[Held, Held, Held]:
    family = HfFamily()
    images = family.images(config)
    fewer_layers(whole.get_text_config(), 1)
    with parameters_on_meta(), no_init_weights():
        model = family.freeze(family.kind(family.type_of(config))(whole).float(), config, is_whole=False)
    _give_zeros(model)
    module = HfVLM(config, model, images).train()
    if recomputes:
        recompute_tower(layers_of(module.tower))
    cast_weights(module, compute)
    takes = module.features_of
    inputs = {name: tensor for name, tensor in images.tensors([Image.new("RGB", MEASURED)]).items() if name in takes}
    held = [*module.parameters(), *module.buffers(), *inputs.values()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad and not parameter.is_meta]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with MemoryTracker([*held, *(parameter.grad for parameter in trained)], module.parameters()) as tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=compute == "autocast"):
            features = module.features(inputs)
        forward, between = tracker.take_peak(next_category="backward"), tracker.held
        total = torch.stack([feature.sum() for feature in features]).sum()
        sizes = sum(feature.nbytes for feature in features)
        if total.requires_grad:
            total.backward()
        del features, total
        backward = tracker.take_peak(next_category="backward")
    return forward, _without(between, sizes), backward


def _without(held: Held, size: int) -> Held:
    """Features count elsewhere: they are the language model's inputs."""
    categories = held.bytes_by_category
    return Held({**categories, "head": max(0, categories.get("head", 0) - size)})


def _give_zeros(model: nn.Module) -> None:
    """To the parameters on the meta device that images pass."""
    for name, parameter in list(model.named_parameters()):
        if part_of(name) != "language_model":
            zeros: Tensor = torch.zeros(parameter.shape, dtype=parameter.dtype)
            torch.utils.swap_tensors(parameter, nn.Parameter(zeros, requires_grad=parameter.requires_grad))
