"""Settings of `deploy` that no endpoint can serve, known before anything is trained.

What depends on the model's sizes or type is in `vlmpipe.planner.serving`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vlmpipe.config.rules.cloud_run import cloud_run_problems
from vlmpipe.config.sections.deploy import PILLOW
from vlmpipe.config.validation_errors import Problem
from vlmpipe.config.vllm import load_vllm
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.hooks.rules import obstacles_to

if TYPE_CHECKING:
    from vlmpipe.config.run_fields import RunFields

MERGED = "model.lora.export merged"
DIGEST = "@sha256:"
PROCESSOR = PILLOW.partition("=")[0]
# vLLM looks up its token of videos for every image. Tokenizers that are trained here have none.
VIDEO_TOKEN_FAMILY, TRAINED = "qwen2_5_vl", "train:"


def deploy_problems(config: RunFields) -> Iterator[Problem]:
    deploy, trainer, serving = config.deploy, config.train.trainer, config.register_.serving
    images = {"register.serving.image_uri": serving.image_uri} if serving else {}
    images |= {"deploy.image_uri": deploy.image_uri} if deploy and deploy.image_uri else {}
    for field, image in images.items():
        if DIGEST not in image:
            text = f"found {image}, a tag, which may name another version of the server by the time a replica starts"
            yield Problem(field, f"{text}; expected IMAGE@sha256:..., the digest that the registry shows")
    if deploy is None:
        return
    if trainer and trainer.evaluate_command:
        text = "found with train.trainer.evaluate_command, which leaves no answers to compare the endpoint's with"
        yield Problem("deploy", f"{text}; expected one of the two")
    yield from cloud_run_problems(config)
    if deploy.image_uri and serving:
        yield Problem("deploy.image_uri", "found with register.serving, which is the container; expected one of both")
    if serving:
        return
    yield from (Problem("deploy", reason) for reason in obstacles_to("deploy", config))
    args = [
        argument
        for argument in deploy.args
        if option_of(argument).startswith(PROCESSOR) and not resizes_by_pillow(argument)
    ]
    if args:
        text = (
            f"found {args[0]}, which takes the place of the deployment's own: images would be resized otherwise than in"
        )
        yield Problem("deploy.args", f'{text} training and evaluation; expected "use_fast": false in it')
    if deploy.image_uri and config.model.family == VIDEO_TOKEN_FAMILY and config.model.tokenizer.startswith(TRAINED):
        text = f"found {config.model.tokenizer} with deploy, and {load_vllm().name} opens no {VIDEO_TOKEN_FAMILY} whose"
        yield Problem("model.tokenizer", f"{text} tokenizer lacks <|video_pad|>; expected a published tokenizer")
    if config.model.exports_adapter and not deploy.image_uri:
        text = (
            "found with model.lora.export adapter and no image_uri: transformers serve, which a local run asks, puts no"
        )
        yield Problem("deploy", f"{text} adapter on its base; expected {MERGED}, or deploy.image_uri")
    elif config.model.exports_adapter:
        yield from _adapter_problems(config.model)
    try:
        deploy.arguments(config.model_name, config.model, config.train.precision)
    except ConfigError as error:
        yield Problem("deploy", f"{error.found}; expected {error.expected}")


def option_of(argument: str) -> str:
    """An argument's option as vLLM names it, which also takes underscores (vllm/utils/argparse_utils.py)."""
    return argument.partition("=")[0].replace("_", "-")


def resizes_by_pillow(argument: str) -> bool:
    """Return whether this value of vLLM's --mm-processor-kwargs chooses processors for Pillow."""
    try:
        options = json.loads(argument.partition("=")[2])
    except ValueError:
        return False
    return isinstance(options, dict) and options.get("use_fast") is False


def _adapter_problems(model: ModelConfig) -> Iterator[Problem]:
    """Problems that vLLM has with an adapter's folder. With patterns, only the planner knows which weights are
    trained.
    """
    assert model.lora
    vllm = load_vllm()
    if model.lora.use_dora:
        text = f"found true with deploy and model.lora.export adapter, and {vllm.name} opens no DoRA adapter"
        yield Problem("model.lora.use_dora", f"{text}; expected false, or {MERGED}")
    whole = [part for part in PARTS if part not in model.frozen]
    if whole and not model.has_patterns:
        names = " and ".join(part.replace("_", " ") for part in whole)
        text = f"found {list(model.freeze)} with deploy and model.lora.export adapter: the {names} would be trained "
        text += f"whole, and {vllm.name} opens adapters only (no modules_to_save)"
        yield Problem("model.freeze", f"{text}; expected {ways_out(whole, vllm.adapters.get(model.family) or ())}")


def ways_out(whole: Sequence[str], adapted: Sequence[str]) -> str:
    """Settings with which no part of `whole` is trained whole beside an adapter. adapted: parts that may have one."""
    names = ", ".join(whole)
    adapters = f"{names} in model.lora.parts, " if set(whole) <= set(adapted) else ""
    return f"{names} in model.freeze, {adapters}or {MERGED}"
