"""Adapters as PEFT stores them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Other trained weights, such as a projector's, are in it as PEFT's `modules_to_save`. What transformers 4.5x knows by
another name is in it under both: PEFT passes over the one that its model lacks, without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.gc_control import collector_off
from vlmpipe.trainer.models.layers.adapter_targets import Targets
from vlmpipe.trainer.models.layers.freeze import is_adapter, plain_name, tied_names
from vlmpipe.trainer.models.layers.lora import ADAPTER, MAGNITUDE, adapters_of, peft_settings, rows_in
from vlmpipe.trainer.models.published import model_file, published_json

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's, of all names
ROWS = "token_adapter.trainable_tokens_delta"  # PEFT's name of an embedding's or a head's trained rows
# PEFT's name of a setting -> the field of model.lora
FIELDS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
# Vision encoders that hold their layers themselves since transformers 5.6, and the module that did in 4.5x.
FLATTENED, OLDER_MODULE = ("CLIPVisionModel", "SiglipVisionModel"), "vision_model"


def write_adapter(model: nn.Module, config: ModelConfig, read: Callable[[str], Tensor], folder: Path) -> None:
    """Write trained weights of `model`, which may be on the meta device. read: a trained weight by its name."""
    assert config.lora and config.pretrained
    names = stored_names(model)
    weights = adapters_of(model)
    experts = {name for name in weights if not name.endswith(".weight")}
    adapted = {name.removesuffix(".weight") for name in weights.keys() - experts}
    layers = sorted(adapted | set(older_names(model, adapted).values()))
    settings = peft_settings(config.lora, Targets(tuple(layers), tuple(sorted(experts))))
    settings.base_model_name_or_path = config.pretrained.weights
    settings.revision = config.pretrained.revision or None
    rows = rows_in(model)
    # Of a tied head PEFT takes the embedding's rows, by the model's own settings.
    settings.trainable_token_indices = {_module_of(name): tokens.tolist() for name, tokens in rows.items()} or None
    saved = saved_modules(model)
    settings.modules_to_save = [*saved, *older_names(model, saved).values()] or None
    settings.inference_mode = True
    with os_errors(f"writing {folder}"):
        settings.save_pretrained(str(folder))
        tensors = {stored: read(name) for name, stored in names.items()}
        tensors |= {names[name]: tensors[names[name]][tokens].contiguous() for name, tokens in rows.items()}
        tensors |= {older: tensors[stored].clone() for stored, older in older_keys(model).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def older_keys(model: nn.Module) -> dict[str, str]:
    """Names in PEFT's file -> those of the same tensors for transformers 4.5x, where these differ."""
    names = {stored.removeprefix(PREFIX) for stored in stored_names(model).values()}
    return {f"{PREFIX}{name}": f"{PREFIX}{older}" for name, older in older_names(model, names).items()}


def older_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of modules or weights -> those in transformers 4.5x, where these differ."""
    changed = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in FLATTENED]
    return {
        name: f"{prefix}{OLDER_MODULE}.{name.removeprefix(prefix)}"
        for name in names
        for prefix in changed
        if name.startswith(prefix)
    }


def saved_modules(model: nn.Module) -> list[str]:
    """Modules whose trained weights PEFT saves beside the adapters: it saves modules whole.

    Raises ConfigError where a trained weight lies in none, beside weights that are not saved.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {name for name in trained if not is_adapter(name)} - rows_in(model).keys() - heads_of_rows(model)
    parents = sorted({name.rpartition(".")[0] for name in names})
    outer = [name for name in parents if not any(name.startswith(f"{other}.") for other in parents if other)]
    for parent in outer:
        held = {f"{parent}.{name}" for name, _ in model.get_submodule(parent).named_parameters()}
        if not parent or held - names:
            name = min(name for name in names if name.rpartition(".")[0] == parent)
            raise ConfigError(
                f"{name} is trained, and no adapter folder can hold it: PEFT saves whole modules, and this one also "
                "has weights that are not trained",
                expected="adapters, and trained weights that fill their modules",
                fix=f"set model.freeze_parameters to ['*{name.rpartition('.')[2]}'], or model.lora.export to merged",
            )
    return outer


def require_same_adapter(config: ModelConfig) -> None:
    """Raise ConfigError where `model.lora.pretrained` belongs to another base or was made with other settings."""
    lora, base = config.lora, config.pretrained
    if not lora or not lora.pretrained or not base:
        return
    settings = published_json(WeightsConfig(weights=lora.pretrained), SETTINGS)
    if settings.get("peft_type") != "LORA":
        raise ConfigError(
            f"model.lora.pretrained {lora.pretrained} holds no LoRA adapter"
            + (f" but one of kind {settings['peft_type']}" if settings else f": it has no {SETTINGS}"),
            expected="a folder in PEFT's format, as a run with model.lora.export adapter writes it",
        )
    known = (settings.get("base_model_name_or_path"), str(settings.get("revision") or base.revision))
    if known != (base.weights, base.revision or known[1]):
        raise ConfigError(
            f"model.lora.pretrained {lora.pretrained} is an adapter for {known[0]}{_at(known[1])}, and "
            f"model.pretrained is {base.weights}{_at(base.revision)}",
            expected="the base that the adapter was trained on",
            fix=f"set model.pretrained to that base, or correct base_model_name_or_path in its {SETTINGS} if it only "
            "has another address",
        )
    if other := [name for name, field in FIELDS.items() if settings.get(name, False) != getattr(lora, field)]:
        changes = ", ".join(f"{FIELDS[name]}: {json.dumps(settings.get(name, False))}" for name in other)
        raise ConfigError(
            f"model.lora.pretrained {lora.pretrained} was made with other settings than model.lora has",
            expected=f"in model.lora {changes}",
        )


def require_fitting_adapter(model: nn.Module, lora: LoraConfig) -> None:
    """Raise ConfigError where the adapter's layers or shapes are not those of `model`, without reading its weights."""
    with _opened(lora) as file:
        actual = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    older = set(older_keys(model).values())
    actual = {name: shape for name, shape in actual.items() if name not in older}
    expected = {stored: tuple(model.get_parameter(name).shape) for name, stored in _adapter_names(model).items()}
    trained = {stored: name for name, stored in stored_names(model).items()}
    for name in sorted(actual):
        if name in expected or name in trained:
            continue
        text = "is no adapter" if ".lora_" not in name else "adapts no layer that model.lora.parts and targets name"
        raise ConfigError(
            f"model.lora.pretrained {lora.pretrained} holds {name}, which {text} of this model",
            expected="adapters of the layers in model.lora.parts and targets, and weights that this run trains",
            fix=f"{_own_targets(lora)}, and model.lora.parts and model.freeze as the adapter's run had them",
        )
    if missing := sorted(expected.keys() - actual.keys()):
        raise ConfigError(
            f"model.lora.pretrained {lora.pretrained} lacks {len(missing)} of the {len(expected)} matrices of this "
            f"model's adapters, for example {missing[0]}",
            fix=f"{_own_targets(lora)}, and model.lora.parts as the adapter's run had them",
        )
    shapes = expected | {stored: tuple(model.get_parameter(name).shape) for stored, name in trained.items()}
    if wrong := sorted(name for name in actual if actual[name] != shapes[name]):
        raise ConfigError(
            f"model.lora.pretrained {lora.pretrained} is an adapter for another base: {wrong[0]} is {actual[wrong[0]]} "
            f"instead of {shapes[wrong[0]]}",
            expected="the base that the adapter was trained on",
        )


def _own_targets(lora: LoraConfig) -> str:
    """Advice that names the adapter's layers: a run of an earlier vlmpipe, with no targets, may have had others."""
    settings = published_json(WeightsConfig(weights=lora.pretrained), SETTINGS)
    named = [settings.get(field) for field in ("target_modules", "target_parameters")]
    targets = {str(name).rpartition(".")[2] for names in named if isinstance(names, list) for name in names}
    return f"set model.lora.targets to [{', '.join(sorted(targets))}]"


def load_adapter(model: nn.Module, lora: LoraConfig) -> None:
    """Start from the adapter: give parameters its values, also those on the meta device."""
    require_fitting_adapter(model, lora)
    with _opened(lora) as file, torch.no_grad():
        there = set(file.keys())
        for name, stored in stored_names(model).items():
            if stored in there:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, nn.Parameter(file.get_tensor(stored).float()))


def merged_model(
    kind: type[PreTrainedModel], folder: Path, load: Callable[[type[PreTrainedModel], WeightsConfig], nn.Module]
) -> nn.Module:
    """The adapter in `folder` on its base, as PEFT loads and merges it. load: a pretrained model of `kind`, in fp32."""
    with collector_off():
        import peft

    settings = peft.PeftConfig.from_pretrained(str(folder))
    base = load(kind, WeightsConfig(weights=settings.base_model_name_or_path, revision=settings.revision or ""))
    merged: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    return merged


def stored_names(model: nn.Module) -> dict[str, str]:
    """Names of the trained parameters -> those in PEFT's file."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and not is_adapter(name)]
    rows, heads = rows_in(model), heads_of_rows(model)
    return _adapter_names(model) | {
        name: f"{PREFIX}{_module_of(name)}.{ROWS}" if name in rows else f"{PREFIX}{plain_name(name)}"
        for name in trained
        if name not in heads
    }


def heads_of_rows(model: nn.Module) -> set[str]:
    """Weights of which PEFT takes the rows of another: a tied head, which on the meta device is one of its own."""
    rows = rows_in(model)
    return {copy for copy, first in tied_names(model).items() if first in rows}


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _adapter_names(model: nn.Module) -> dict[str, str]:
    names = [name for name, _ in model.named_parameters() if is_adapter(name)]
    return {
        name: PREFIX + name.replace(MAGNITUDE, ".lora_magnitude_vector").replace(f".{ADAPTER}.weight", ".weight")
        for name in names
    }


def _opened(lora: LoraConfig) -> safe_open:
    part = WeightsConfig(weights=lora.pretrained)
    path = model_file(part, WEIGHTS)
    if path is None:
        raise ConfigError(
            f"model.lora.pretrained {lora.pretrained} has no {WEIGHTS}", expected="an adapter in PEFT's format"
        )
    return safe_open(path, framework="pt")


def _at(revision: str | None) -> str:
    return f" at {revision}" if revision else ""
