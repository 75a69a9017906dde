"""Base of model families whose model is a class of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

from vlmpipe.trainer.config.checkpoint import QUANTIZED_PACKAGE
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError, require_package
from vlmpipe.trainer.models.base import Weights
from vlmpipe.trainer.models.hf_native.peft_folder import (
    SETTINGS,
    load_adapter,
    merged_model,
    require_fitting_adapter,
    require_same_adapter,
    saved_modules,
)
from vlmpipe.trainer.models.hf_native.pretrained import load_complete, set_dtype
from vlmpipe.trainer.models.hf_native.weights import fill
from vlmpipe.trainer.models.layers.deferred_weights import parameters_on_meta
from vlmpipe.trainer.models.layers.freeze import freeze
from vlmpipe.trainer.models.layers.lora import add_adapters, draw_adapters
from vlmpipe.trainer.models.layers.parameter_counts import skeleton_of
from vlmpipe.trainer.models.published import image_token_in


class TransformersFamily:
    """See `vlmpipe.trainer.models.base.Family`. Subclasses define what raises NotImplementedError."""

    def kind(self, model_type: str) -> type[PreTrainedModel]:
        """transformers' class of the model."""
        raise NotImplementedError

    def type_of(self, config: ModelConfig) -> str:
        """The model type of `kind`."""
        return config.family

    def whole_config(self, config: ModelConfig) -> PreTrainedConfig:
        """A new transformers configuration of the whole model."""
        raise NotImplementedError

    def config_for(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        """Return the configuration with an embedding for each token of the tokenizer, and with its control tokens."""
        whole = self.whole_config(config)
        text = whole.text_config
        if config.exports_adapter and len(tokenizer) > text.vocab_size:
            raise ConfigError(
                f"the tokenizer has {len(tokenizer)} tokens and the embedding of model.pretrained {text.vocab_size}: "
                "an adapter would not fit the base",
                fix="set model.lora.export to merged, or take the base's own tokenizer",
            )
        text.vocab_size = max(len(tokenizer), text.vocab_size if config.language_model.weights else 0)
        text.pad_token_id, text.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        text.bos_token_id = tokenizer.bos_token_id
        whole.image_token_id = tokenizer.convert_tokens_to_ids(image_token_in(tokenizer, config.image_token))
        return whole

    def require_trainable(self, config: ModelConfig, *, pack: bool, cached: bool) -> str:
        """Models of a known type are trainable in all forms."""
        return ""

    def freeze(self, model: nn.Module, config: ModelConfig, *, is_whole: bool) -> nn.Module:
        """Freeze what the run file says, and add its adapters.

        Raises ConfigError for an adapter to start from that does not fit, and for one that PEFT could not store.
        """
        unused = self.unused(model, config)
        freeze(model, config, unused=unused, is_whole=is_whole)
        if config.lora:
            add_adapters(model, config.lora, unused=unused)
        if config.lora and config.lora.pretrained and is_whole:
            require_fitting_adapter(model, config.lora)
        if config.exports_adapter and is_whole:
            saved_modules(model)
        return model

    def unused(self, model: nn.Module, config: ModelConfig) -> list[nn.Module]:
        """Modules that never get a gradient."""
        return []

    def with_first_adapters(self, model: nn.Module, config: ModelConfig) -> nn.Module:
        """The model with the adapter that training starts from, if any."""
        if config.lora and config.lora.pretrained:
            require_same_adapter(config)
            load_adapter(model, config.lora)
        return model

    def blueprint(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast, *, buffers: bool = False) -> nn.Module:
        """The model of `build` on the meta device. `buffers`: but for buffers and adapters, which have their values."""
        with parameters_on_meta() if buffers else torch.device("meta"), no_init_weights():
            model = self.kind(self.type_of(config))(self.config_for(config, tokenizer)).float()
            if buffers:
                model.tie_weights()  # skipped together with initialization
            self.freeze(model, config, is_whole=True)
        if buffers and config.lora:
            torch.manual_seed(config.seed)
            draw_adapters(model, torch.device("cpu"))
            self.with_first_adapters(model, config)
        return model

    def build(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
        """The whole model on the CPU in fp32: pretrained parts where weights are named, else drawn from the seed."""
        whole, kind = self.config_for(config, tokenizer), self.kind(self.type_of(config))
        if config.language_model.weights:
            with no_init_weights():
                model: nn.Module = kind(whole).float()
            model.tie_weights()  # skipped together with initialization
            fill(model, self.initial_weights(config, tokenizer))
        else:
            torch.manual_seed(config.seed)
            model = kind(whole).float()
            self.fill_other_parts(model, config)
        torch.manual_seed(config.seed)  # adapters do not depend on what was drawn before
        return self.with_first_adapters(self.freeze(model, config, is_whole=True), config)

    def fill_other_parts(self, model: nn.Module, config: ModelConfig) -> None:
        """Give a drawn model the parts that are not drawn with it: its tower depends on the seed alone."""
        raise NotImplementedError

    def initial_weights(self, config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> Weights:
        raise NotImplementedError

    def skeleton(
        self,
        config: ModelConfig,
        *,
        vocabulary: int,
        language_layers: int | None = None,
        one_inner_tower_layer: bool = False,
    ) -> nn.Module:
        """The model of `build` with undefined weights, for the meta device and fake tensors. See `skeleton_of`."""
        whole, is_published = self.whole_config(config), config.image_kind == "published"
        if not is_published:
            whole.image_token_id = vocabulary - 1
        one_inner_tower_layer &= not is_published  # whose tower is not traced
        model = skeleton_of(self.maker(config), whole, vocabulary, language_layers, one_inner_tower_layer)
        return self.freeze(model, config, is_whole=language_layers is None and not one_inner_tower_layer)

    def maker(self, config: ModelConfig) -> Callable[[PreTrainedConfig], nn.Module]:
        """The constructor of a skeleton's model, which takes its configuration."""
        return self.kind(self.type_of(config))

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
        """An exported model on the CPU; an adapter on its base, which are merged in fp32. Buffers stay fp32.

        A quantized one has the values of its weights in `dtype`, and rounds activations where its format does.
        """
        kind = self.kind(AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type)
        if (folder / SETTINGS).is_file():
            model = merged_model(kind, folder, load_complete)
            model.generation_config = GenerationConfig.from_pretrained(folder)
        else:
            model = load_export(kind, folder, dtype)
            _keep_fp32_buffers(model)
        for parameter in model.parameters():  # also those that transformers keeps in fp32
            parameter.data = parameter.data.to(dtype)
        return model


def _keep_fp32_buffers(model: nn.Module) -> None:
    """Give the model the buffers that it has in fp32: transformers computes some in the type of the weights."""
    config: PreTrainedConfig = copy.deepcopy(model.config)
    set_dtype(config, torch.float32)
    with parameters_on_meta(), no_init_weights():
        made: nn.Module = type(model)(config)
    stored = model.state_dict().keys()
    for name, buffer in made.named_buffers():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        module._buffers[leaf] = model.get_buffer(name).to(buffer.dtype) if name in stored else buffer


def load_export(kind: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model of `kind` on the CPU.

    Raises UserError (69) for a quantized one without the package of the extra `quantized`, ConfigError for one of which
    transformers leaves tensors out.
    """
    if not getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "quantization_config", None):
        return kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    require_package(QUANTIZED_PACKAGE)
    model, info = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False, output_loading_info=True)
    if left := sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])):
        raise ConfigError(
            f"transformers does not find or know {len(left)} tensors of the quantized export, for example {left[0]}",
            expected="an export whose every tensor is a weight or a scale of the model",
        )
    # By itself it would happen in the first call of the whole model, and evaluation calls its parts.
    model.hf_quantizer.compressor.decompress_model(model)
    return model
