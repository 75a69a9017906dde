"""Adapters of every type of family hf, with the default freeze: PEFT and the evaluation load what was trained, or the
run is refused before it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig

from tests.support.hf.kinds import INSTALLED
from tests.support.hf.publish import model_section, publish, tokenizer_of
from tests.support.short_form import chosen
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import parse_run_config
from vlmpipe.pipelines.check import check_run
from vlmpipe.trainer.checkpoint.export.hf_export import Merged
from vlmpipe.trainer.checkpoint.export.opened_export import require_opens
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.checkpoint.export.weight_reader import WeightReader
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.data.chat.added_tokens import trained_tokens
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf_native.peft_folder import SETTINGS, WEIGHTS, write_adapter
from vlmpipe.trainer.models.layers.lora import rows_in, train_rows_only, without_adapters
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage

LORA: dict[str, Any] = {"freeze": ["tower"], "lora": {"rank": 2, "export": "adapter"}}  # the projector is trained whole
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# What PEFT has no place for, the way out that the error names, and that way out: a parameter beside frozen modules, and
# layers that PEFT takes for experts.
NEWLINE = ("no adapter folder can hold it", "'*image_newline'", {"freeze_parameters": ["*image_newline"]})
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llava_next": NEWLINE,
    "llava_onevision": NEWLINE,
    "glm4v_moe": ("PEFT adapts other layers", ", ".join(ATTENTION), {"lora": LORA["lora"] | {"targets": ATTENTION}}),
}
NOT_TRAINED = "paligemma"  # texts are not causal
SAMPLING = {"do_sample": True, "temperature": 0.5, "top_p": 0.8, "repetition_penalty": 1.05}
SHORT = ("gemma3", "llava_next")  # a parameter in a projector with a module beside it, a refused type
TYPES = chosen({name: name for name in INSTALLED if name != NOT_TRAINED}, lambda name: name in SHORT)


def trained(config: ModelConfig, tokenizer: Any) -> nn.Module:
    """The model whose trained weights have changed."""
    model = family_of(config).build(config, tokenizer)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def expected_weights(config: ModelConfig, model: nn.Module, tokenizer: Any) -> dict[str, Tensor]:
    """The base with what was trained, as a merged export has it."""
    family, plain, state = family_of(config), without_adapters(config), model.state_dict()
    blueprint = family.blueprint(plain, tokenizer)
    trained = WeightReader(state.keys(), state.__getitem__)
    weights = Merged(model, trained, family.initial_weights(config, tokenizer))
    return {name: weights.read(name) for name in blueprint.state_dict()}


@pytest.mark.parametrize("model_type", TYPES)
def test_an_adapter_with_the_default_freeze_is_loaded_whole_or_refused(model_type: str, tmp_path: Path) -> None:
    base, tokenizer, changes = publish(model_type, tmp_path / "base"), tokenizer_of(model_type), LORA
    published = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(published | SAMPLING))
    if model_type in REFUSED:
        sentence, way_out, other = REFUSED[model_type]
        refused = ModelConfig.model_validate(model_section(base, **changes))
        with torch.device("meta"), pytest.raises(ConfigError, match=sentence) as caught:
            family_of(refused).skeleton(refused, vocabulary=len(tokenizer))
        assert way_out in caught.value.fix
        changes = LORA | other
    config = ModelConfig.model_validate(model_section(base, **changes))
    model, folder = trained(config, tokenizer), tmp_path / "export"
    folder.mkdir()
    write_adapter(model, config, model.state_dict().__getitem__, folder)
    save_settings(family_of(config), config, model, tokenizer, folder)
    (tmp_path / "opened").mkdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    blueprint = family_of(config).blueprint(config, tokenizer)
    require_opens(open_storage(str(tmp_path)), sizes, blueprint, tmp_path / "opened", is_adapter=True)

    loaded = family_of(config).load(folder)
    found, expected = loaded.state_dict(), expected_weights(config, model, tokenizer)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5, msg=name)
    for generation in (loaded.generation_config, GenerationConfig.from_pretrained(folder)):
        assert {name: getattr(generation, name) for name in SAMPLING} == SAMPLING  # type: ignore[union-attr]


ROWS = chosen(
    {name: name for name in INSTALLED if name not in (NOT_TRAINED, "glm4v_moe")},
    lambda name: name == "gemma3",  # whose head is tied
)


@pytest.mark.parametrize("model_type", ROWS)
def test_rows_of_tokens_are_in_an_adapter_and_in_a_merged_export(model_type: str, tmp_path: Path) -> None:
    base, tokenizer, token = publish(model_type, tmp_path / "base"), tokenizer_of(model_type), 3
    rows = {"freeze": ["tower", "projector"], "lora": {"rank": 2, "export": "adapter", "train_tokens": ["<|turn|>"]}}
    config = ModelConfig.model_validate(model_section(base, **rows))
    assert trained_tokens(config, tokenizer) == [token]
    model, blueprint = family_of(config).build(config, tokenizer), family_of(config).blueprint(config, tokenizer)
    for each in (model, blueprint):
        train_rows_only(each, [token])
    with torch.no_grad():
        for name in rows_in(model):
            model.get_parameter(name)[token] += 0.1
    folder, opened = tmp_path / "export", tmp_path / "opened"
    folder.mkdir()
    opened.mkdir()
    write_adapter(blueprint, config, lambda name: model.state_dict()[name].clone(), folder)
    save_settings(family_of(config), config, blueprint, tokenizer, folder)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    require_opens(open_storage(str(tmp_path)), sizes, blueprint, opened, is_adapter=True)

    loaded, merged = family_of(config).load(folder).state_dict(), expected_weights(config, model, tokenizer)
    assert loaded.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(loaded[name], weight, rtol=1e-5, atol=1e-5, msg=name)
    for name in (*rows_in(model), "lm_head.weight"):
        assert merged[name].equal(model.state_dict()[name]), name


def test_an_adapter_beside_a_tied_embedding_is_written_from_averages(tmp_path: Path) -> None:
    """Averages hold a tied head under the embedding's name alone."""
    base, tokenizer, folder = publish("gemma3", tmp_path / "base"), tokenizer_of("gemma3"), tmp_path / "export"
    changes = LORA | {"train_parameters": ["*embed_tokens*"]}
    config = ModelConfig.model_validate(model_section(base, **changes))
    model, blueprint = trained(config, tokenizer), family_of(config).blueprint(config, tokenizer)
    averages = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    reader = WeightReader(averages.keys(), lambda name: averages[name].clone())
    weights = Merged(blueprint, reader, family_of(config).initial_weights(config, tokenizer))
    write_adapter(blueprint, config, weights.read_trained, folder)
    assert "base_model.model.lm_head.weight" in load_file(folder / WEIGHTS)
    save_settings(family_of(config), config, blueprint, tokenizer, folder)
    found = family_of(config).load(folder).state_dict()
    for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        assert found[name].equal(model.state_dict()[name])


def test_adapters_in_a_clip_encoder_have_the_names_of_both_releases_of_transformers(tmp_path: Path) -> None:
    """`make test-whole` lets transformers 4.57 read them. Training starts from such a folder too."""
    base, tokenizer = publish("llava", tmp_path / "base"), tokenizer_of("llava")
    lora = {"rank": 2, "export": "adapter", "parts": ["tower"]}
    frozen = ["projector", "language_model"]
    config = ModelConfig.model_validate(model_section(base, freeze=frozen, lora=lora))
    model, folder = trained(config, tokenizer), tmp_path / "export"
    write_adapter(model, config, model.state_dict().__getitem__, folder)
    save_settings(family_of(config), config, model, tokenizer, folder)
    tensors, targets = load_file(folder / WEIGHTS), json.loads((folder / SETTINGS).read_text())["target_modules"]
    older = [name for name in tensors if ".vision_tower.vision_model." in name]
    assert len(older) == len(tensors) / 2 > 0
    for name in older:
        assert torch.equal(tensors[name], tensors[name.replace(".vision_model.", ".")])
    assert sum(".vision_model." in name for name in targets) == len(targets) / 2
    found, expected = family_of(config).load(folder).state_dict(), expected_weights(config, model, tokenizer)
    assert all(torch.allclose(found[name], weight, rtol=1e-5, atol=1e-5) for name, weight in expected.items())
    (tmp_path / "opened").mkdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    blueprint = family_of(config).blueprint(config, tokenizer)
    require_opens(open_storage(str(tmp_path)), sizes, blueprint, tmp_path / "opened", is_adapter=True)
    started = ModelConfig.model_validate(model_section(base, freeze=frozen, lora=lora | {"pretrained": str(folder)}))
    built = family_of(started).build(started, tokenizer)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in built.state_dict().items())


def test_check_refuses_what_no_adapter_folder_can_hold(tmp_path: Path) -> None:
    section = model_section(publish("llava_next", tmp_path), **LORA)
    found = check_run(parse_run_config(merged(TINY, {}) | {"model": section}, "run.yaml"))
    assert [one.subject for one in found if "no adapter folder can hold it" in one.text and one.state == "failed"]


def test_a_checkpoint_with_adapters_of_other_layers_is_not_exported() -> None:
    """Their part of what was learned would be left out in silence: an earlier default adapted gates too."""
    model = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    reader = WeightReader({"0.lora_A.default.weight"}, lambda _: torch.empty(0))
    with pytest.raises(ConfigError, match=r"1 matrices of adapters that the model lacks, for example 0\.lora_A"):
        Merged(model, reader, reader)
