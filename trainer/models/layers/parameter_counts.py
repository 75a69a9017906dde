"""Sizes of a model's parts, from its modules and configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, Unpack

from torch import nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.models.attention.delta_rule import rule_of
from vlmpipe.trainer.models.layers.adapter_targets import left_out
from vlmpipe.trainer.models.layers.freeze import is_adapter, part_of, tower_layers_of
from vlmpipe.trainer.models.layers.routers import balancing_loss_of, routers_of
from vlmpipe.trainer.sizing.model_shape import (
    ADAPTERS,
    PARTS,
    CountedFlops,
    DeltaRules,
    ModelShape,
    Part,
    Stack,
    TrainableSubset,
    TrainedLayers,
    Windows,
)
from vlmpipe.trainer.sizing.optimizer_state import fits_8_bits


def count_parameters(module: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> int:
    return sum(parameter.numel() for name, parameter in module.named_parameters() if counts(name))


def skeleton_of(
    kind: Callable[[PreTrainedConfig], nn.Module],
    whole: PreTrainedConfig,
    vocabulary: int,
    language_layers: int | None,
    one_inner_tower_layer: bool,
) -> nn.Module:
    """A model with undefined weights that `kind` makes, and its first `language_layers` layers only.

    `one_inner_tower_layer`: one module serves as all tower layers
    between the first and the last, which is faster to build. Changes the configuration `whole`.
    """
    text, vision = whole.get_text_config(), whole.vision_config
    text.vocab_size = vocabulary
    if language_layers is not None:
        fewer_layers(text, language_layers)
    tower_layers = int(vision.num_hidden_layers) if one_inner_tower_layer else 0
    if one_inner_tower_layer:
        vision.num_hidden_layers = min(tower_layers, 3)
    with no_init_weights():  # initialization reads values, which meta and fake tensors do not have
        model = kind(whole)
    model.tie_weights()  # skipped together with initialization
    if tower_layers > 3:
        inner = tower_layers_of(model)[1]
        stack = next(part for part in model.modules() if isinstance(part, nn.ModuleList) and inner in part)
        for _ in range(tower_layers - len(stack)):
            stack.insert(1, inner)
        vision.num_hidden_layers = tower_layers
    return model


def fewer_layers(text: PreTrainedConfig, count: int) -> None:
    """Have a language model keep its first layers, in all fields that have an entry for each layer."""
    before = int(text.num_hidden_layers)
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    if getattr(text, "num_kv_shared_layers", 0) and count < before:
        text.num_kv_shared_layers = 0


def vocabulary_of(config: ModelConfig, text: PreTrainedConfig) -> int:
    """Entries of the tokenizer: those to be trained, or the language model's."""
    trained = config.tokenizer.removeprefix("train:")
    return int(trained) if trained != config.tokenizer else int(text.vocab_size)


class OfImages(TypedDict, total=False):
    """Fields of `ModelShape` that depend on how a model takes images."""

    tower_tokens: int
    image_tokens: int
    feature_width: int
    patch_pixels: int
    merge: int
    levels: int
    windows: Windows | None
    projector_layers: int
    behind_features: int
    stored_numbers: int | None
    image_input_bytes: int
    counted: CountedFlops | None
    shards_tower: bool


def model_shape(
    config: ModelConfig,
    model: nn.Module,
    tower_layers: Sequence[nn.Module],
    vision: PreTrainedConfig,
    **of_images: Unpack[OfImages],
) -> ModelShape:
    """Sizes of a model on the meta device. of_images: fields of `ModelShape` that depend on how it takes images.

    Raises ConfigError for weights without numbers: such a model can be built, but not drawn at random.
    """
    if empty := [name for name, parameter in model.named_parameters() if not parameter.numel()]:
        raise ConfigError(
            f"the model section makes a model with {len(empty)} empty weights, for example {empty[0]}",
            expected="sizes of at least 1 in model.tower and model.language_model",
        )
    text, language, head = model.config.get_text_config(), model.get_decoder(), model.get_output_embeddings()
    tied = head.weight is language.embed_tokens.weight
    in_embedding = count_parameters(language.embed_tokens)
    counts = Counter[Part]()
    for name, parameter in model.named_parameters():
        counts[_shape_part_of(name)] += parameter.numel()
    in_layers = count_parameters(language) - in_embedding - counts["adapters"]
    in_language: dict[Part, int] = {"embedding": in_embedding, "language_layers": in_layers}
    chosen = _chosen_parameters(config, model, language.layers, tower_layers)
    quantized = [feature.quantized_size(model) for feature in features_of(config, "model")]
    return ModelShape(
        tower=_stack_of(vision, tower_layers[0]),
        language=_stack_of(text, language.layers[0]),
        vocabulary=int(text.vocab_size),
        tied_head=tied,
        parameters={part: counts[part] for part in PARTS}
        | in_language
        | {"head": 0 if tied else count_parameters(head)},
        frozen=_frozen_parts(config, chosen, tied=tied),
        chosen=chosen,
        adapters=_adapter_parameters(language.layers),
        adapter_rank=config.lora.rank if config.lora else 0,
        without_adapters=left_out(model, config.lora) if config.lora else (),
        delta_rules=_delta_rules(language),
        routers=len(routers_of(language.layers)) if balancing_loss_of(language.layers) else 0,
        quantized=sum(count for count, _ in quantized),
        quantized_bytes=sum(size_bytes for _, size_bytes in quantized),
        in_8_bits=sum(
            parameter.numel()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and fits_8_bits(name, parameter.shape)
        ),
        **of_images,
    )


def _delta_rules(language: nn.Module) -> DeltaRules | None:
    rules = [rule for module in language.modules() if (rule := rule_of(module))]
    if not rules:
        return None
    return DeltaRules(len(rules), rules[0].reference_bytes_per_token(), rules[0].sizes.kernel_bytes_per_token())


def _stack_of(config: PreTrainedConfig, layer: nn.Module) -> Stack:
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise ConfigError(
            f"a {config.model_type} model has {heads} attention heads and {kv_heads} for keys and values",
            expected="num_attention_heads that are a multiple of num_key_value_heads",
        )
    return Stack(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        intermediate=int(getattr(config, "intermediate_size", 0) or _of_experts(config) or hidden * config.mlp_ratio),
        gated=any("gate_proj" in name or "gate_up_proj" in name for name, _ in layer.named_parameters()),
        layer_parameters=count_parameters(layer, lambda name: not is_adapter(name)),
    )


def _of_experts(config: PreTrainedConfig) -> int:
    """Width of the experts that compute a token, the shared one too; 0 for a model without experts."""
    of_one = getattr(config, "moe_intermediate_size", 0) * getattr(config, "num_experts_per_tok", 0)
    return int(of_one + (getattr(config, "shared_expert_intermediate_size", 0) or 0))


def _adapter_parameters(layers: Sequence[nn.Module]) -> dict[str, int]:
    """Mean number of adapter parameters in a block, by the name of the adapted layer."""
    counts: Counter[str] = Counter()
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if is_adapter(name):
                counts[name.partition(".lora_")[0]] += parameter.numel()
    return {name: count // len(layers) for name, count in counts.items()}


def _chosen_parameters(
    config: ModelConfig, model: nn.Module, language_layers: Iterable[nn.Module], tower_layers: Iterable[nn.Module]
) -> TrainableSubset | None:
    """Trained parameters, from `requires_grad`; None when only whole parts are frozen."""
    if not config.has_patterns:
        return None
    counts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():  # a shared one counts once
        counts[_shape_part_of(name)] += parameter.numel() * parameter.requires_grad
    return TrainableSubset(counts, _trained_layers(language_layers), _trained_layers(tower_layers))


def _trained_layers(layers: Iterable[nn.Module]) -> TrainedLayers:
    trained = [
        [parameter for name, parameter in layer.named_parameters() if parameter.requires_grad and not is_adapter(name)]
        for layer in layers
    ]
    return TrainedLayers(
        parameters=tuple(sum(weight.numel() for weight in layer) for layer in trained),
        in_matrices=tuple(sum(weight.numel() for weight in layer if weight.ndim > 1) for layer in trained),
    )


def _shape_part_of(name: str) -> Part:
    part = part_of(name)
    if is_adapter(name):
        return {"tower": "tower_adapters", "projector": "projector_adapters"}.get(part, "adapters")  # type: ignore[return-value]
    if part != "language_model":
        return part
    return "head" if "lm_head." in name else "embedding" if "embed_tokens." in name else "language_layers"


def _frozen_parts(config: ModelConfig, chosen: TrainableSubset | None, *, tied: bool) -> frozenset[Part]:
    """Parts in which nothing is trained. A tied head is trained where the embedding is."""
    if chosen:
        counts = chosen.parameters | ({"head": chosen.parameters["embedding"]} if tied else {})
        return frozenset(part for part in PARTS if part not in ADAPTERS and not counts[part])
    frozen: set[Part] = set()
    for name in config.frozen:
        frozen |= {"embedding", "language_layers", "head"} if name == "language_model" else {name}
    return frozenset(frozen)
