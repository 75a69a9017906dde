"""The section deploy: vLLM's arguments, and what no endpoint can serve."""

from __future__ import annotations

import json

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.run_fields import RunFields
from vlmpipe.config.sections.deploy import DeployConfig
from vlmpipe.config.serving_container import arguments_of, container_of
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.serving import unservable
from vlmpipe.trainer.errors import ConfigError, ExitCode

DIGITS, LORA = ROOT / "configs/digits.yaml", ROOT / "configs/qwen2-5-vl-3b-lora.yaml"
TAG = "us-docker.pkg.dev/my-project/serving/vllm:1"
IMAGE = f"us-docker.pkg.dev/my-project/serving/vllm@sha256:{'1' * 64}"
ADAPTER = {
    "deploy.endpoint": "qwen",
    "deploy.image_uri": IMAGE,
    "model.lora.export": "adapter",
    "model.lora.rank": "20",
    "model.freeze": "[tower, projector]",
}


def config(*overrides: str) -> RunConfig:
    return load_run_file(DIGITS, ["deploy.endpoint=digits", f"deploy.image_uri={IMAGE}", *overrides])


def adapter(*overrides: str) -> RunConfig:
    changes = ADAPTER | dict(one.split("=", 1) for one in overrides)
    return load_run_file(LORA, [f"{key}={value}" for key, value in changes.items()])


def refused(*overrides: str) -> str:
    """What is said of a run with an adapter and these settings."""
    with pytest.raises(ConfigError) as caught:
        adapter(*overrides)
    return caught.value.text()


def test_a_whole_model_is_served_in_the_precision_of_its_evaluation() -> None:
    container = container_of(config("deploy.args=[--max-model-len=512]"))
    assert container.image_uri == IMAGE
    assert container.args[0] == "{model_uri}", "vllm serve takes the model as its first argument"
    assert {"--served-model-name=digits", "--dtype=float32", "--max-model-len=512"} <= {*container.args}
    assert '--mm-processor-kwargs={"use_fast": false}' in container.args, "images are resized as in training"
    assert "--model" not in " ".join(container.args).replace("--served-model", "")


def test_a_served_model_finds_the_driver_and_has_memory_and_time_as_googles_deployments_of_vllm() -> None:
    container = container_of(config())
    assert container.env == {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"}
    assert (container.shared_memory_size_mb, container.deployment_timeout_s) == (16384, 7200)


def test_the_environment_of_a_served_model_is_the_users() -> None:
    env = "deploy.env={LD_LIBRARY_PATH: /own, VLLM_LOGGING_LEVEL: DEBUG}"
    assert container_of(config(env)).env == {"LD_LIBRARY_PATH": "/own", "VLLM_LOGGING_LEVEL": "DEBUG"}


def test_more_time_than_vertex_ai_allows_is_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 7200"):
        DeployConfig(endpoint="digits", deployment_timeout_s=7201)


def test_more_shared_memory_than_the_machine_has_is_refused_by_check_and_plan() -> None:
    small = config("deploy.machine_type=g2-standard-4")  # 16 GiB
    failed = [one for one in check_run(small) if one.subject == "deploy"]
    assert [(one.state, one.code) for one in failed] == [("failed", ExitCode.CONFIG)]
    assert failed[0].text in plan_run(small).errors
    smaller = ["deploy.machine_type=g2-standard-4", "deploy.shared_memory_size_mb=4096"]
    for changes in (smaller, ["deploy.machine_type=g2-standard-8"], ["deploy.machine_type=new-1"]):
        assert unservable(config(*changes)) == ()


def test_a_container_of_ones_own_is_taken_as_it_is() -> None:
    serving = [f"register.serving.image_uri={IMAGE}", "register.serving.args=[a]"]
    own = load_run_file(DIGITS, ["deploy.endpoint=digits", *serving])
    assert container_of(own).args == ("a",)
    with pytest.raises(ConfigError, match=r"deploy\.image_uri"):
        config(f"register.serving.image_uri={IMAGE}")


@pytest.mark.parametrize("image", ["vllm:1", "vllm:latest", "vllm"])
def test_an_image_without_a_digest_is_refused(image: str) -> None:
    for field in ("deploy.image_uri", "register.serving.image_uri"):
        with pytest.raises(ConfigError, match=rf"{field}: found \S+, a tag|register.serving.image_uri") as caught:
            load_run_file(DIGITS, ["deploy.endpoint=digits", f"{field}=us-docker.pkg.dev/p/r/{image}"])
        assert "@sha256:..." in caught.value.text() or image == "vllm"


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ('-kwargs={"max_pixels": 3136}', False),
        ('-kwargs={"use_fast": true}', False),
        ('_kwargs={"use_fast": true}', False),
        ("-kwargs.use_fast=true", False),
        ("-kwargs=nothing", False),
        ('-kwargs={"use_fast": false, "a": 1}', True),
    ],
)
def test_settings_of_images_that_would_choose_another_library_are_refused(value: str, fits: bool) -> None:
    argument = "deploy.args=" + json.dumps([f"--mm-processor{value}"])
    if fits:
        assert container_of(config(argument)).args[-1].endswith(value)
        return
    with pytest.raises(ConfigError, match=r'deploy\.args: .* expected "use_fast": false in it'):
        config(argument)


def test_a_tokenizer_without_what_vllm_looks_up_is_refused() -> None:
    whole = {"deploy.endpoint": "qwen", "deploy.image_uri": IMAGE, "model.lora": "null", "model.tokenizer": "train:400"}
    with pytest.raises(ConfigError, match=r"model\.tokenizer: found train:400 .* lacks <\|video_pad\|>"):
        load_run_file(LORA, [f"{key}={value}" for key, value in whole.items()])
    load_run_file(LORA, [f"{key}={value}" for key, value in whole.items() if key != "model.tokenizer"])


def test_an_adapter_is_served_on_its_base_with_its_own_settings() -> None:
    args = arguments_of(adapter("model.pretrained.revision=abc"), "/mnt/models")
    assert args[0] == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert {"--revision=abc", "--enable-lora", "--max-lora-rank=32", "--settings=/mnt/models"} <= {*args}
    assert any(one.startswith("--lora-modules=") and one.endswith("=/mnt/models") for one in args)
    assert "--enable-tower-connector-lora" not in args


@pytest.mark.parametrize(
    ("rank", "value"),
    [(1, 1), (2, 8), (8, 8), (9, 16), (129, 256), (257, 320), (320, 320), (321, 512), (512, 512), (513, None)],
)
def test_a_rank_gets_the_next_that_vllm_takes(rank: int, value: int | None) -> None:
    if value is None:
        assert "513 is more than vLLM 0.32.0 serves, 512" in refused("model.lora.rank=513")
    else:
        assert f"--max-lora-rank={value}" in arguments_of(adapter(f"model.lora.rank={rank}"))


@pytest.mark.parametrize("base", ["gs://bucket/base", "s3://bucket/base"])
def test_a_base_in_a_bucket_is_pinned_by_its_digest(base: str) -> None:
    args = arguments_of(adapter(f"model.pretrained.weights={base}", "model.pretrained.revision=abc0"))
    assert args[0] == base and "--revision=abc0" in args


@pytest.mark.parametrize("base", ["run:digits-1", "/models/qwen", "./qwen", "file:///models/qwen"])
def test_an_adapter_without_a_base_that_a_server_can_load_is_refused(base: str) -> None:
    content = adapter().to_dict()
    content["model"]["pretrained"]["weights"] = base
    with pytest.raises(ConfigError, match="which no server can load"):
        arguments_of(RunFields.model_validate(content))


def test_a_projector_that_is_trained_whole_is_refused_with_ways_out_that_work() -> None:
    """The default of LoRA: only the tower is frozen."""
    said = refused("model.freeze=[tower]")
    assert "model.freeze: found ['tower'] with deploy and model.lora.export adapter: the projector" in said
    assert "expected projector in model.freeze, projector in model.lora.parts, or model.lora.export merged" in said, (
        said
    )
    frozen = arguments_of(adapter("model.freeze=[tower, projector]"))
    adapted = arguments_of(adapter("model.freeze=[tower]", "model.lora.parts=[language_model, projector]"))
    merged = arguments_of(adapter("model.freeze=[tower]", "model.lora.export=merged"), "/mnt/models")
    assert "--enable-tower-connector-lora" in adapted and "--enable-tower-connector-lora" not in frozen
    assert merged[0] == "/mnt/models" and "--enable-lora" not in merged


def test_adapters_in_the_projector_are_no_way_out_where_vllm_does_not_apply_them() -> None:
    llava = ["model.family=llava", "model.image_size=336", "model.min_pixels=null", "model.max_pixels=null"]
    said = refused("model.freeze=[tower]", *llava)
    assert "expected projector in model.freeze, or model.lora.export merged" in said
    assert arguments_of(adapter(*llava))


def test_a_dora_adapter_is_refused_with_ways_out_that_work() -> None:
    assert "expected false, or model.lora.export merged" in refused("model.lora.use_dora=true")
    assert arguments_of(adapter("model.lora.use_dora=true", "model.lora.export=merged"))[0] == "{model_uri}"
    assert "--enable-lora" in arguments_of(adapter("model.lora.use_dora=false"))


def test_an_adapter_without_an_image_is_refused() -> None:
    assert "transformers serve, which a local run asks, puts no adapter" in refused("deploy.image_uri=")


def test_a_model_with_a_relevance_module_is_not_deployed() -> None:
    overrides = ["deploy.endpoint=qwen", f"deploy.image_uri={IMAGE}"]
    with pytest.raises(ConfigError, match=r"deploy: found with model\.relevance.*vlmpipe predict"):
        load_run_file(ROOT / "configs/arr-coc.yaml", overrides)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_replicas": -1}, "greater than or equal to 0"),
        ({"min_replicas": 0, "idle_minutes": 4}, "greater than or equal to 5"),
        ({"min_replicas": 0, "idle_minutes": 481}, "less than or equal to 480"),
        ({"idle_minutes": 30}, "whose replicas never go"),
    ],
)
def test_an_endpoint_that_cannot_sleep_so_is_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DeployConfig.model_validate({"endpoint": "digits", **changes})


def test_an_endpoint_without_a_minimum_sleeps() -> None:
    assert DeployConfig(endpoint="digits", min_replicas=0).sleeps and not DeployConfig(endpoint="digits").sleeps


def test_a_section_that_is_written_out_whole_is_read_again() -> None:
    for deploy in (DeployConfig(endpoint="digits"), DeployConfig(endpoint="digits", min_replicas=0, idle_minutes=5)):
        assert DeployConfig.model_validate(deploy.model_dump()) == deploy


def test_fewer_replicas_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas 2 is more than max_replicas 1"):
        DeployConfig(endpoint="digits", min_replicas=2)
