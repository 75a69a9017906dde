"""A model whose layers are hard to shard."""

from __future__ import annotations

MODEL = {
    "model.language_model.config.model_type": "qwen3",
    "model.language_model.config.head_dim": 8,
    "model.language_model.config.tie_word_embeddings": True,
    "model.tower.config.model_type": "clip_vision_model",
    "model.tokenizer": "train:301",
    "model.freeze": [],
    "features.cache": "off",
}
