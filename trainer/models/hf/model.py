"""Training module of the family `hf`: packed samples through the library's own forward pass."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, Unpack

import torch
from PIL import Image
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.attention.block_mask import block_diagonal_mask
from vlmpipe.trainer.models.attention.cu_seqlens import CuSeqlens
from vlmpipe.trainer.models.attention.image_blocks import image_blocks
from vlmpipe.trainer.models.attention.varlen import no_mask, takes_samples, use_varlen_attention
from vlmpipe.trainer.models.hf.processor import BLANK, FEATURES, PIXEL_SHAPE, TYPES, PublishedImages, Tensors
from vlmpipe.trainer.models.hf.stored import PROJECTED_OUTPUTS, StoredEncoder, StoredOutput, tensors_in
from vlmpipe.trainer.models.image_inputs import NamedImages
from vlmpipe.trainer.models.layers.freeze import part_of, trains
from vlmpipe.trainer.models.layers.image_placeholders import places_of, put
from vlmpipe.trainer.models.loss.chunked_loss import TokenLoss
from vlmpipe.trainer.models.packed_vlm import PackedInputs, loss_of

ROPE_AXES = 3  # of positions: time, height and width
Nested: TypeAlias = "Tensor | Sequence[Nested]"
PROJECTED = "projected"  # in traces, in place of the model's inputs: (image tokens, hidden)


# Types whose library code makes masks, since tokens of an image see each other, and hands on those that it is given.
# True: in layers with windows only, where the language model's `use_bidirectional_attention` is "vision".
SEES_IMAGES = {"gemma3": False, "gemma4": True, "gemma4_unified": True}


@dataclass(frozen=True)
class _Packed:
    """Sequences of the forward pass that runs. masks: empty ones in place of the library's."""

    positions: Tensor
    samples: CuSeqlens | None
    masks: dict[str, Tensor] | None


@dataclass(frozen=True)
class VisionBytes:
    """Memory of images in encoder and projector: at the peak of the forward pass, from there to the
    backward pass, and at the peak of that."""

    forward: int = 0
    kept: int = 0
    backward: int = 0


class HfVLM(nn.Module):
    """Training module that strategies wrap. model: the library's, which keeps its own forward pass.

    Samples are kept apart in the inputs of the language model, which the library's forward pass computes from all
    samples of a sequence together. stored: images are features that were encoded before; without the vision encoder.
    """

    def __init__(
        self, config: ModelConfig, model: PreTrainedModel, images: PublishedImages, stored: StoredOutput | None = None
    ) -> None:
        super().__init__()
        self.config, self.model, self.token_loss = config, model, TokenLoss()
        self._images = images
        self.features_of = inspect.signature(model.base_model.get_image_features).parameters
        self.vision_bytes = VisionBytes()  # in traces
        self._packed: _Packed | None = None
        self.masked = use_varlen_attention(self.language_model)  # why samples are kept apart by a mask; else empty
        self.language_model.register_forward_pre_hook(_separate_samples(self), with_kwargs=True)
        self.tower_is_frozen = not trains(self.tower)
        if stored:
            model.set_encoder(StoredEncoder(self.tower, stored), modality="image")
        elif self.tower_is_frozen:
            self.tower.register_forward_hook(_round_output)
        self.train(self.training)

    @functools.cached_property
    def _blank(self) -> NamedImages:
        """Inputs of one image, which stands in where there is none."""
        if isinstance(self.tower, StoredEncoder):
            stored = self.tower.stored
            return self._images.encoded(torch.zeros(stored.blank_rows, stored.width), [BLANK])
        return self._images.tensors([Image.new("RGB", BLANK)])

    @property
    def language_model(self) -> nn.Module:
        return self.model.get_decoder()

    @property
    def tower(self) -> nn.Module:
        """The vision encoder. In some models with the merger, which is a projector."""
        return encoder_of(self.model)

    def train(self, mode: bool = True) -> HfVLM:
        super().train(mode)
        if self.tower_is_frozen:
            self.tower.eval()
        return self

    def forward(self, **inputs: Unpack[PackedInputs]) -> Tensor:
        """Summed cross-entropy of the label tokens, a scalar in fp32. See `trainer.models.packed_vlm.PackedVLM`.

        images: inputs of the library's model by name, or what `PublishedImages.encoded` says; none without images.
        """
        images = inputs["images"]
        assert not isinstance(images, Tensor)
        hidden = self.hidden_states(inputs["input_ids"], inputs["position_ids"], images, inputs.get("samples"))
        return loss_of(self.token_loss, self.model.get_output_embeddings(), hidden, inputs)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, images: NamedImages, samples: CuSeqlens | None = None
    ) -> Tensor:
        """(sequences, tokens, hidden) after the language model.

        Without images, the library's forward pass gets a blank one, of whose features no token takes any. So each rank
        runs the same modules in the same order, and the first layer's input needs a gradient wherever features do: the
        collectives of all ranks are the same whatever their data.
        """
        if PROJECTED in images:
            projected = images[PROJECTED]
            assert isinstance(projected, Tensor)
            return self._traced(input_ids, position_ids, projected, samples)
        types = self._images.types(input_ids)
        inputs = self._replayed(images or self._blank)
        positions = position_ids
        if hasattr(self.model.base_model, "get_rope_index"):
            positions = self._rope_positions(input_ids, position_ids, types | (inputs if images else {}), samples)
        masks = self._masks_of_blocks(input_ids) if samples is not None else None
        if masks is not None and samples is not None and self._blocks is not None:
            is_image = (input_ids == self._images.image_token_id).cpu()
            samples = image_blocks(is_image, samples, windows_only=self._blocks) if images else samples
        self._packed = _Packed(position_ids, samples, masks)
        try:
            with contextlib.nullcontext() if images else _without_features(self.model.base_model):
                hidden: Tensor = self.model.base_model(
                    input_ids=input_ids,
                    position_ids=positions,
                    attention_mask=torch.ones_like(input_ids) if masks is None else masks,
                    use_cache=False,
                    **types,
                    **{name: value.to(input_ids.device) for name, value in inputs.items()},
                ).last_hidden_state
        finally:
            self._packed = None
        return hidden

    def _traced(self, input_ids: Tensor, position_ids: Tensor, projected: Tensor, samples: CuSeqlens | None) -> Tensor:
        """For traces with fake tensors, which have no values that the library's forward pass asks for: the language
        model alone, behind images that are projected already."""
        trained = [one for name, one in self.named_parameters() if one.requires_grad and part_of(name) == "projector"]
        first = sum((one.flatten()[0] for one in trained), start=projected.new_zeros(()))
        places = places_of(input_ids == self.model.config.image_token_id, len(projected))
        projected = _Encoded.apply(projected + first, self.vision_bytes)
        hidden = put(self.model.get_input_embeddings()(input_ids), places, projected)
        positions = position_ids
        if hasattr(self.model.base_model, "get_rope_index"):
            positions = position_ids.repeat(4, 1, 1)
        inputs = block_diagonal_mask(self.language_model.config, position_ids, samples)
        if width := getattr(self.language_model.config, "hidden_size_per_layer_input", 0):
            shape = (*input_ids.shape, len(self.language_model.layers), width)
            inputs["per_layer_inputs"] = hidden.new_zeros(shape)
        output: Tensor = self.language_model(
            inputs_embeds=hidden, position_ids=positions, use_cache=False, **inputs
        ).last_hidden_state
        return output

    def _masks_of_blocks(self, input_ids: Tensor) -> dict[str, Tensor] | None:
        """Empty masks for each kind of layer, which keep the library from making whole ones for its image tokens."""
        config = self.language_model.config
        if self.model.config.model_type not in SEES_IMAGES or not takes_samples(config):
            return None
        return dict.fromkeys(config.layer_types, no_mask(len(input_ids), input_ids.device))

    @functools.cached_property
    def _blocks(self) -> bool | None:
        """True where tokens of an image see each other in layers with windows only; None if they never do."""
        windows_only = SEES_IMAGES[self.model.config.model_type]
        bidirectional = self.language_model.config.use_bidirectional_attention
        return None if windows_only and bidirectional != "vision" else windows_only

    def _replayed(self, images: NamedImages) -> Tensors:
        """Inputs of the library's model. The encoder has the stored features, if there are any, and sees no pixels."""
        rest = {name: value for name, value in images.items() if isinstance(value, Tensor)}
        if FEATURES not in images:
            return rest
        rows, shape = rest.pop(FEATURES), images[PIXEL_SHAPE]
        assert isinstance(shape, tuple)
        embedding = self.model.get_input_embeddings().weight
        self.tower.rows = rows.to(embedding.device, embedding.dtype)
        return rest | {"pixel_values": rows.new_ones(()).expand(shape)}  # some models take out images that are all 0

    def features(self, inputs: Tensors) -> list[Tensor]:
        """Return projected image features. inputs: those named in `features_of`."""
        features = self.model.base_model.get_image_features(**inputs, return_dict=True)
        return tensors_in(features.get(name) for name in PROJECTED_OUTPUTS)

    def _rope_positions(
        self, input_ids: Tensor, position_ids: Tensor, inputs: Tensors, samples: CuSeqlens | None
    ) -> Tensor:
        """(4, sequences, tokens): positions in the sample, then the model's own three axes."""
        assert samples is not None, "these positions need the bounds of samples"
        bounds = [(start, end) for start, end in samples.bounds.tolist() if start < end]
        longest = max((end - start for start, end in bounds), default=0)
        places = position_ids.flatten().repeat(4, 1)
        if longest:
            index = torch.tensor([start for start, _ in bounds])[:, None] + torch.arange(longest)
            own = index < torch.tensor([end for _, end in bounds])[:, None]
            index, own = (index * own).to(input_ids.device), own.to(input_ids.device)
            by_token = {"input_ids": input_ids} | {name: inputs[name] for name in TYPES if name in inputs}
            rows = {name: value.flatten()[index] * own for name, value in by_token.items()}
            takes = inspect.signature(self.model.base_model.get_rope_index).parameters
            given = {name: value for name, value in (inputs | rows).items() if name in takes}
            found, _ = self.model.base_model.get_rope_index(**given, attention_mask=own.long())
            if len(found) != ROPE_AXES:
                kind = self.model.config.model_type
                raise ConfigError(f"positions of a {kind} model have {len(found)} axes", expected=f"{ROPE_AXES} axes")
            places[1:, index[own]] = found[:, own].to(places)
        return places.view(4, *input_ids.shape)


@contextlib.contextmanager
def _without_features(model: PreTrainedModel) -> Iterator[None]:
    """Have a model encode and project the images that it is given, and use none of the features."""
    features_of = model.get_image_features

    def get_image_features(*args: object, **named: object) -> ModelOutput:
        output = features_of(*args, **named)
        for name in PROJECTED_OUTPUTS:
            if output.get(name) is not None:
                output[name] = _none_of(output[name])
        return output

    model.get_image_features = get_image_features
    try:
        yield
    finally:
        del model.get_image_features


def _none_of(features: Nested) -> Nested:
    return features[:0] if isinstance(features, Tensor) else [_none_of(feature) for feature in features]


def encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The vision encoder of a transformers model."""
    return model.get_encoder(modality="image")


def layers_of(encoder: nn.Module) -> list[nn.Module]:
    """The encoder's own layers: its longest list of modules of one class."""
    lists = [list(part) for part in encoder.modules() if isinstance(part, nn.ModuleList)]
    return max((one for one in lists if len({type(layer) for layer in one}) == 1), key=len, default=[])


def names_from_end(model: PreTrainedModel) -> dict[str, str]:
    """Parameters of the vision encoder, whose layers count from the last one, -1 -> their names in the model."""
    encoder = encoder_of(model)
    modules = {module: name for name, module in model.named_modules()}
    layers = layers_of(encoder)
    count = len(layers)
    starts = {f"{modules[layer]}.": f"{number - count}." for number, layer in enumerate(layers)}
    found = {}
    for name in (f"{modules[encoder]}.{inner}" for inner, _ in encoder.named_parameters()):
        start = next((one for one in starts if name.startswith(one)), "")
        found[starts[start] + name.removeprefix(start) if start else name] = name
    return found


def has_merger(encoder: nn.Module) -> bool:
    """Return whether part of the encoder is a projector, as in Qwen-VL's."""
    return any(part_of(f"visual.{name}") == "projector" for name, _ in encoder.named_parameters())


def same_sample(position_ids: Tensor) -> Tensor:
    """(sequences, 1, tokens, tokens), true where two tokens are of one sample."""
    sample = (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    return (sample[:, :, None] == sample[:, None, :]).unsqueeze(1)


class _EncodedContext(FunctionCtx):
    """Values saved for the backward pass."""

    kept: Tensor
    size: VisionBytes


class _Encoded(torch.autograd.Function):
    """Projected images of a trace, which allocate what encoder and projector would."""

    @staticmethod
    def forward(ctx: _EncodedContext, projected: Tensor, size: VisionBytes) -> Tensor:
        ctx.kept, ctx.size = projected.new_empty(size.kept, dtype=torch.uint8), size
        projected.new_empty(max(0, size.forward - size.kept - projected.nbytes), dtype=torch.uint8)
        return projected.clone()

    @staticmethod
    def backward(ctx: _EncodedContext, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        gradient.new_empty(max(0, ctx.size.backward - ctx.size.kept - gradient.nbytes), dtype=torch.uint8)
        del ctx.kept
        return gradient, None


def _separate_samples(module: HfVLM) -> object:
    """A hook of the language model, inert outside of `HfVLM.hidden_states`.

    Where the library has made masks, since image tokens see each other, samples are taken out of each other's sight;
    elsewhere attention gets the samples' bounds.
    """

    def hook(
        language_model: PreTrainedModel, args: object, inputs: dict[str, object]
    ) -> tuple[object, dict[str, object]] | None:
        if module._packed is None:
            return None
        positions, samples = module._packed.positions, module._packed.samples
        mask = inputs.get("attention_mask")
        if mask is not None and mask is module._packed.masks:
            return args, inputs | {"samples": samples}
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim > 2):
            module.masked = module.masked or "the library makes masks, since tokens of an image see each other"
            seen = same_sample(positions)
            masks = mask if isinstance(mask, dict) else {"": mask}
            apart = {name: _both(one, seen) for name, one in masks.items()}
            return args, inputs | {"attention_mask": apart if isinstance(mask, dict) else apart[""]}
        return args, inputs | block_diagonal_mask(language_model.config, positions, samples)

    return hook


def _both(mask: Tensor | None, seen: Tensor) -> Tensor:
    if mask is None:  # plainly causal
        return seen & torch.ones_like(seen).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _round_output(_encoder: nn.Module, _inputs: object, output: ModelOutput) -> object:
    """A frozen encoder's output as the feature cache stores it: in bf16.

    A copy: the library writes its projected features into the output that it gets.
    """
    rounded = copy.copy(output)
    for name, value in output.items():
        rounded[name] = _rounded(value)
    return rounded


def _rounded(value: object) -> object:
    if isinstance(value, list | tuple):
        return type(value)(_rounded(one) for one in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16).to(value.dtype)
    return value


def fewer_layers(text: PreTrainedConfig, count: int) -> None:
    """Have a language model keep its first layers, in all fields that have an entry for each layer."""
    before = int(text.num_hidden_layers)
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    if getattr(text, "num_kv_shared_layers", 0) and count < before:
        text.num_kv_shared_layers = 0
