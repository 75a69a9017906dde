"""An export is opened as another program would, and each way in which it would not open ends the step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.hf.publish import model_section, publish, tokenizer_of
from vlmpipe.trainer.checkpoint.export.opened_export import require_opens
from vlmpipe.trainer.checkpoint.export.safetensors_writer import write_weights
from vlmpipe.trainer.checkpoint.export.settings_files import save_settings
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.models.hf_native.peft_folder import write_adapter
from vlmpipe.trainer.models.registry import family_of
from vlmpipe.trainer.storage import open_storage

LORA = {"freeze": ["tower"], "lora": {"rank": 2, "export": "adapter"}}
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def blueprint(model_type: str, base: Path, **changes: Any) -> tuple[ModelConfig, nn.Module]:
    config = ModelConfig.model_validate(model_section(base, **changes))
    return config, family_of(config).blueprint(config, tokenizer_of(model_type))


def exported(model_type: str, root: Path, *, max_shard_bytes: int = 1 << 30) -> tuple[nn.Module, Path]:
    config, model = blueprint(model_type, publish(model_type, root / "base"))
    tokenizer, folder = tokenizer_of(model_type), root / "export"
    folder.mkdir()
    read = family_of(config).initial_weights(config, tokenizer).read
    write_weights(model, read, folder, max_shard_bytes=max_shard_bytes)
    save_settings(family_of(config), config, model, tokenizer, folder)
    return model, folder


def adapter(model_type: str, root: Path) -> tuple[nn.Module, Path]:
    config, model = blueprint(model_type, publish(model_type, root / "base"), **LORA)
    folder = root / "export"
    folder.mkdir()
    write_adapter(model, config, lambda name: torch.zeros(model.get_parameter(name).shape), folder)
    save_settings(family_of(config), config, model, tokenizer_of(model_type), folder)
    return model, folder


def open_it(model: nn.Module, folder: Path, *, is_adapter: bool = False) -> None:
    scratch = folder.parent / "opened"
    scratch.mkdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    require_opens(open_storage(str(folder.parent)), sizes, model, scratch, is_adapter=is_adapter)


def change_weights(change: Callable[[dict[str, torch.Tensor]], None], file: str = WEIGHTS) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, {"format": "pt"})

    return changed


def change_settings(file: str, **content: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | content))

    return changed


def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    """What transformers itself writes of a model that was built from its configuration."""
    for name in [name for name in tensors if ".vision_model." in name]:
        tensors[name.replace(".vision_model.", ".")] = tensors.pop(name)


def in_other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["multi_modal_projector.linear_1.weight"] = tensors["multi_modal_projector.linear_1.weight"].T.contiguous()


def in_bf16(tensors: dict[str, torch.Tensor]) -> None:
    tensors["multi_modal_projector.linear_1.bias"] = tensors["multi_modal_projector.linear_1.bias"].bfloat16()


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4])


def of_noise(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 64)


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "names of another release": (change_weights(without_prefix), "lacks 39 tensors of the published model"),
    "an additional tensor": (
        change_weights(lambda tensors: tensors.update(more=torch.zeros(1))), "1 tensors that the published model lacks",
    ),
    "another shape": (change_weights(in_other_shape), "linear_1.weight as"),
    "another dtype": (change_weights(in_bf16), "of torch.bfloat16 instead of"),
    "a cut file": (cut, "whose header describes"),
    "noise": (of_noise, "whose header would end at"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "a config.json that is no JSON"),
    "another vocabulary": (change_settings("config.json", model_type="nothing"), "does not open: .*nothing"),
    "another model": (change_settings("config.json", model_type="idefics3"), "does not open"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "does not open"),
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen3_vl_moe"])
def test_an_export_opens(model_type: str, tmp_path: Path) -> None:
    open_it(*exported(model_type, tmp_path, max_shard_bytes=20_000))


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_export_ends_the_step_with_its_own_code(how: str, tmp_path: Path) -> None:
    change, sentence = WRONG[how]
    model, folder = exported("llava", tmp_path)
    change(folder)
    with pytest.raises(UserError, match=sentence) as caught:
        open_it(model, folder)
    assert caught.value.code == ExitCode.BAD_EXPORT


def test_an_index_that_points_elsewhere_is_found(tmp_path: Path) -> None:
    model, folder = exported("llava", tmp_path, max_shard_bytes=20_000)
    index = folder / f"{WEIGHTS}.index.json"
    content = json.loads(index.read_text())
    names = sorted(content["weight_map"])
    content["weight_map"][names[0]] = content["weight_map"][names[-1]]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="places tensors in other files"):
        open_it(model, folder)
    index.unlink()
    (folder.parent / "opened" / index.name).unlink()
    (folder.parent / "opened").rename(folder.parent / "before")
    with pytest.raises(UserError, match="files with weights and no"):
        open_it(model, folder)


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen2_5_vl"])
def test_an_adapter_opens_on_its_base_without_weights_in_memory(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3's projector is a parameter and a module beside it: PEFT saves them as one.

    The base has no memory: of 32 billion parameters it would be twice the step's machine.
    """
    import peft

    given: list[nn.Module] = []
    get_peft_model = peft.get_peft_model

    def get(base: nn.Module, *arguments: Any, **named: Any) -> Any:
        given.append(base)
        return get_peft_model(base, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(peft, "get_peft_model", get)
    open_it(*adapter(model_type, tmp_path), is_adapter=True)
    assert [parameter.device.type for parameter in given[0].parameters() if not parameter.is_meta] == []


def test_an_adapter_that_peft_would_not_find_whole_ends_the_step(tmp_path: Path) -> None:
    model, folder = adapter("llava", tmp_path)
    settings = json.loads((folder / "adapter_config.json").read_text())
    change_settings("adapter_config.json", target_modules=settings["target_modules"][1:])(folder)
    with pytest.raises(UserError, match="does not open whole") as caught:
        open_it(model, folder, is_adapter=True)
    assert caught.value.code == ExitCode.BAD_EXPORT


@pytest.mark.parametrize("model_type", ["llava_next", "llava_onevision"])
def test_a_trained_parameter_beside_frozen_modules_is_refused_before_training(model_type: str, tmp_path: Path) -> None:
    base = publish(model_type, tmp_path / "base")
    with pytest.raises(ConfigError, match=r"image_newline is trained, .*\n.*\n.*'\*image_newline'"):
        blueprint(model_type, base, **LORA)
    _, model = blueprint(model_type, base, freeze_parameters=["*image_newline"], **LORA)
    assert not model.get_parameter("model.image_newline").requires_grad
    blueprint(model_type, base, freeze=["tower"], lora={"rank": 2, "export": "merged"})
