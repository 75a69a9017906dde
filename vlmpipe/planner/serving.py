"""Requirements of the run file's deploy section on the machine and on the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlmpipe.catalog.machines import load_catalog
from vlmpipe.config.rules.deploy import ways_out
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.sections.cloud_run import load_cloud_run
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.vllm import load_vllm
from vlmpipe.planner.model_architecture import Architecture, architecture
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS, WeightsConfig
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.models.published import published_json
from vlmpipe.trainer.sizing.model_shape import OF_LANGUAGE_MODEL
from vlmpipe.trainer.storage.base import in_bucket
from vlmpipe.trainer.storage.model_folders import CONFIG

MB_PER_GIB = 1024
ENCODER_WHOLE = "--mm-encoder-tp-mode=data"  # each GPU has the whole vision encoder
OTHER_SERVER = "vlmpipe serve (transformers serve), or register.serving with a container that opens it"


def unservable(config: RunConfig, model: Architecture | None = None) -> tuple[str, ...]:
    """Why deploy's machine or vLLM cannot serve the model, each with a remedy; empty where nothing is known against it.

    model: the run's; None where its sizes are not known.
    """
    deploy = config.deploy
    if deploy is None:
        return ()
    problems = [] if deploy.cloud_run else [*_memory(deploy)]
    if deploy.image_uri and not config.register_.serving:
        problems += _precision(deploy, config.train.precision)
        if model:
            problems += [*_type(model.model), *_adapters(config.model, model), *_tensor_parallel(deploy, model)]
    return tuple(problems)


def served_model(config: RunConfig) -> Architecture | None:
    """Return the model that deploy serves, or None without deploy or if its sizes are not known here."""
    if config.deploy is None:
        return None
    try:
        return architecture(config)
    except UserError:  # planning reports it
        return None


def doubts(config: RunConfig, model: Architecture | None) -> Iterator[str]:
    """Reasons why deploy may not serve the model."""
    deploy, vllm = config.deploy, load_vllm()
    if deploy is None or not deploy.image_uri or config.register_.serving:
        return
    if config.model.exports_adapter:
        yield from _doubts_of_adapters(config)
    if deploy.cloud_run:
        yield from _doubts_of_cloud_run(deploy, config.gcp.location)
    if deploy.quantized and config.train.precision != "bf16":
        yield (
            f"{vllm.name}'s kernels for {deploy.quantized} weights compute in bf16 or fp16, and deploy asks for fp32 "
            f"after train.precision {config.train.precision}: serve one before training, or train in bf16"
        )
    if model is None:
        yield f"whether {vllm.name} opens the model is not known: its type and sizes are not known here"
        return
    model_type = model_type_of(model.model)
    if vllm.takes(model_type) == "unknown":
        yield (
            f"{vllm.name} is not known to open {model_type or 'this type of model'}: serve an export by it before "
            f"training, or use {OTHER_SERVER}"
        )
    elif config.model.exports_adapter and model_type not in vllm.tried_adapters:
        yield (
            f"adapters of {model_type} were not tried in {vllm.name}, which leaves out what it does not know without "
            "an error: deploy compares answers, after training; model.lora.export merged needs no adapters"
        )


def _doubts_of_adapters(config: RunConfig) -> Iterator[str]:
    base = config.model.pretrained.weights if config.model.pretrained else ""
    if not in_bucket(config.output.root_uri):
        yield "a run on this machine ends at deploy-model: transformers serve puts no adapter on its base"
    if config.model.hub_token_secret and not in_bucket(base):
        yield (
            f"the container that serves fetches {base} without model.hub_token_secret: if the hub asks for a token, "
            "copy the base to a bucket, or set model.lora.export to merged"
        )


def _doubts_of_cloud_run(deploy: DeployConfig, region: str) -> Iterator[str]:
    """Reasons why Cloud Run may not serve it that the run file cannot show."""
    gpus = load_cloud_run().gpus
    gpu = gpus.get(deploy.accelerator_type)
    if gpu is None:
        return
    newest = max(gpus, key=lambda name: gpus[name].cuda)
    if gpu.cuda < gpus[newest].cuda:
        yield (
            f"Cloud Run's driver for {deploy.accelerator_type} is of CUDA {gpu.cuda:g}, and {load_vllm().name}'s image "
            f"is built for a newer one: start it there before training, or use {newest}, whose driver is of CUDA "
            f"{gpus[newest].cuda:g}"
        )
    if region in gpu.by_invitation:
        yield (
            f"Cloud Run gives {deploy.accelerator_type} in {region} by invitation only: look at the project's quota "
            "there, or use another gcp.location"
        )


def model_type_of(model: ModelConfig) -> str:
    """transformers' type of the exported model; empty if its configuration has none."""
    if not model.is_of_any_type:
        return model.family
    return str(_configuration(model.pretrained).get("model_type", "")) if model.pretrained else ""


def _tower_type_of(model: ModelConfig) -> str:
    """Return the model_type of a LLaVA's vision encoder, also where a larger model contains the encoder."""
    whole = _configuration(model.tower)
    vision = whole.get("vision_config", whole)
    return str(vision.get("model_type") or (f"{whole['model_type']}_vision_model" if "model_type" in whole else ""))


def _configuration(part: WeightsConfig) -> Mapping[str, Any]:
    return part.config or published_json(part, CONFIG)


def _memory(deploy: DeployConfig) -> Iterator[str]:
    """Shared memory is a part of the machine's memory (aiplatform_v1 ModelContainerSpec.shared_memory_size_mb)."""
    machine = load_catalog().machines.get(deploy.machine_type)
    if machine and deploy.shared_memory_size_mb >= machine.memory_gib * MB_PER_GIB:
        yield (
            f"deploy.shared_memory_size_mb {deploy.shared_memory_size_mb} is not less than the memory of "
            f"{machine.machine_type}, {machine.memory_gib * MB_PER_GIB:,.0f} MB: lower it, or use a larger machine"
        )


def _precision(deploy: DeployConfig, precision: str) -> Iterator[str]:
    """bf16 needs GPUs that compute with it (vllm/platforms/cuda.py, check_if_supports_dtype)."""
    vllm, gpus = load_vllm(), load_catalog().gpus
    gpu = gpus.get(deploy.accelerator_type) if deploy.accelerator_count else None
    if precision == "bf16" and gpu and gpu.compute_capability < vllm.min_bf16_capability:
        able = [name for name, gpu in gpus.items() if gpu.compute_capability >= vllm.min_bf16_capability]
        yield (
            f"deploy.accelerator_type {gpu.accelerator_type} has compute capability {gpu.compute_capability}, and "
            f"{vllm.name} serves train.precision bf16 from {vllm.min_bf16_capability} on: use one of {', '.join(able)}"
        )


def _type(model: ModelConfig) -> Iterator[str]:
    """Models that vLLM has no implementation of. A LLaVA has any vision encoder; vLLM's knows some."""
    vllm, model_type = load_vllm(), model_type_of(model)
    if vllm.takes(model_type) == "other":
        yield (
            f"{vllm.name} has no implementation of {model_type}, and with that of transformers, which it takes, models "
            f"that were tried did not answer as evaluated: use {OTHER_SERVER}"
        )
    tower = _tower_type_of(model) if model.family == "llava" else ""
    if tower and tower not in vllm.llava_towers:
        opened = " or ".join(vllm.llava_towers)
        yield f"{vllm.name} opens no LLaVA with a {tower} as vision encoder, only with {opened}: use {OTHER_SERVER}"


def _adapters(stated: ModelConfig, model: Architecture) -> Iterator[str]:
    """An adapter whose layers vLLM would ignore, or that lies beside other trained weights."""
    if not stated.lora or not stated.exports_adapter:
        return
    vllm, model_type = load_vllm(), model_type_of(model.model)
    adapted = vllm.adapters.get(model_type) or ()
    if vllm.takes(model_type) == "native" and (left := [part for part in stated.lora.parts if part not in adapted]):
        names = " and ".join(left).replace("_", " ")
        yield (
            f"model.lora.parts {list(stated.lora.parts)}: {vllm.name} is not known to apply adapters in the {names} of "
            f"{model_type}, and leaves out what it does not know without an error: set model.lora.export to merged"
            + (f", or model.lora.parts to {list(adapted)}" if adapted else "")
        )
    trained = model.shape.trained
    counts = {
        "tower": trained["tower"],
        "projector": trained["projector"],
        "language_model": sum(trained[part] for part in OF_LANGUAGE_MODEL),
    }
    if whole := [part for part in PARTS if counts[part]]:
        numbers = ", ".join(f"{counts[part]:,} of the {part.replace('_', ' ')}" for part in whole)
        yield (
            f"weights other than the adapters are trained ({numbers}), and {vllm.name} opens adapters only (no "
            f"modules_to_save): expected {ways_out(whole, adapted)}; train_parameters and lora.train_tokens "
            "train what they name"
        )


def _tensor_parallel(deploy: DeployConfig, model: Architecture) -> Iterator[str]:
    """Attention heads are divided among the GPUs (vllm/config/model.py, verify_with_parallel_config)."""
    gpus, language = deploy.tensor_parallel, model.shape.language
    heads = {"attention heads of the language model": language.heads}
    if ENCODER_WHOLE not in deploy.args and model_type_of(model.model) not in load_vllm().pads_vision_heads:
        heads["heads of the vision encoder"] = model.shape.tower.heads
    possible = [
        count
        for count in range(1, gpus)
        if not any(head % count for head in heads.values()) and fits_kv_heads(language.kv_heads, count)
    ]
    if not fits_kv_heads(language.kv_heads, gpus):
        heads["key-value heads of the language model"] = language.kv_heads
    if divided := [f"the {count} {what}" for what, count in heads.items() if count % gpus]:
        yield (
            f"deploy.accelerator_count {gpus} does not divide {' and '.join(divided)}, which vLLM shares out among the "
            f"GPUs (--tensor-parallel-size): use {possible[-1]}"
        )


def fits_kv_heads(kv_heads: int, gpus: int) -> bool:
    """GPUs share key-value heads out, or each head is on several of them (vllm/model_executor/models/qwen2.py)."""
    return kv_heads % gpus == 0 or gpus % kv_heads == 0
