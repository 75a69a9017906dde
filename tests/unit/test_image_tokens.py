"""Image tokens counted from what a tower's configuration says are those that its family counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ModelConfig
from trainer.models.image_tokens import image_tokens_of
from trainer.models.table import family_of

ROOT = Path(__file__).parents[2]
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 2, "patch_size": 7}
SIGLIP = CLIP | {"model_type": "siglip_vision_model"}
DUAL = {"model_type": "siglip", "vision_config": SIGLIP}


def model(tower: dict[str, Any], **changes: Any) -> ModelConfig:
    language_model = {"config": {"model_type": "qwen2"}}
    return ModelConfig.model_validate(
        {"tower": tower, "language_model": language_model, "tokenizer": "train:300", "image_size": 56} | changes
    )


def without(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    "tower", [CLIP, SIGLIP, DUAL, without("patch_size", CLIP), {"model_type": "dinov2", "patch_size": 14}], ids=str
)
@pytest.mark.parametrize("select", ["full", "drop_cls"])
def test_the_count_is_the_familys(tower: dict[str, Any], select: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tower))
    for source in ({"config": tower}, {"weights": str(tmp_path)}):
        config = model(source, feature_select=select)
        assert image_tokens_of(config)(40, 30) == family_of(config).image_tokens(config, 40, 30)


def test_torch_is_imported_only_where_the_configuration_leaves_something_out() -> None:
    program = (
        "import sys; from trainer.models.image_tokens import image_tokens_of;"
        "from tests.unit.test_image_tokens import *;"
        "before = 'torch' in sys.modules; image_tokens_of(model({'config': SIGLIP}))(4, 4);"
        "print(before, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]
