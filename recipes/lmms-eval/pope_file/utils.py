"""POPE's prompts and scorers are lmms-eval's own; images are files, named by absolute paths."""

from __future__ import annotations

from typing import Any

from lmms_eval.tasks.pope.utils import *  # noqa: F403  # the task's file names them as functions of this module
from PIL import Image


def doc_to_visual(doc: dict[str, Any]) -> list[Image.Image]:
    return [Image.open(doc["image"]).convert("RGB")]
