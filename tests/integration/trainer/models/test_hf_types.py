"""The way of each model type of family hf: trained, resumed, exported, loaded by plain transformers, evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section, publish
from tests.support.trainer.native_models import write_data
from tests.support.trainer.runs import losses, make_run, run_ranks, summary, train_runs
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf.trainability import require_trainable
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.strategies.context_parallel import require_context_parallel
from vlmpipe.trainer.strategies.pipeline_parallel.requirement import require_stages
from vlmpipe.trainer.strategies.tensor_parallel.plan import require_shardable

pytestmark = pytest.mark.slow  # test_hf has the way of one type
REFUSED = ("paligemma",)
RELATIVE = 1e-5


@pytest.mark.parametrize("model_type", [name for name in INSTALLED if name not in REFUSED])
def test_a_type_trains_resumes_exports_and_is_evaluated(model_type: str, tmp_path: Path) -> None:
    """On one process, and on two where layers can be split, sequences shared, or stages cut."""
    base = {
        "model": model_section(publish(model_type, tmp_path / "model")),
        "data": {**write_data(tmp_path / "data"), "validation_fraction": 0.3},
        "features.cache": "off", "train.global_batch_size": 2, "train.micro_batch_size": 1, "train.max_steps": 2,
    }  # fmt: skip
    ways: dict[str, tuple[Callable[[ModelConfig], None], dict[str, Any]]] = {
        "split": (_require_split, {"train.strategy": "tp", "train.tensor_parallel": 2}),
        "shared": (_require_shared, {"train.context_parallel": 2}),
        "stages": (require_stages, {"train.strategy": "pp", "train.pipeline_parallel": 2}),
    }
    begun = make_run(tmp_path, "resumed", base | {"train.max_steps": 1}, features="off")
    whole = make_run(tmp_path, "whole", base, features="off")
    require_trainable(whole.model, pack=whole.data.pack, cached=False)
    train_runs([begun, whole], processes=1)
    resumed = make_run(tmp_path, "resumed", base, features="off")
    train_runs([resumed], processes=1)
    assert summary(resumed)["resumed_from_step"] == 1
    assert losses(resumed) == losses(whole) and len(set(losses(whole))) == 2
    for name, (require, changes) in ways.items():
        try:
            require(whole.model)
        except ConfigError:
            continue
        in_parts = make_run(tmp_path, name, base | changes, features="off")
        train_runs([in_parts], processes=2)
        assert losses(in_parts) == pytest.approx(losses(whole), rel=RELATIVE), name
    sync_run(whole)
    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{whole.run.run_uri}/run.json"], processes=1)
    storage = open_storage(whole.run.run_uri)
    model, info = AutoModelForImageTextToText.from_pretrained(storage.uri("export"), output_loading_info=True)
    assert not any(info.values())
    source = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").state_dict()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, source[name])]
    assert changed, "training changed weights"
    assert 0 < json.loads(storage.read("evaluate.json"))["loss"] < 20


def _require_split(config: ModelConfig) -> None:
    require_shardable(config, 2, cached=False)


def _require_shared(config: ModelConfig) -> None:
    require_context_parallel(config, 2)
