"""Configurations of fewer layers, of which traces are taken."""

from __future__ import annotations

import pytest
from transformers import Gemma3nTextConfig

from vlmpipe.trainer.models.layers.parameter_counts import fewer_layers

KINDS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize(("count", "shared"), [(1, 0), (2, 0), (4, 2)])
def test_fewer_layers_take_no_keys_from_layers_that_are_left_out(count: int, shared: int) -> None:
    """The last layers of Gemma 3n have the keys and values of layers before them."""
    text = Gemma3nTextConfig(num_hidden_layers=len(KINDS), layer_types=KINDS, num_kv_shared_layers=2)
    fewer_layers(text, count)
    assert (text.num_hidden_layers, text.layer_types) == (count, KINDS[:count])
    assert text.num_kv_shared_layers == shared
