"""The features that a run file asks for."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.hooks import table
from vlmpipe.trainer.hooks.features import features_of
from vlmpipe.trainer.hooks.table import FEATURES

PLAIN: dict[str, Any] = {"global_batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
BOTH = PLAIN | {"float8": "rowwise", "ema_decay": 0.9}


def test_a_feature_is_asked_for_by_a_field_that_is_not_its_default() -> None:
    assert features_of(TrainConfig.model_validate(PLAIN | {"ema_decay": 0.0})) == []
    names = [type(feature).__name__ for feature in features_of(TrainConfig.model_validate(BOTH))]
    assert names == ["Averaging", "Float8Products"]


@pytest.mark.parametrize("name", ["ema", "float8"])
def test_a_feature_that_is_asked_for_and_has_no_line_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FEATURES", {other: module for other, module in FEATURES.items() if other != name})
    with pytest.raises(ConfigError, match=rf"train\.{name}.* has been built without"):
        features_of(TrainConfig.model_validate(BOTH), "train")


def test_native_videos_need_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(source="unused.json", sequence_length=8, video="native")
    assert [type(feature).__name__ for feature in features_of(data, "data")] == ["NativeVideo"]
    monkeypatch.delitem(FEATURES, "native_video")
    with pytest.raises(ConfigError, match=r"data\.video.* has been built without"):
        features_of(data, "data")
