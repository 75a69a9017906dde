"""The model that a run starts from, on the devices of the process that asks it."""

from __future__ import annotations

import torch

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.make import make_chat
from vlmpipe.trainer.distributed.process import own_devices
from vlmpipe.trainer.evaluation.answer import AnsweringModel
from vlmpipe.trainer.evaluation.batch_budget import BatchBudget
from vlmpipe.trainer.models.layers.bf16 import use_tf32
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.serving.exported_model import roomy_devices
from vlmpipe.trainer.serving.layer_devices import spread


def load_start(job: JobConfig, device: torch.device) -> AnsweringModel:
    """The start model in the precision that training computes in. New adapters, which change nothing, are left out.

    Raises ConfigError for a model that these GPUs have no room for.
    """
    chat, family = make_chat(job.model, job.data, ()), family_of(job.model)
    model = family.build(_without_new_adapters(job.model), chat.tokenizer).requires_grad_(False)
    if job.train.precision == "bf16":
        model = model.to(torch.bfloat16)
    use_tf32(job.train.precision, device)
    model = spread(model, roomy_devices(model, own_devices(device))).eval()
    return AnsweringModel(family, model, chat, None, BatchBudget(job.evaluate.batch_tokens))


def _without_new_adapters(model: ModelConfig) -> ModelConfig:
    return model if model.lora is None or model.lora.pretrained else model.model_copy(update={"lora": None})
