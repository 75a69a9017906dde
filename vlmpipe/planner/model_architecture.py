"""The model's sizes from its configuration: no weights are downloaded, parameters are counted on the meta device."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vlmpipe.catalog.machines import load_models
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.chat_template import prove_chat_template
from vlmpipe.planner.disk_cache import disk_cached, hub_cache_folder
from vlmpipe.planner.image_token_limit import image_token_limit
from vlmpipe.planner.workload import is_cached
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS, WeightsConfig
from vlmpipe.trainer.data.tokenize import TRAINED_PREFIX, trained_size
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.models.layers.freeze import require_frozen_tower, require_something_trained
from vlmpipe.trainer.sizing.model_shape import ModelShape
from vlmpipe.trainer.storage.hub.client import file_on_hub, hub_error
from vlmpipe.trainer.storage.model_folders import CONFIG, bucket_address, local_folder, making

HUB_TIMEOUT_S = 5.0
Verdict = tuple[str, str, str] | None  # the fields of a ConfigError; None for a model that can be split


@dataclass(frozen=True)
class Architecture:
    """`model` is the run file's model section, with configurations in place of known weights."""

    model: ModelConfig
    shape: ModelShape
    origin: str


def architecture(config: RunConfig) -> Architecture:
    """Sizes of the run file's model. Imports torch and transformers, which takes seconds.

    A configuration comes from the run file, a local folder, the Hugging Face cache, the catalogue of known models, or
    the hub, in this order. Raises UserError (69) for an unknown hub id while the hub is out of reach, and ConfigError
    for a model that cannot be trained as configured, images that fit into no packed sequence, a tokenizer too small
    to train, and a chat template that cannot be used.
    """
    if config.model.tokenizer.startswith(TRAINED_PREFIX):
        trained_size(config.model.tokenizer, image_form_of(config.model))
    prove_chat_template(config.model, config.data)
    if config.model.lora and config.model.lora.pretrained:
        from vlmpipe.trainer.models.hf_native.peft_folder import require_same_adapter  # imports torch

        require_same_adapter(config.model)  # before a configuration takes the place of the base's name
    model, origins = _with_configurations(config.model)
    _raise(_trainable(model.model_dump_json(), pack=config.data.pack, cached=is_cached(config)))
    if config.data.share_prefix == "on":
        _raise(_shares_prefixes(model.model_dump_json()))
    image_token_limit(model, config.data)
    shape = replace(_shape(model.model_dump_json()), shards_frozen=config.train.shard_frozen_weights)
    if config.train.epochs:
        require_something_trained(model, shape.trainable_parameters)
    if is_cached(config):
        require_frozen_tower(model, shape.trained["tower"])
    if {"embedding", "head"} & shape.frozen or (model.lora and model.lora.train_tokens):
        _require_trained_tokens(config.model)
    if config.train.router_loss and not shape.routers:
        raise ConfigError(
            f"train.router_loss is {config.train.router_loss:g}, and transformers has no loss that balances experts of "
            "this model",
            expected="a mixture of experts with such a loss, as Qwen3-VL's and Qwen3.5's",
            fix="leave train.router_loss out",
        )
    return Architecture(model, shape, " and ".join(origins))


def _require_trained_tokens(model: ModelConfig) -> None:
    """Raise ConfigError where tokens that a local tokenizer adds to those of a local model have frozen rows."""
    addresses = (model.tokenizer, model.language_model.weights)
    if not all(address and Path(address).expanduser().is_dir() for address in addresses):
        return
    import torch

    from vlmpipe.trainer.data.chat.added_tokens import added_tokens, require_trained_tokens, trained_tokens
    from vlmpipe.trainer.data.tokenize import pretrained_tokenizer
    from vlmpipe.trainer.models.registry import family_of

    tokenizer = pretrained_tokenizer(model.tokenizer)
    trained_tokens(model, tokenizer)
    if added_tokens(model, tokenizer):
        with torch.device("meta"):
            skeleton = family_of(model).skeleton(model, vocabulary=len(tokenizer))
        require_trained_tokens(skeleton, model, tokenizer)


def require_shardable(model: ModelConfig, ranks: int, *, cached: bool, sequence: bool) -> None:
    """Call `trainer.strategies.tensor_parallel.plan.require_shardable`, without torch for a cached verdict."""
    _raise(_shardable(model.model_dump_json(), ranks, cached=cached, sequence=sequence))


def require_context_parallel(model: ModelConfig, ranks: int) -> None:
    """Call `trainer.strategies.context_parallel.require_context_parallel`, without torch for a cached verdict."""
    _raise(_shares_tokens(model.model_dump_json(), ranks))


def require_stages(model: ModelConfig) -> None:
    """Call `trainer.strategies.pipeline_parallel.requirement.require_stages`, without torch for a cached verdict."""
    _raise(_has_stages(model.model_dump_json()))


def sharing_obstacle(model: ModelConfig) -> str:
    """Call `trainer.setup.shared_prefix.sharing_obstacle`, without torch for a cached answer."""
    return _sharing_obstacle(model.model_dump_json())


def _raise(verdict: Verdict) -> None:
    if verdict:
        problem, expected, fix = verdict
        raise ConfigError(problem, expected=expected, fix=fix)


@disk_cached
def _trainable(model: str, *, pack: bool, cached: bool) -> Verdict:
    """`model` is the model section as JSON."""
    from vlmpipe.trainer.models.registry import family_of

    return _verdict(lambda config: family_of(config).require_trainable(config, pack=pack, cached=cached), model)


@disk_cached
def _shardable(model: str, ranks: int, *, cached: bool, sequence: bool) -> Verdict:
    """`model` is the model section as JSON."""
    from vlmpipe.trainer.strategies.tensor_parallel import plan

    return _verdict(lambda config: plan.require_shardable(config, ranks, cached=cached, sequence=sequence), model)


@disk_cached
def _shares_tokens(model: str, ranks: int) -> Verdict:
    """`model` is the model section as JSON."""
    from vlmpipe.trainer.strategies.context_parallel import require_context_parallel

    return _verdict(lambda config: require_context_parallel(config, ranks), model)


@disk_cached
def _shares_prefixes(model: str) -> Verdict:
    """`model` is the model section as JSON."""
    from vlmpipe.trainer.setup.shared_prefix import require_shared_prefix

    return _verdict(require_shared_prefix, model)


@disk_cached
def _sharing_obstacle(model: str) -> str:
    """`model` is the model section as JSON."""
    from vlmpipe.trainer.setup import shared_prefix

    return shared_prefix.sharing_obstacle(ModelConfig.model_validate_json(model))


@disk_cached
def _has_stages(model: str) -> Verdict:
    """`model` is the model section as JSON."""
    from vlmpipe.trainer.strategies.pipeline_parallel.requirement import require_stages

    return _verdict(require_stages, model)


def _verdict(require: Callable[[ModelConfig], object], model: str) -> Verdict:
    try:
        require(ModelConfig.model_validate_json(model))
    except ConfigError as error:
        return error.found, error.expected, error.fix
    return None


@disk_cached
def _shape(model: str) -> ModelShape:
    """`model` is the model section as JSON."""
    from vlmpipe.trainer.models.registry import family_of

    section = ModelConfig.model_validate_json(model)
    return family_of(section).shape(section)


def _with_configurations(model: ModelConfig) -> tuple[ModelConfig, dict[str, None]]:
    """The section with catalogued configurations in place of known weights, and where configurations come from."""
    uses_catalogue = not model.is_of_any_type  # its image processor is needed too
    configurations = {name: _configuration(part, uses_catalogue) for name, part in model.sources.items() if part}
    parts: dict[str, WeightsConfig | None] = {name: part for name, (part, _) in configurations.items()}
    if "pretrained" in parts:
        parts |= dict.fromkeys(PARTS, parts["pretrained"])
    if model.family == "llava":  # a part with a configuration of its own is not taken from a whole model
        parts |= {name: None for name in ("pretrained", "projector") if (part := parts.get(name)) and part.config}
    return model.model_copy(update=parts), dict.fromkeys(origin for _, origin in configurations.values())


def _configuration(part: WeightsConfig, uses_catalogue: bool) -> tuple[WeightsConfig, str]:
    if part.config:
        return part, "the run file"
    if bucket_address(part.weights):
        local_folder(part.weights, part.revision, weights=False)
        return part, "a bucket"
    if local_folder(part.weights, weights=False):
        return part, "a local folder"
    _require_hub_id(part.weights)
    if hub_cache_folder(part):
        return part, "the Hugging Face cache"
    known = load_models().get(part.weights) if uses_catalogue else None
    if known:
        return WeightsConfig(config=dict(known.config)), f"the catalogue of {known.date}"
    _require_hub(part)
    return part, "the Hugging Face hub"


def _require_hub_id(name: str) -> None:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"no folder {name!r}, and it is no name of a model on the Hugging Face hub",
            expected="a local folder with config.json, or a hub id such as Qwen/Qwen2.5-0.5B",
            fix=making(name),
        ) from error


def _require_hub(part: WeightsConfig) -> None:
    """Ask the hub once: its client repeats unanswered requests for minutes. Raises UserError for what it answers."""
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    name, revision = part.weights, part.revision
    try:
        file_on_hub(name, revision, CONFIG, HUB_TIMEOUT_S)
        return
    except (HfHubHTTPError, FileMetadataError) as error:
        raise hub_error(error, name, revision, CONFIG) or error from error
    except (HTTPError, OfflineModeIsEnabled):
        pass
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or ""
    raise UserError(
        f"the configuration of {name!r} is not here, and {host} is not reachable",
        expected="a hub id in the Hugging Face cache or in the planner's catalogue, or a local folder with config.json",
        fix="give a folder with its config.json, or connect to the network",
        code=ExitCode.UNAVAILABLE,
    )
