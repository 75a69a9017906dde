"""Small trained and evaluated runs of families that engines serve: their answers differ from question to question.

Heads are as wide as engines' kernels ask for. Random weights are large, so that answers depend on every pixel, and
training is short enough to leave it so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.hf.kinds import VOCABULARY
from tests.support.hf.publish import model_section as published_section
from tests.support.hf.publish import publish, tokenizer_of
from tests.support.trainer import tiny_native
from tests.support.trainer.runs import make_run, run_ranks, train_runs
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.trainer.checkpoint.sync import sync_run
from vlmpipe.trainer.config.job import JobConfig

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 60, 220)}
QUESTIONS = ("what is this?", "what colour, in a word?", "which number is here?")
SPREAD = 0.15  # of random weights
TEXT = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": SPREAD,
}  # fmt: skip
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "initializer_range": SPREAD}
PATCHES = {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 128, "initializer_range": SPREAD}
SECTIONS = {"qwen2_5_vl": [4, 6, 6], "qwen3_vl": [6, 5, 5]}  # of rotary positions: time, height, width
# Types of family hf, and what differs from the others. Gemma's tied embeddings would repeat the last token if they
# were as large as what its layers add to them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 32, "initializer_range": 0.003},
    "internvl": {},
    "llava_next": {},
    "llava_onevision": {},
}
NATIVE = ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm")
SETTINGS: dict[str, Any] = {
    "features.cache": "off",
    "train.epochs": 1,
    "train.global_batch_size": 4,
    "train.optimizer.learning_rate": 2e-5,
    "evaluate": {"max_new_tokens": 20, "batch_questions": 16, "controls": []},
    "register": {"model_name": ""},
    # A machine with CPUs alone. Nothing is compiled, which takes longer than all questions.
    "deploy": {"endpoint": "tiny", "accelerator_count": 0, "args": ["--enforce-eager"]},
}


def write_pictures(folder: Path, samples: int = 72) -> dict[str, Any]:
    """LLaVA records with noisy pictures of several sizes, one or two each, some with a system text. Returns the data
    section that reads them."""
    folder.mkdir(parents=True)
    random, records = np.random.default_rng(0), []
    for number in range(samples):
        names = [f"{number}-{place}.png" for place in range((1, 1, 1, 2)[number % 4])]
        for place, name in enumerate(names):
            width, height = 40 + 23 * (number % 5), 44 + 19 * ((number + place) % 4)
            colour = list(COLOURS.values())[(number + place) % len(COLOURS)]
            slope = np.linspace(-60, 60, width)[None, :, None]
            pixels = np.ones((height, width, 3)) * colour + random.normal(0, 60, (height, width, 3)) + slope
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name)
        question, answer = QUESTIONS[number % 3], f"a {list(COLOURS)[number % 3]} square {number}"
        turns = [{"from": "human", "value": "<image>\n" * len(names) + question}, {"from": "gpt", "value": answer}]
        if number % 5 == 0:
            turns.insert(0, {"from": "system", "value": "answer in few words"})
        records.append({"id": f"s{number:02}", "image": names, "conversations": turns})
    (folder / "records.json").write_text(json.dumps(records))
    return {
        "source": str(folder / "records.json"), "image_folder": str(folder), "sequence_length": 320,
        "shard_samples": 24, "validation_fraction": 0.4,
    }  # fmt: skip


def model_section(name: str, root: Path) -> dict[str, Any]:
    """The model section of a family, or of a type of family hf, which is published under `root` first."""
    if name in PUBLISHED:
        text = TEXT | {"head_dim": 32, "max_position_embeddings": 1024} | PUBLISHED[name]
        return published_section(publish(name, root / "published" / name, text=text, vision=ENCODER))
    if name == "llava":
        parts = {
            "model.tower.config": TINY["model"]["tower"]["config"] | ENCODER,
            "model.language_model.config": TINY["model"]["language_model"]["config"] | TEXT,
            "model.freeze": [],
        }
        return {"family": "llava"} | dict(merged(TINY, parts)["model"])
    config: Mapping[str, Any] = tiny_native.CONFIGS[name]
    text, vision = config["text_config"] | TEXT, config["vision_config"]
    if name in SECTIONS:
        rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS[name]}
        # transformers knows no other way for Qwen3-VL; vLLM asks.
        text |= {"rope_parameters": rotary | ({"mrope_interleaved": True} if name == "qwen3_vl" else {})}
        text |= {"head_dim": 32} if name == "qwen3_vl" else {}
    whole = config | {"text_config": text, "vision_config": vision | (PATCHES if name in SECTIONS else ENCODER)}
    form = "smolvlm" + tiny_native.TILES if name == "smolvlm" else name
    section = tiny_native.model_section(form, pretrained={"config": whole}, freeze=[])
    if name == "qwen2_5_vl":  # vLLM looks for the token of videos, which tokenizers trained here lack
        tokenizer_of(name).save_pretrained(root / "tokenizer")
        section |= {"tokenizer": str(root / "tokenizer")}
        section["pretrained"]["config"]["text_config"]["vocab_size"] = VOCABULARY
    return section


def trained_runs(root: Path, names: Iterable[str], changes: Mapping[str, Any] | None = None) -> dict[str, JobConfig]:
    """Runs that were trained in one process, exported and evaluated, by the name of their model."""
    data = write_pictures(root / "pictures")
    runs = {
        name: make_run(
            root / name, name,
            {"model": model_section(name, root), "data": data, **SETTINGS, "name": name, **(changes or {})},
            features="off",
        )
        for name in names
    }  # fmt: skip
    train_runs(list(runs.values()), processes=1, timeout_s=900)
    for job in runs.values():
        sync_run(job)
        run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    return runs
