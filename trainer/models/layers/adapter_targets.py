"""Layers and experts of a model that get adapters (`model.lora.targets`), and defaults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.layers.experts import is_experts, weights_in
from vlmpipe.trainer.models.layers.freeze import is_adapter, part_of, plain_name, tower_layers_of
from vlmpipe.trainer.sizing.model_shape import LeftOut

# A linear layer with so few rows is a gate: a number for each head (in_proj_a, in_proj_b of Qwen3.5) or one
# for each token (shared_expert_gate). Other layers have 1/16 at least: keys of few heads.
MAX_ROWS_OF_GATE = 1 / 32  # of its columns
GATES, EXPERTS_ALONE, TAKEN_FOR_EXPERTS, NOT_LINEAR = (
    "gates of a few rows",
    "experts, which PEFT adapts without use_dora and dropout only",
    "layers that PEFT takes for experts, by their names",
    "neither linear layers nor experts",
)


@dataclass(frozen=True)
class Targets:
    """layers: names of linear layers. experts: names of parameters of (experts, rows, columns)."""

    layers: tuple[str, ...]
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """Weights that may get adapters, by its full name -> by its name within the block (of the projector: within that).

    left_out: by that name, why a default leaves it out.
    """

    layers: Mapping[str, str]
    experts: Mapping[str, str]
    left_out: Mapping[str, str]


def targets_of(model: nn.Module, config: LoraConfig, unused: Iterable[nn.Module]) -> Targets:
    """The layers and experts to adapt. A target is a name within a block, or the last components of one.

    Raises ConfigError for a target that is none of `config.parts`.
    """
    candidates = _candidates(model, config, unused)
    names = [*candidates.layers.values(), *candidates.experts.values()]
    kind = model.config.text_config.model_type
    for part in config.parts:
        if not any(part_of(name) == part for name in (*candidates.layers, *candidates.experts)):
            raise ConfigError(
                f"the {part.replace('_', ' ')} of a {kind} model has no linear layers that model.lora could adapt",
                fix=f"leave {part} out of model.lora.parts, or take another model",
            )
    for target in config.targets:
        if not any(_matches(target, name) for name in names):
            raise ConfigError(
                f"model.lora.targets has {target!r}, which no linear layer of the {' and '.join(config.parts)} of a "
                f"{kind} model is called",
                expected=f"some of {', '.join(dict.fromkeys(names))}, or their last parts",
                fix="leave targets out to adapt all of them",
            )

    def chosen(some: Mapping[str, str]) -> tuple[str, ...]:
        if not config.targets:
            return tuple(full for full, name in some.items() if name not in candidates.left_out)
        return tuple(full for full, name in some.items() if any(_matches(target, name) for target in config.targets))

    return Targets(chosen(candidates.layers), chosen(candidates.experts))


def left_out(model: nn.Module, config: LoraConfig) -> tuple[LeftOut, ...]:
    """Return what the default of `targets` leaves without adapters in the language model's layers.

    Norms and biases have none in any case. model: with adapters or without them.
    """
    if config.targets or "language_model" not in config.parts:
        return ()
    candidates, counts = _candidates(model, config, ()), Counter[tuple[str, str]]()
    known = {*candidates.layers.values(), *candidates.experts.values()}
    for layer in model.get_decoder().layers:
        for full, parameter in layer.named_parameters():
            name = plain_name(full).removesuffix(".weight")
            reason = candidates.left_out.get(name, "" if name in known else NOT_LINEAR)
            if parameter.ndim > 1 and reason and not is_adapter(full):
                counts[name, reason] += parameter.numel()
    return tuple(LeftOut(name, reason, count) for (name, reason), count in counts.most_common())


def _candidates(model: nn.Module, config: LoraConfig, unused: Iterable[nn.Module]) -> Candidates:
    """Linear layers and experts that may get adapters, without those that get no gradient."""
    idle = {module for part in unused for module in part.modules()}
    blocks = {*model.get_decoder().layers, *tower_layers_of(model)}
    layers: dict[str, str] = {}
    experts: dict[str, str] = {}
    reasons: dict[str, str] = {}
    taken = _taken_for_experts(model)
    block = ""
    for full, module in model.named_modules():
        if module in blocks:
            block = f"{full}."
        if module in idle or part_of(full) not in config.parts or ".lora_" in full:
            continue
        is_projector = part_of(full) == "projector"
        if not is_projector and not (block and full.startswith(block)):
            continue
        name = plain_name(full if is_projector else full.removeprefix(block)).removesuffix(".base_layer")
        if isinstance(module, nn.Linear):
            layers[plain_name(full).removesuffix(".base_layer")] = name
            if not is_projector and module.out_features <= MAX_ROWS_OF_GATE * module.in_features:
                reasons[name] = GATES
            elif name.rpartition(".")[2] in taken:
                reasons[name] = TAKEN_FOR_EXPERTS
        elif is_experts(module):
            for weight in weights_in(module):
                of_weight = f"{name}.{weight}"
                experts[plain_name(f"{full}.{weight}")] = of_weight
                if config.use_dora or config.dropout:
                    reasons[of_weight] = EXPERTS_ALONE
    return Candidates(layers, experts, reasons)


def _taken_for_experts(model: nn.Module) -> frozenset[str]:
    """Last names of layers that PEFT, for this type of model, takes for experts of an older release."""
    from peft.utils import transformers_weight_conversion as peft_names

    older = peft_names._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return frozenset(peft_names._MOE_TARGET_MODULE_MAPPING.get(older, {}))


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")
