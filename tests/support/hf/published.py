"""Folders of published models, made when a test of a module first asks for one.

A test file asks for them by `pytest_plugins = ("tests.support.hf.published",)`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf.publish import model_section, publish
from vlmpipe.trainer.config.model import ModelConfig


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of this type."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = publish(model_type, tmp_path_factory.mktemp(model_type))
        return folders[model_type]

    return folder


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(model_section(folder, **changes))
