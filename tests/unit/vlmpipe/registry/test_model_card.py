"""What a model card says about its data."""

from __future__ import annotations

from vlmpipe.registry.model_card import _data
from vlmpipe.trainer.config.data import DataConfig


def test_mixed_licences_are_named_with_their_sources_and_a_missing_one_too() -> None:
    sources = [
        {"name": "a", "uri": "a.jsonl", "weight": 3, "license": "CC-BY-4.0"},
        {"name": "b", "uri": "b.jsonl", "weight": 1},
    ]
    said = _data(DataConfig.model_validate({"sources": sources, "sequence_length": 9}))
    assert said == "a (`a.jsonl`, 75.0% of samples, CC-BY-4.0); b (`b.jsonl`, 25.0% of samples, licence not given)"
