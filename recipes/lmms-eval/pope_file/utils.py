"""POPE's prompts and scorers are lmms-eval's own; images are files beside the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmms_eval.tasks.pope.utils import *  # noqa: F403  # the task's file names them as functions of this module
from PIL import Image


def doc_to_visual(doc: dict[str, Any]) -> list[Image.Image]:
    return [Image.open(Path("images", doc["image"])).convert("RGB")]
