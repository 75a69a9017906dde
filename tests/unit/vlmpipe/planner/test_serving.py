"""What vLLM cannot serve, known from the model's type and sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.hf.kinds import KINDS
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.config.run_config import RunConfig
from vlmpipe.config.vllm import load_vllm
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.model_architecture import Architecture
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.serving import doubts, served_model, unservable
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.config.weights.origin import PARTS
from vlmpipe.trainer.errors import ExitCode
from vlmpipe.trainer.sizing.model_shape import Part

IMAGE = f"us-docker.pkg.dev/my-project/serving/vllm@sha256:{'1' * 64}"
DEPLOY = {"endpoint": "tiny", "image_uri": IMAGE}


def run(**changes: Any) -> RunConfig:
    """The tiny llava to be deployed: four attention heads, two of keys and values, four in the vision encoder."""
    return RunConfig.model_validate(
        merged(TINY, {"deploy": DEPLOY} | {key.replace("__", "."): changes[key] for key in changes})
    )


def said(**changes: Any) -> tuple[str, ...]:
    config = run(**changes)
    return unservable(config, served_model(config))


def published(folder: Path, config: dict[str, Any], **changes: Any) -> tuple[RunConfig, Architecture]:
    """A run with adapters on a model of which only the configuration is there; sizes are those of the tiny llava."""
    (folder / "config.json").write_text(json.dumps(config))
    lora = {"rank": 4, "export": "adapter"} | changes
    model = {"family": "hf", "pretrained": {"weights": str(folder)}, "tokenizer": str(folder), "lora": lora}
    model["freeze"] = [part for part in PARTS if part not in lora.get("parts", ["language_model"])]
    shape = replace(served_model(run()).shape, frozen=frozenset(get_args(Part)))
    section = ModelConfig.model_validate(model)
    config_of_run = run().model_copy(update={"model": section})
    return config_of_run, Architecture(section, shape, "")


def test_check_says_what_an_endpoint_that_sleeps_does_to_questions() -> None:
    def warned(**changes: Any) -> list[str]:
        found = check_run(run(**changes))
        return [one.text for one in found if (one.subject, one.state) == ("deploy", "warning")]

    asleep = warned(deploy__min_replicas=0)
    assert [text for text in asleep if "deploy.min_replicas is 0: after a pause, questions wait or are refused" in text]
    assert not [text for text in warned() if "min_replicas" in text]


def test_a_tiny_llava_is_served() -> None:
    assert said() == ()


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, None), (2, None), (4, None),  # four GPUs have each key-value head twice
        (3, "accelerator_count 3 does not divide the 4 attention heads of the language model"),
        (8, "accelerator_count 8 does not divide the 4 attention heads of the language model"),
    ],
)  # fmt: skip
def test_gpus_must_divide_the_heads(gpus: int, expected: str | None) -> None:
    found = said(deploy__accelerator_count=gpus)
    assert len(found) == bool(expected)
    if expected:
        assert expected in found[0]
        remedy = int(found[0].rpartition("use ")[2])
        assert remedy < gpus and said(deploy__accelerator_count=remedy) == ()


def test_gpus_must_divide_the_vision_encoders_heads_unless_each_has_it_whole() -> None:
    three = {"model__tower__config__num_attention_heads": 2, "deploy__accelerator_count": 4}
    assert "does not divide the 2 heads of the vision encoder" in said(**three)[0]
    assert said(**three, deploy__args=["--mm-encoder-tp-mode=data"]) == ()


def test_bf16_needs_a_gpu_that_has_it() -> None:
    on_t4 = {"deploy__accelerator_type": "NVIDIA_TESLA_T4", "train__precision": "bf16"}
    (text,) = said(**on_t4)
    assert "NVIDIA_TESLA_T4 has compute capability 7.5" in text and "NVIDIA_L4" in text
    assert said(**on_t4 | {"deploy__accelerator_type": "NVIDIA_L4"}) == ()
    assert said(**on_t4 | {"train__precision": "fp32"}) == ()


def test_a_llava_with_another_vision_encoder_is_refused_by_check_and_plan() -> None:
    dinov2 = {
        "model__tower": {
            "config": {
                "model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                "patch_size": 8, "image_size": 32,
            }
        }
    }  # fmt: skip
    config = run(**dinov2)
    failed = [one for one in check_run(config) if one.subject == "deploy" and one.state == "failed"]
    assert [one.code for one in failed] == [ExitCode.CONFIG]
    assert "opens no LLaVA with a dinov2 as vision encoder" in failed[0].text and "vlmpipe serve" in failed[0].text
    assert failed[0].text in plan_run(config).errors


@pytest.mark.parametrize(("model_type", "parts", "expected"), [
    ("qwen2_5_vl", ["language_model", "tower", "projector"], None),
    ("qwen3_vl", ["tower"], None),
    ("internvl", ["language_model"], None),
    ("llava_next", ["language_model", "projector"], None),
    ("llava_next", ["tower"], "in the tower of llava_next"),
    ("internvl", ["language_model", "projector"], "export to merged, or model.lora.parts to ['language_model']"),
    ("llava", ["tower"], "not known to apply adapters in the tower of llava"),
    ("llava_onevision", ["language_model"], "in the language model of llava_onevision"),
])  # fmt: skip
def test_adapters_that_vllm_would_leave_out_are_refused(
    model_type: str, parts: list[str], expected: str | None, tmp_path: Path
) -> None:
    config, model = published(tmp_path, {"model_type": model_type}, parts=parts)
    found = unservable(config, model)
    assert bool(found) == bool(expected)
    assert expected is None or expected in found[0]
    assert not [text for text in doubts(config, model) if "not known to open" in text]


def test_a_type_without_an_implementation_in_vllm_is_refused_with_what_opens_it(tmp_path: Path) -> None:
    config, model = published(tmp_path, {"model_type": "vipllava"}, export="merged")
    (text,) = unservable(config, model)
    assert "has no implementation of vipllava" in text and "use vlmpipe serve" in text


def test_a_type_that_nobody_tried_is_a_doubt(tmp_path: Path) -> None:
    config, model = published(tmp_path, {"model_type": "brand_new"}, export="merged")
    assert unservable(config, model) == ()
    (text,) = doubts(config, model)
    assert "is not known to open brand_new" in text and "vlmpipe serve" in text


def test_weights_that_a_pattern_thaws_beside_an_adapter_are_refused(tmp_path: Path) -> None:
    config, model = published(tmp_path, {"model_type": "qwen2_5_vl"})
    thawed = replace(model, shape=replace(model.shape, frozen=model.shape.frozen - {"projector"}))
    (text,) = unservable(config, thawed)
    assert "of the projector)" in text and "projector in model.lora.parts, or model.lora.export merged" in text


def test_a_run_here_cannot_deploy_an_adapter(tmp_path: Path) -> None:
    config, model = published(tmp_path, {"model_type": "qwen2_5_vl"})
    assert any("a run on this machine ends at deploy-model" in text for text in doubts(config, model))
    elsewhere = config.model_copy(update={"output": config.output.model_copy(update={"root_uri": "gs://bucket/root"})})
    assert list(doubts(elsewhere, model)) == []


def test_a_base_for_which_the_hub_may_ask_a_token_is_a_doubt(tmp_path: Path) -> None:
    config, model = published(tmp_path, {"model_type": "qwen2_5_vl"})
    secret = {"hub_token_secret": "projects/p/secrets/hub"}
    gated = config.model_copy(update={"model": config.model.model_copy(update=secret)})
    assert any("without model.hub_token_secret" in text for text in doubts(gated, model))
    base = {"pretrained": config.model.pretrained.model_copy(update={"weights": "gs://bucket/base"})}
    copied = gated.model_copy(update={"model": gated.model.model_copy(update=base)})
    assert not any("hub_token_secret" in text for text in doubts(copied, model))


@pytest.mark.parametrize(("model_type", "is_tried"), [("qwen3_vl", True), ("qwen3_5", False)])
def test_adapters_of_a_type_that_was_not_tried_are_a_doubt(model_type: str, is_tried: bool, tmp_path: Path) -> None:
    config, model = published(tmp_path, {"model_type": model_type})
    found = [text for text in doubts(config, model) if "were not tried" in text]
    assert bool(found) != is_tried


def test_a_model_whose_sizes_are_not_known_is_a_doubt() -> None:
    assert any("is not known" in text for text in doubts(run(), None))


def test_ones_own_container_is_not_vllm() -> None:
    own = {"image_uri": IMAGE, "args": ["a"]}
    deploy = {"endpoint": "tiny", "accelerator_count": 3}
    assert said(deploy=deploy, register__serving=own, register__registry="vertex://tiny", gcp__project="p") == ()
    assert said(deploy=deploy) == (), "a local run asks transformers serve"


def test_every_known_type_is_in_the_table_and_parts_have_their_names() -> None:
    vllm = load_vllm()
    assert {*KINDS, "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm"} <= vllm.adapters.keys()
    assert all(set(parts) <= set(PARTS) for parts in vllm.adapters.values() if parts)
    elsewhere = {name for name, parts in vllm.adapters.items() if {"tower", "projector"} & {*(parts or ())}}
    assert elsewhere <= {*vllm.tried_adapters} <= vllm.adapters.keys()
    assert list(vllm.lora_ranks) == sorted(vllm.lora_ranks)
