"""A run's chat: the template that the run file names, beside a published tokenizer that stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError

from tests.support.trainer.chat_templates import END, IMAGE, PLAIN, TEMPLATES, with_template
from tests.support.trainer.tiny_native import model_section
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.run_chat import format_identity, make_chat, native_template
from vlmpipe.trainer.data.sample import Turn
from vlmpipe.trainer.data.tokenize import pretrained_tokenizer
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage.local import LocalStorage


def published(folder: Path, template: str | None = PLAIN, **tokens: Any) -> ModelConfig:
    """A model with this folder's tokenizer, as a hub repository has it."""
    with_template(template or "", **tokens).save_pretrained(folder)
    if template is None:
        (folder / "chat_template.jinja").unlink()
    return ModelConfig.model_validate(model_section("qwen2_5_vl", tokenizer=str(folder)))


def data(**changes: Any) -> DataConfig:
    return DataConfig.model_validate(
        {"source": "builtin:digits", "sequence_length": 64, "chat_template": "native"} | changes
    )


def test_pretrained_models_use_their_own_template_by_default() -> None:
    random = ModelConfig.model_validate(model_section("qwen2_5_vl"))
    trained = ModelConfig.model_validate(model_section("qwen2_5_vl", pretrained={"weights": "any/where"}))
    weights = trained.model_copy(update={"tokenizer": "any/where"})
    formats = [data(chat_template="").chat_format(one) for one in (random, trained, weights)]
    assert formats == ["vlmpipe", "vlmpipe", "native"]
    assert data(chat_template="vlmpipe").chat_format(weights) == "vlmpipe"


def test_a_published_tokenizer_and_its_template_stay_as_they_are(tmp_path: Path) -> None:
    model = published(tmp_path / "published")
    before = with_template(PLAIN)
    chat = make_chat(model, data(), ())
    chat.save(tmp_path / "prepared" / "tokenizer")
    after = Chat.load(LocalStorage(tmp_path / "prepared"), chat.form).tokenizer
    for found in (chat.tokenizer, after):
        assert found.chat_template == PLAIN and len(found) == len(before)
        assert json.loads(found.backend_tokenizer.to_str()) == json.loads(before.backend_tokenizer.to_str())
    assert chat.placeholder == IMAGE and chat.end_tokens == (END,)


def test_answers_also_end_where_the_published_model_stops(tmp_path: Path) -> None:
    published(tmp_path)
    tokenizer = with_template(PLAIN)
    stops = tokenizer.convert_tokens_to_ids(["<|turn|>", END])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    weights = {"weights": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(model_section("qwen2_5_vl")["pretrained"]["config"]))
    model = ModelConfig.model_validate(model_section("qwen2_5_vl", pretrained=weights, tokenizer=str(tmp_path)))
    assert make_chat(model, data(), ()).end_tokens == (END, "<|turn|>")


def test_a_template_may_come_with_the_processor_or_from_a_file(tmp_path: Path) -> None:
    model = published(tmp_path / "published", None)
    (tmp_path / "published" / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATES["strips"]}))
    assert make_chat(model, data(), ()).template.source == TEMPLATES["strips"]
    file = tmp_path / "my.jinja"
    file.write_text(TEMPLATES["images first"])
    mine = data(chat_template=str(file))
    assert make_chat(model, mine, ()).template.source == TEMPLATES["images first"]
    before = format_identity(model, mine)
    file.write_text(TEMPLATES["strips"])
    assert format_identity(model, mine) != before, "prepared data is not that of the file before"


def test_a_template_without_images_gets_their_marks_as_text(tmp_path: Path) -> None:
    llava = {
        "tower": {"config": {"model_type": "siglip_vision_model"}},
        "language_model": {"config": {"model_type": "qwen2"}},
        "tokenizer": str(tmp_path),
        "image_size": 16,
    }
    published(tmp_path, TEMPLATES["text only"])
    chat = make_chat(ModelConfig.model_validate(llava), data(), ())
    assert chat.as_text


def test_an_export_of_a_model_trained_from_scratch_keeps_its_format(tmp_path: Path) -> None:
    first = make_chat(ModelConfig.model_validate(model_section("qwen2_5_vl")), data(chat_template=""), ["a b"])
    first.tokenizer.save_pretrained(tmp_path)
    again = make_chat(ModelConfig.model_validate(model_section("qwen2_5_vl", tokenizer=str(tmp_path))), data(), ())
    turns = [Turn("<image>what?", "7", system="Be brief."), Turn("and <image>\n\n?", "8")]
    sizes = [(40, 24), (24, 24)]
    assert again.encode(turns, [15, 9], sizes) == first.encode(turns, [15, 9], sizes)


@pytest.mark.parametrize(
    ("template", "settings", "sentence"),
    [
        (None, {}, "has no chat template"),
        (PLAIN, {"answer_end": "nothing"}, "data.answer_end 'nothing' is no token"),
        (PLAIN, {"chat_template": "missing.jinja"}, "data.chat_template 'missing.jinja' is no file"),
        (TEMPLATES["repeats"], {}, "repeats the text of question 1"),
        (TEMPLATES["not Jinja"], {}, "is no valid Jinja"),
        (TEMPLATES["no end token"], {}, "writes no end token after the text of answer 1"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    tmp_path: Path, template: str | None, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_chat(published(tmp_path, template), data(**settings), ())


def test_a_tokenizer_without_the_models_image_token_is_refused(tmp_path: Path) -> None:
    tokenizer = with_template(PLAIN, image="<picture>")
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("image_token", None), settings.pop("extra_special_tokens", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = ModelConfig.model_validate(model_section("qwen2_5_vl", tokenizer=str(tmp_path)))
    with pytest.raises(ConfigError, match="lacks <image>"):
        make_chat(model, data(), ())


def test_a_trained_tokenizer_has_no_template_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer is train:300, which has no template"):
        make_chat(ModelConfig.model_validate(model_section("qwen2_5_vl")), data(), ())


def test_a_tokenizer_has_the_revision_of_weights_from_the_same_address() -> None:
    def revision_of(**changes: Any) -> str:
        section = model_section("qwen2_5_vl", pretrained={"weights": "org/model", "revision": "abc"}, **changes)
        return ModelConfig.model_validate(section).tokenizer_source.revision

    assert revision_of(tokenizer="org/model") == "abc"
    assert revision_of(tokenizer="org/model", tokenizer_revision="def") == "def"
    assert revision_of(tokenizer="org/other") == ""
    with pytest.raises(ValueError, match="tokenizer_revision does not apply to tokenizer train:300"):
        revision_of(tokenizer="train:300", tokenizer_revision="def")


def test_tokenizer_and_template_are_read_at_the_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []
    with_template(PLAIN).save_pretrained(tmp_path)

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(tmp_path)

    def hf_hub_download(name: str, file: str, **options: Any) -> str:
        asked.append((f"{name}/{file}", options["revision"]))
        raise EntryNotFoundError

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    source = WeightsConfig(weights="org/model", revision="abc", config={})
    native_template(source, pretrained_tokenizer(source.weights, source.revision))
    assert asked == [("org/model", "abc"), ("org/model/chat_template.json", "abc")]
