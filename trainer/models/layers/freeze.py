"""Decides which parameters are trained: whole parts of a model, and patterns over parameter names.

`model.freeze` freezes parts, then `model.freeze_parameters` freezes and `model.train_parameters` unfreezes parameters
that its patterns match. Patterns are shell patterns (case-sensitive `fnmatch`) in which `*` also matches dots. They
match names of transformers' own model without adapters. The result is stored in `requires_grad`.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import ModelPart
from vlmpipe.trainer.errors import ConfigError

if TYPE_CHECKING:  # the planner imports this module without torch
    from torch import Tensor, nn

PROJECTOR_NAMES = ("projector", "merger", "connector.")  # transformers' names
TOWER_LAYERS = ("EncoderLayer", "VisionBlock", "Dinov2Layer")  # how their classes' names end
TOWER_NAMES = ("vision_tower.", "visual.", "vision_model.", "vision_encoder.", "image_tower.")
# Names of what is neither of these: language models, their heads, and what chooses tokens for them.
LANGUAGE_NAMES = ("language_model.", "text_model.", "lm_head.", "relevance.")
BASE = "base_layer."  # in peft's name of an adapted layer's own weight, twice where it adapts two of a module
MIN_SHARED_LETTERS = 3  # consecutive, between a name and a pattern, to count as similar
NUM_SUGGESTIONS = 3  # names in the error for a pattern that matches none


def part_of(name: str) -> ModelPart:
    """The part of the model that a parameter (or a module) belongs to, by its name.

    A projector is what is called so, also inside of a vision encoder, and what is neither encoder nor language model.
    """
    name += "."
    if any(word in name for word in PROJECTOR_NAMES):
        return "projector"
    if any(word in name for word in TOWER_NAMES):
        return "tower"
    return "language_model" if any(word in name for word in LANGUAGE_NAMES) else "projector"


def tower_layers_of(tower: nn.Module) -> list[nn.Module]:
    """The distinct layers of a vision tower, found by the class names that transformers gives them."""
    return [module for module in tower.modules() if type(module).__name__.endswith(TOWER_LAYERS)]


def is_adapter(name: str) -> bool:
    return any(matrix in name for matrix in (".lora_A.", ".lora_B.", ".lora_magnitude_vector."))


def plain_name(name: str) -> str:
    """A weight's name in the model without adapters."""
    return name.replace(BASE, "")


def freeze(model: nn.Module, config: ModelConfig, *, unused: Iterable[nn.Module] = (), is_whole: bool) -> None:
    """Freeze what the run file says. Call it before adapters are added.

    Args:
        unused: parts without gradient, frozen in any case: DDP would wait for the gradient, and weight decay would
            shrink them.
        is_whole: the model has all its layers, so that each pattern must match some parameter.

    Raises ConfigError for a pattern that matches nothing, and for one that matches weights which have adapters.
    """
    idle = {id(parameter) for part in unused for parameter in part.parameters()}
    copies = tied_names(model)
    names = {name: parameter for name, parameter in model.named_parameters() if name not in copies}
    if is_whole:
        gradients = {name: id(parameter) not in idle for name, parameter in names.items()}
        beside = token_rows(model) if config.lora and config.has_patterns and not config.quantizes_base else {}
        _require_matches(config, gradients, copies, beside)
    token_weights = token_rows(model) if config.lora and config.lora.train_tokens else {}
    for name, parameter in names.items():
        trained = part_of(name) not in config.frozen
        trained = trained and not _matches(name, config.freeze_parameters)
        trained = trained or _matches(name, config.train_parameters) or name in token_weights
        parameter.requires_grad_(trained and id(parameter) not in idle)
    for name, source in copies.items():  # two parameters on the meta device
        model.get_parameter(name).requires_grad_(model.get_parameter(source).requires_grad)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of shared parameters -> their first names, such as a tied head's weight -> the embedding's."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def token_rows(model: nn.Module) -> dict[str, Tensor]:
    """The embedding's and the head's weights, which get no adapters, by name; of a tied head the embedding's alone.

    Empty where transformers cannot find them.
    """
    try:
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
    except NotImplementedError:
        return {}
    weights, copies = {id(module.weight) for module in modules if module is not None}, tied_names(model)
    named = (pair for pair in model.named_parameters() if pair[0] not in copies)
    return {name: parameter for name, parameter in named if id(parameter) in weights}


def in_frozen_parts(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of parts in which only adapters are trained, if anything. module: a model or a training module."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if not is_adapter(name)]
    trained = {part_of(name) for name, parameter in named if parameter.requires_grad}
    return {parameter for name, parameter in named if part_of(name) not in trained}


def trains(module: nn.Module | None) -> bool:
    return module is not None and any(parameter.requires_grad for parameter in module.parameters())


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Frozen weights by their names without adapters. A tower that is frozen as a whole is left out: it has its own
    digest."""
    copies, named = tied_names(model), list(model.named_parameters())
    tower_is_frozen = not any(parameter.requires_grad for name, parameter in named if part_of(name) == "tower")
    return {
        plain_name(name): parameter
        for name, parameter in named
        if not parameter.requires_grad and name not in copies and not (tower_is_frozen and part_of(name) == "tower")
    }


def require_something_trained(config: ModelConfig, num_trained: int) -> None:
    """Raises ConfigError for a model section that freezes the whole model."""
    if not num_trained:
        fields = {"freeze": config.freeze, "freeze_parameters": config.freeze_parameters}
        fields_text = ", ".join(f"model.{name} {list(values)}" for name, values in fields.items() if values)
        raise ConfigError(
            f"{fields_text} leaves nothing to train", fix="freeze less, or name some in model.train_parameters"
        )


def require_frozen_tower(config: ModelConfig, num_trained_in_tower: int) -> None:
    """Raises ConfigError for a run with cached features that would train the tower."""
    if num_trained_in_tower:
        raise ConfigError(
            f"features are cached, and model.train_parameters {list(config.train_parameters)} thaws "
            f"{num_trained_in_tower:,} parameters of the tower, whose output would change",
            expected="a tower that is frozen as a whole",
            fix="set features.cache to off, or have the patterns leave the tower out",
        )


def described(config: ModelConfig) -> str:
    """Frozen parameters, as text."""
    parts = [", ".join(config.freeze)] if config.freeze else []
    parts += [", ".join(config.freeze_parameters)] if config.freeze_parameters else []
    text = "; ".join(parts) or "nothing: all parts were trained"
    return f"{text}; but for {', '.join(config.train_parameters)}" if config.train_parameters else text


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(
    config: ModelConfig, names: Mapping[str, bool], copies: Mapping[str, str], unadapted: Collection[str]
) -> None:
    """names: of all parameters -> whether they get a gradient. unadapted: that may be trained beside adapters."""
    for field in ("freeze_parameters", "train_parameters"):
        for pattern in getattr(config, field):
            hits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
            if not any(names[name] for name in hits):
                raise _unmatched(f"model.{field} has {pattern!r}", pattern, names, copies)
            parts = config.lora.parts if config.lora else ()
            adapted = [name for name in hits if part_of(name) in parts and name not in unadapted]
            if adapted:
                raise ConfigError(
                    f"model.{field} has {pattern!r}, which names {min(adapted)} of the "
                    f"{part_of(min(adapted)).replace('_', ' ')}, and model.lora trains adapters in place of that",
                    expected="patterns that name parameters of parts without adapters (model.lora.parts), or the "
                    "embedding and the head of a base that is not quantized",
                    fix="narrow the pattern, or leave model.lora out",
                )
            in_rows = [name for name in hits if name in unadapted] if config.lora and config.lora.train_tokens else []
            if in_rows:
                raise ConfigError(
                    f"model.{field} has {pattern!r}, which names {in_rows[0]}, and model.lora.train_tokens trains some "
                    "rows of that",
                    expected="one of both",
                    fix="narrow the pattern, or leave model.lora.train_tokens out",
                )


def _unmatched(option: str, pattern: str, names: Mapping[str, bool], copies: Mapping[str, str]) -> ConfigError:
    tied = sorted(name for name in copies if fnmatch.fnmatchcase(name, pattern))
    if tied:
        return ConfigError(
            f"{option}, and {tied[0]} is the same parameter as {copies[tied[0]]}",
            fix=f"name {copies[tied[0]]}, which is both",
        )
    if unused := sorted(name for name in names if fnmatch.fnmatchcase(name, pattern)):
        return ConfigError(
            f"{option}, which names only parameters that get no gradient, such as {unused[0]}: they come after "
            "model.feature_layer",
            fix="leave the pattern out, or name parameters before that layer",
        )
    return ConfigError(
        f"{option}, which matches no parameter",
        expected=f"a pattern over names such as {', '.join(_close(pattern, names))}",
        fix="vlmpipe plan checks patterns without training; * also matches dots",
    )


def _close(pattern: str, names: Iterable[str]) -> Iterator[str]:
    """The names most similar to the pattern; of names that differ in numbers only, the first."""
    kinds: dict[str, str] = {}
    for name in sorted(names):
        kinds.setdefault(re.sub(r"\d+", "0", name), name)
    bare = re.sub(r"\[[^]]*\]", "0", pattern)
    matcher = difflib.SequenceMatcher(b=bare.replace("*", ""), autojunk=False)

    def likeness(kind: str) -> tuple[int, int]:
        matcher.set_seq1(kind)
        shared = (block.size for block in matcher.get_matching_blocks())
        return -sum(size for size in shared if size >= MIN_SHARED_LETTERS), len(kind)

    yield from (kinds[kind] for kind in sorted(kinds, key=likeness)[:NUM_SUGGESTIONS])
