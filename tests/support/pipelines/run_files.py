"""A small run file for tests of what run files may say."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.trainer.errors import ExitCode

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {
        "tower": {"config": {"model_type": "siglip_vision_model"}},
        "language_model": {"config": {"model_type": "qwen2"}},
        "tokenizer": "train:300",
        "image_size": 32,
    },
    "data": {"source": "builtin:digits", "sequence_length": 256},
    "train": {"global_batch_size": 8, "optimizer": {"learning_rate": 0.001}},
}


def small(**overrides: Any) -> RunConfig:
    """A small run file with dotted keys replaced; `__` stands for a dot. A section is replaced whole, not merged."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    others = {key: value for key, value in SMALL.items() if key not in given}
    return parse_run_config(apply_overrides(others, given), "small.yaml")


def problems_of(**overrides: Any) -> dict[str, str]:
    with pytest.raises(RunFileError) as caught:
        small(**overrides)
    assert caught.value.code == ExitCode.CONFIG
    return {problem.field: problem.text for problem in caught.value.problems}
