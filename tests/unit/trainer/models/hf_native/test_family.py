"""Exported settings of native models: tokenizer, template and generation are the published model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoImageProcessor, AutoTokenizer, GenerationConfig

from tests.support.trainer.chat_templates import PLAIN, with_template
from tests.support.trainer.processors import Processor
from tests.support.trainer.tiny_native import CONFIGS, model_section
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import IMAGE_PAD, IMAGE_TOKEN, ModelConfig
from vlmpipe.trainer.data.chat.messages import messages_of
from vlmpipe.trainer.data.chat.run_chat import make_chat
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import control_tokens
from vlmpipe.trainer.models.image_tokens import image_form_of, image_tokens_of
from vlmpipe.trainer.models.registry import family_of

SIZE = (40, 24)
SAMPLING = {"do_sample": True, "temperature": 0.5, "top_p": 0.8, "repetition_penalty": 1.05}


def published(folder: Path, family: str) -> ModelConfig:
    """A run file's model that starts from a folder with the files of a published one, but for weights."""
    model = ModelConfig.model_validate(model_section(family))
    tokenizer = with_template(PLAIN.replace(IMAGE_PAD, model.image_token), image=model.image_token)
    around = control_tokens(image_form_of(model))
    tokenizer.add_special_tokens({"extra_special_tokens": around}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    stops = tokenizer.convert_tokens_to_ids(["<|turn|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops, **SAMPLING}))
    family_of(model).image_processor(model).save_pretrained(folder)
    weights = {"pretrained": {"weights": str(folder)}, "tokenizer": str(folder)}
    return ModelConfig.model_validate(model_section(family, **weights))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_an_export_asks_as_training_did(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = published(tmp_path / "published", family)
    chat = make_chat(model, DataConfig(source="builtin:digits", sequence_length=64), ())
    random = ModelConfig.model_validate(model_section(family))
    made = family_of(model).blueprint(random, chat.tokenizer)
    folder = tmp_path / "export"
    folder.mkdir()
    save_settings(family_of(model), model, made, chat.tokenizer, folder)
    tokenizer, images = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    assert tokenizer.chat_template == chat.template.source
    settings = json.loads(file.read_text()) if (file := folder / "processor_config.json").exists() else {}
    tile_tokens = settings.get("image_seq_len", 0)
    processor = Processor.of(family, images, tokenizer, monkeypatch, tile_tokens=tile_tokens)
    turn = Turn(f"{IMAGE_TOKEN}\nWhat is this?", "", system="Be brief.")
    ids = processor.ids(messages_of([turn]), [SIZE], add_generation_prompt=True)
    assert ids == chat.prompt(turn, [image_tokens_of(random)(*SIZE)], [SIZE])
    stops = GenerationConfig.from_pretrained(folder)
    assert set(stops.eos_token_id) == set(tokenizer.convert_tokens_to_ids(["<|end|>", "<|turn|>"]))
    assert {name: getattr(stops, name) for name in SAMPLING} == SAMPLING, "as people were used to from the model"
