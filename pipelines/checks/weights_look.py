"""Where a part's weights are, by files on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.models.safetensors_header import require_whole_folder
from vlmpipe.trainer.storage.model_folders import bucket_address, folder_like, making
from vlmpipe.trainer.storage.user_folders import expanded

State = Literal["ok", "warning", "failed", "unchecked"]


def look_at_weights(part: WeightsConfig) -> tuple[State, str, int]:
    """State, text and exit code of a finding. Raises DataError for a damaged file of weights in a folder."""
    if part.config:
        return "ok", f"{part.config['model_type']} with random weights", ExitCode.OK
    if address := bucket_address(part.weights):
        return "unchecked", f"{address} is read when the run starts", ExitCode.OK
    if (folder := expanded(part.weights)).is_dir():
        tensors = require_whole_folder(folder)
        return "ok", f"folder {part.weights}" + (f", {tensors:,} tensors" if tensors else ""), ExitCode.OK
    if part.weights.startswith((".", "/", "~")) or part.weights.count("/") > 1:  # a hub id is OWNER/NAME
        made = making(part.weights)
        return "failed", f"no folder {part.weights}{made and f': {made}'}", ExitCode.CONFIG
    if (_hub_cache() / f"models--{part.weights.replace('/', '--')}").is_dir():
        return "ok", f"{part.weights} from the Hugging Face cache", ExitCode.OK
    text = f"{part.weights} will be fetched from the Hugging Face hub by the job"
    if close := folder_like(part.weights):
        return "warning", f"{text}: there is no such folder here. Did you mean {close}?", ExitCode.OK
    return "unchecked", text, ExitCode.OK


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE", f"{home}/hub")))  # as huggingface_hub does
