"""The family `hf`: any image-text model that transformers loads from a folder or the hub, with its own processor.

The tower is the model's vision encoder, the language model its decoder, the projector everything beside the two.
"""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights
from transformers.utils import VIDEO_PROCESSOR_NAME

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.models.base import ShardingUnits
from vlmpipe.trainer.models.grid_images import grids_of
from vlmpipe.trainer.models.hf.encoder import (
    encoder_of,
    layers_of,
    merged_width,
    merger_parts,
    names_from_end,
    without_mergers,
)
from vlmpipe.trainer.models.hf.encoder_output import StoredOutput, encoder_output
from vlmpipe.trainer.models.hf.flops import counted_flops
from vlmpipe.trainer.models.hf.grids import (
    SPLIT_TYPES,
    features_of,
    image_processor_of,
    of_images,
    precomputed,
    project,
    set_marks,
)
from vlmpipe.trainer.models.hf.model import HfVLM
from vlmpipe.trainer.models.hf.processor import BLANK, PublishedImages, Tensors, kind_of, published_images
from vlmpipe.trainer.models.hf.trainability import examine, require_trainable
from vlmpipe.trainer.models.hf.vision_attention import use_few_launches
from vlmpipe.trainer.models.hf_native.family import TransformersFamily
from vlmpipe.trainer.models.hf_native.pretrained import part_config, pretrained_config, weights_description
from vlmpipe.trainer.models.hf_native.weights import DrawnWeights, PretrainedModel, StoredWeights
from vlmpipe.trainer.models.image_inputs import Grid
from vlmpipe.trainer.models.layers.deferred_weights import DeferredWeights, parameters_on_meta
from vlmpipe.trainer.models.layers.freeze import part_of, trains
from vlmpipe.trainer.models.layers.lora import without_adapters
from vlmpipe.trainer.models.layers.parameter_counts import OfImages, count_parameters, model_shape, vocabulary_of
from vlmpipe.trainer.models.published import model_file
from vlmpipe.trainer.sizing.model_shape import ModelShape

# Names of weights as the first releases of transformers with such models wrote them.
FIRST_RELEASE = {"model.visual.": ["visual."], "model.language_model.": ["model."]}
AROUND = "_around"  # attribute of a vision encoder: the model that it is part of, without values


class HfFamily(TransformersFamily):
    """See `vlmpipe.trainer.models.base.Family`."""

    def images(self, config: ModelConfig) -> PublishedImages:
        return published_images(config.tower, config.image_settings)

    def type_of(self, config: ModelConfig) -> str:
        return str(part_config(config.tower).model_type)

    def kind(self, model_type: str) -> type[PreTrainedModel]:
        return kind_of(CONFIG_MAPPING[model_type])

    def whole_config(self, config: ModelConfig) -> PreTrainedConfig:
        return copy.deepcopy(part_config(config.tower)) if config.is_of_any_type else pretrained_config(config)

    def config_for(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        """The published one, with an embedding for each of the tokenizer's tokens."""
        if not config.is_of_any_type or grids_of(config):
            whole = super().config_for(config, tokenizer)
            set_marks(whole, tokenizer)
            return whole
        whole = self.whole_config(config)
        text = whole.get_text_config()
        text.vocab_size = max(len(tokenizer), text.vocab_size)
        return whole

    def stored_model(self, config: ModelConfig) -> PretrainedModel:
        return stored_model(config.tower.model_dump_json())

    def fill_other_parts(self, model: nn.Module, config: ModelConfig) -> None:
        encoder_of(model).load_state_dict(_drawn_vision(config).state_dict())

    def initial_weights(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> StoredWeights | DrawnWeights:
        if config.tower.weights:
            return StoredWeights(config.tower, self.stored_model(config), len(tokenizer))
        plain = without_adapters(config)
        return DrawnWeights(lambda: self.build(plain, tokenizer).state_dict())

    def require_trainable(self, config: ModelConfig, *, pack: bool, cached: bool) -> str:
        """Types whose images are grids here are known, and not examined."""
        if grids_of(config):
            return ""
        require_trainable(config, pack=pack, cached=cached)
        masked = examine(config).masked if pack else ""
        return masked and f"attention computes scores between samples, under a mask: {masked}"

    def freeze(self, model: nn.Module, config: ModelConfig, *, is_whole: bool) -> nn.Module:
        """Freeze, too, parameters of a trained tower without a gradient, such as layers after the used output."""
        model = super().freeze(model, config, is_whole=is_whole)
        if trains(encoder_of(model)) and not grids_of(config):
            names = names_from_end(model)
            for end in examine(config).untrained:
                if end in names:
                    model.get_parameter(names[end]).requires_grad_(False)
        return model

    def build_tower(self, config: ModelConfig) -> nn.Module:
        """The vision encoder on the CPU in fp32 and in evaluation mode, without its mergers."""
        with parameters_on_meta(), no_init_weights():
            model = self.kind(self.type_of(config))(self.whole_config(config)).float()
        encoder = encoder_of(model)
        if not config.tower.weights:
            encoder.load_state_dict(_drawn_vision(config).state_dict(), assign=True)
        if merger_parts(encoder):
            stored = None if grids_of(config) else examine(config).stored
            use_few_launches(encoder)
            encoder = without_mergers(encoder, stored.patches if stored else 0)
            model.set_encoder(encoder, modality="image")
        if config.tower.weights:
            weights = StoredWeights(config.tower, self.stored_model(config))
            DeferredWeights(model, weights, torch.device("cpu")).fill(encoder)
        vars(encoder)[AROUND] = model  # for `encode`, but no submodule: digests and moves are the encoder's
        return encoder.eval()

    @torch.no_grad()
    def encode(
        self,
        config: ModelConfig,
        tower: nn.Module,
        pixel_values: Tensors | Tensor,
        grids: Sequence[Grid] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> list[Tensor]:
        """Features of one image, (rows, width) in `dtype`. tower: of `build_tower`; pixel_values: inputs.

        With grids, of each image. pixel_values: (patches, numbers) of all. bf16 is what the cache stores; training
        without a cache rounds the same way where the tower is frozen.
        """
        if isinstance(pixel_values, Tensor):
            assert grids is not None
            return [features.to(dtype) for features in features_of(tower, pixel_values, grids)]
        output = encoder_output(vars(tower)[AROUND], pixel_values)
        return [self.stored_output(config).take(output).to(dtype)]

    def stored_output(self, config: ModelConfig) -> StoredOutput:
        """How features are stored. Raises ConfigError where they cannot be."""
        require_trainable(config, pack=False, cached=True)
        stored = examine(config).stored
        assert stored, "required"
        return _in_full_width(stored, config)

    def tower(self, model: nn.Module) -> nn.Module:
        use_few_launches(encoder_of(model))
        return without_mergers(encoder_of(model))

    def project(self, model: nn.Module, features: Tensor) -> Tensor:
        """(tokens, levels x numbers) -> (tokens, levels x hidden)."""
        return project(encoder_of(model), features)

    def generation_inputs(
        self, model: nn.Module, input_ids: Tensor, projected: Tensor, grids: Tensor | None = None
    ) -> dict[str, object]:
        """Tokens, and projected features for the library's own hook. It derives three-axis positions from `grids`."""
        return {
            "input_ids": input_ids,
            "mm_token_type_ids": (input_ids == model.config.image_token_id).int(),
            "image_grid_thw": grids,
            "mm_encoder_outputs": {"image": precomputed(projected, encoder_of(model))},
        }

    def image_processor(self, config: ModelConfig) -> BaseImageProcessor:
        if grids := grids_of(config):
            return image_processor_of(config, grids)
        return self.images(config).processor.image_processor

    def feature_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """(width,): images differ in rows."""
        if grids_of(config):
            return (merged_width(encoder_of(_without_values(config.tower.model_dump_json()))),)
        return (self.stored_output(config).width,)

    def feature_description(self, config: ModelConfig) -> dict[str, object]:
        """Everything that determines the frozen tower's output for given image bytes, as plain JSON. Its code is the
        library's."""
        if grids_of(config):  # as earlier versions wrote it: their features serve on
            return weights_description(config)
        merges = merger_parts(encoder_of(_without_values(config.tower.model_dump_json())))
        before = {"features": "before mergers"} if merges else {}
        return weights_description(config) | {"transformers": transformers.__version__} | before

    def training_module(self, config: ModelConfig, model: nn.Module, *, cached: bool) -> nn.Module:
        if grids_of(config):
            return HfVLM(config, model, None, cached=cached)
        return HfVLM(config, model, self.images(config), self.stored_output(config) if cached else None)

    def blocks(self, module: HfVLM) -> ShardingUnits:
        return module.sharding_units(
            layers_of(encoder_of(module.model)),
            image_layers=image_layers_of(module.model.config),
            shards_tower=module.knows_grids and module.model.config.model_type in SPLIT_TYPES,
        )

    def save_processor(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        """Write the processor, and the published model's settings for videos where they have a file of their own."""
        if grids_of(config):
            tokenizer.save_pretrained(folder)
            self.image_processor(config).save_pretrained(folder)
        else:
            self.images(config).save(tokenizer, folder, config.tower)
        if config.tower.weights and (videos := model_file(config.tower, VIDEO_PROCESSOR_NAME, weights=False)):
            shutil.copyfile(videos, folder / VIDEO_PROCESSOR_NAME)

    def maker(self, config: ModelConfig) -> Callable[[PreTrainedConfig], nn.Module]:
        kind = self.kind(self.type_of(config))
        return kind if grids_of(config) and not config.is_of_any_type else functools.partial(_with_numbers, kind)

    def shape(self, config: ModelConfig) -> ModelShape:
        """Sizes, with the parameters counted on the meta device; images have the most tokens of some common sizes."""
        whole, grids = self.whole_config(config), grids_of(config)
        text, vision = whole.get_text_config(), whole.vision_config
        with torch.device("meta"):
            model = self.skeleton(config, vocabulary=vocabulary_of(config, text))
        levels = 1 + image_layers_of(whole)
        if grids:
            images = of_images(whole, grids, self.feature_shape(config)[0], levels)
            images["counted"] = counted_flops(config) if config.is_of_any_type else None
        else:
            in_projector = count_parameters(model, lambda name: part_of(name) == "projector")
            images = self._of_published_images(config, -(-in_projector // int(text.hidden_size)), levels)
        return model_shape(config, model, layers_of(encoder_of(model)), vision, **images)

    def _of_published_images(self, config: ModelConfig, feature_width: int, levels: int) -> OfImages:
        """feature_width: that of one product with the projector's parameters."""
        images = self.images(config)
        patches, in_patch = images.patches
        is_fixed = images.max_tokens == sum(images.texts((BLANK,))[0].runs)
        return {
            "tower_tokens": patches,
            "image_tokens": images.max_tokens,
            "feature_width": feature_width,
            "projector_layers": 1,
            "patch_pixels": in_patch,
            "merge": 0 if is_fixed else 1,
            "levels": levels,
            "shards_tower": False,
            "stored_numbers": self.stored_numbers(config),
            "image_input_bytes": images.image_input_bytes,
            "counted": counted_flops(config),
        }

    def stored_numbers(self, config: ModelConfig) -> int | None:
        """Return the numbers that the feature cache stores for the largest image; None if features cannot be cached.

        Their rows grow with the image's patches.
        """
        stored, images = examine(config).stored, self.images(config)
        if not stored:
            return None
        rows = round(stored.blank_rows * images.patches[0] / images.patches_of(BLANK)[0])
        return rows * _in_full_width(stored, config).width


def _drawn_vision(config: ModelConfig) -> nn.Module:
    """A vision encoder on the CPU in fp32, whose weights depend on the seed only."""
    torch.manual_seed(config.seed)
    vision: nn.Module = AutoModel.from_config(pretrained_config(config).vision_config, trust_remote_code=False)
    return vision.float()


def _in_full_width(stored: StoredOutput, config: ModelConfig) -> StoredOutput:
    """Stored output in the width of the model's mergers; those of the small model that was examined may be narrower."""
    if not stored.patches:
        return stored
    return replace(stored, width=merged_width(encoder_of(_without_values(config.tower.model_dump_json()))))


@functools.lru_cache(2)
def _without_values(source: str) -> PreTrainedModel:
    """A published model on the meta device. source: `WeightsConfig` as JSON."""
    whole = copy.deepcopy(part_config(WeightsConfig.model_validate_json(source)))
    with unset_fake_temporarily(), torch.device("meta"), no_init_weights():
        return kind_of(type(whole))(whole)


@functools.lru_cache(8)
def stored_model(source: str) -> PretrainedModel:
    """Names of a published model's weights: as they are, or of another release where only names differ.

    source: `WeightsConfig` as JSON.
    """
    model = _without_values(source)
    kind = type(model)
    modules = {module: name for name, module in model.named_modules()}
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if not isinstance(change, WeightRenaming)]
    known = model.state_dict()

    def renamed(stored: str) -> str:
        name, part = rename_source_key(stored, renamings, converters, model.base_model_prefix, known)
        return "" if part else name

    embedding = f"{modules[model.get_input_embeddings()]}.weight"
    tower = f"{modules[encoder_of(model)]}."
    stored_as = FIRST_RELEASE if tower in FIRST_RELEASE else {}
    return PretrainedModel(kind, embedding, tower, stored_as, renamed)


def _with_numbers(kind: type[PreTrainedModel], whole: PreTrainedConfig) -> nn.Module:
    """A model whose constructors read numbers. Under a fake mode it is made with them, and then has tensors of that
    mode, where modules shared one the same."""
    with unset_fake_temporarily() as fake, parameters_on_meta() if fake else nullcontext(), no_init_weights():
        model = kind(whole)
    made: dict[Tensor, Tensor] = {}
    for module in model.modules() if fake else ():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                if tensor is not None:
                    tensors[name] = made[tensor]
    return model


def image_layers_of(whole: PreTrainedConfig) -> int:
    """The number of first language layers to which images are added too (DeepStack)."""
    return len(getattr(whole.vision_config, "deepstack_visual_indexes", None) or ())
