"""A run's exported model, on the devices of the process that asks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from vlmpipe.trainer.checkpoint.staging import export_folder
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import own_devices
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.base import Family
from vlmpipe.trainer.models.layers.bf16 import use_tf32
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.serving.layer_devices import spread
from vlmpipe.trainer.sizing.device_spread import MAX_WEIGHTS_SHARE, devices_needed
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import link_export, require_whole_export

GIB = 2**30


def load_export(job: JobConfig, device: torch.device) -> tuple[Family, nn.Module]:
    """The exported model, in the precision that training computed in; on `device`, or where that has no room for it
    with its language layers on this process's further GPUs.

    Raises DataError for a damaged export, ConfigError for one that these GPUs have no room for.
    """
    run = open_storage(job.run.run_uri)
    require_whole_export(run)
    with export_folder() as scratch:  # locked, or another process's start would sweep it away
        link_export(run, scratch)
        return family_of(job.model), load_folder(job, scratch, device)


def load_folder(job: JobConfig, folder: Path, device: torch.device) -> nn.Module:
    """The model in a folder on this machine, as `load_export` gives an export. Raises ConfigError as it does."""
    half = job.train.precision == "bf16"
    model = family_of(job.model).load(folder, torch.bfloat16 if half else torch.float32)
    use_tf32(job.train.precision, device)
    return spread(model, roomy_devices(model, own_devices(device))).eval()


def roomy_devices(model: nn.Module, devices: Sequence[torch.device]) -> Sequence[torch.device]:
    """The first devices, as many as the model needs (`devices_needed`). Raises ConfigError if all are too few."""
    if devices[0].type != "cuda":
        return devices[:1]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory = torch.cuda.get_device_properties(devices[0]).total_memory
    if weights > MAX_WEIGHTS_SHARE * memory * len(devices):
        raise ConfigError(
            f"the model takes {weights / GIB:,.1f} GiB, and this process has {len(devices)} GPUs of "
            f"{memory / GIB:,.1f} GiB",
            expected="GPUs that hold the model",
            fix="let fewer processes share the GPUs of a machine: cluster.evaluate_machine.processes_per_replica",
        )
    return devices[: devices_needed(weights, memory, len(devices))]
