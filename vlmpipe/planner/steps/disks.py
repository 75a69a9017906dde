"""The disks that a pipeline is compiled with: what the plan finds, without building a model that cannot need more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpipe.catalog.machines import load_models
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.model_architecture import architecture
from vlmpipe.planner.steps.estimate import step_disks
from vlmpipe.planner.steps.needs import all_samples
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.nesting import object_at
from vlmpipe.trainer.sizing.model_shape import PARTS, ModelShape, Stack
from vlmpipe.trainer.storage.outage import answering_soon

SUB_CONFIGURATIONS = {"text_config", "vision_config"}
ADDED_SHARE = 1.1  # rows for new tokens, and the projector that joins two published models
MATRICES = 64  # of width x width in a layer, and as many again in embeddings and mergers: far more than any family has
VOCABULARY = 1 << 19  # more tokens than any known tokenizer has, or one that is trained for a run


def compiled_disks(config: RunConfig) -> dict[str, int]:
    """GB of the boot disks of steps that need another than the default one, by step.

    A model whose sizes cannot be read here leaves its steps the default disk, unless cluster.step_disks says more.
    """
    samples = all_samples(config.plan.samples or None, config.data.validation_fraction)
    default = step_disks(config, shape=None, samples=samples)
    largest = largest_shape(config)
    if largest and step_disks(config, shape=largest, samples=samples) == default:
        return default
    return step_disks(config, shape=_shape(config), samples=samples)


def largest_shape(config: RunConfig) -> ModelShape | None:
    """A model of which no file of weights is smaller than that of the run file's model, whatever of it is trained.

    It needs neither torch nor the hub: published models are taken from the catalogue, others from the numbers of a
    configuration in the run file. None where one of the two is missing, or leaves its sizes to defaults of its class.
    """
    sizes = [_largest(part) for part in config.model.sources.values() if part]
    known = [size for size in sizes if size]
    if len(known) < len(sizes) or not known:
        return None
    matrix = int(ADDED_SHARE * max(matrix for _, matrix in known))
    whole = max(int(ADDED_SHARE * sum(parameters for parameters, _ in known)), matrix)
    adapters = whole if config.model.lora else 0
    parameters = dict.fromkeys(PARTS, 0) | {
        "embedding": matrix,
        "language_layers": whole - matrix,
        "adapters": adapters,
    }
    stack = Stack(1, 1, 1, 1, 1, 1, gated=False, layer_parameters=whole)
    return ModelShape(stack, 1, 1, 1, 1, stack, 1, tied_head=False, parameters=parameters, frozen=frozenset())


def _largest(part: WeightsConfig) -> tuple[int, int] | None:
    """Parameters of the part and numbers of its largest matrix, as upper bounds."""
    known = load_models().get(part.weights)
    if known is None:
        return _configured(part.config) if part.config else None
    widths = object_at(known.config, "text_config") or known.config
    hidden, inner = _width(widths, "hidden_size"), _width(widths, "intermediate_size")
    vocabulary = _width(widths, "vocab_size") if "vocab_size" in widths else 0
    return known.parameters, hidden * max(vocabulary, inner)


def _width(widths: Mapping[str, object], name: str) -> int:
    """A size in a model's configuration."""
    size = widths[name]
    assert isinstance(size, int), f"{name} is {size!r}"
    return size


def _configured(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bounds of a model from its configuration alone, so wide that they hold for small models only."""
    nested = {name for name, value in config.items() if name.endswith("_config") and isinstance(value, Mapping)}
    if nested and nested != SUB_CONFIGURATIONS:
        return None
    levels = [config[name] for name in sorted(nested)] or [config]
    whole = 0
    for level in levels:
        numbers = {name: value for name, value in level.items() if isinstance(value, int)}
        layers = numbers.get("num_hidden_layers", numbers.get("depth"))
        if not layers or not {"hidden_size", "intermediate_size"} <= set(numbers) or _has_experts(level):
            return None
        patch = numbers.get("patch_size", 1)
        heads = numbers.get("num_attention_heads", 1) * numbers.get("head_dim", 1)
        patches = (numbers.get("image_size", 0) // patch) ** 2
        width = max(*numbers.values(), heads, patches, 3 * patch**2 * numbers.get("temporal_patch_size", 1))
        whole += MATRICES * (layers + 1) * width**2 + VOCABULARY * width
    return whole, whole


def _has_experts(level: Mapping[str, object]) -> bool:
    return any("expert" in name for name in level)


def _shape(config: RunConfig) -> ModelShape | None:
    try:
        with answering_soon():
            return architecture(config).shape
    except UserError:  # `vlmpipe plan` and the run's first step name it
        return None
