"""The section deploy: vLLM's arguments, and what no endpoint can serve."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.paths import ROOT
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.sections.deploy import DeployConfig, arguments_of, container_of
from vlmpipe.pipelines.check import check_run
from vlmpipe.planner.plan import plan_run
from vlmpipe.planner.serving import unservable
from vlmpipe.trainer.errors import ConfigError, ExitCode

DIGITS = ROOT / "configs/digits.yaml"
IMAGE = "us-docker.pkg.dev/my-project/serving/vllm:1"
ADAPTER = [
    "deploy.endpoint=qwen",
    "model.lora.export=adapter",
    "model.lora.rank=20",
    "model.pretrained.revision=",
]


def config(*overrides: str) -> RunConfig:
    return load_run_file(DIGITS, ["deploy.endpoint=digits", f"deploy.image_uri={IMAGE}", *overrides])


def adapter(*overrides: str) -> dict[str, Any]:
    return load_run_file(ROOT / "configs/qwen2-5-vl-3b-lora.yaml", [*ADAPTER, *overrides]).to_dict()


def test_a_whole_model_is_served_in_the_precision_of_its_evaluation() -> None:
    container = container_of(config("deploy.args=[--max-model-len=512]").to_dict())
    assert container.image_uri == IMAGE
    assert {"--model={model_uri}", "--served-model-name=digits", "--dtype=float32", "--max-model-len=512"} <= {
        *container.args
    }


def test_a_served_model_finds_the_driver_and_has_memory_and_time_as_googles_deployments_of_vllm() -> None:
    container = container_of(config().to_dict())
    assert container.env == {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"}
    assert (container.shared_memory_size_mb, container.deployment_timeout_s) == (16384, 7200)


def test_the_environment_of_a_served_model_is_the_users() -> None:
    env = "deploy.env={LD_LIBRARY_PATH: /own, VLLM_LOGGING_LEVEL: DEBUG}"
    assert container_of(config(env).to_dict()).env == {"LD_LIBRARY_PATH": "/own", "VLLM_LOGGING_LEVEL": "DEBUG"}


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
    assert container_of(own.to_dict()).args == ("a",)
    with pytest.raises(ConfigError, match=r"deploy\.image_uri"):
        config(f"register.serving.image_uri={IMAGE}")


def test_an_adapter_is_served_on_its_base() -> None:
    args = arguments_of(adapter("model.pretrained.weights=Qwen/Qwen2.5-VL-3B-Instruct"), "/mnt/models")
    assert "--model=Qwen/Qwen2.5-VL-3B-Instruct" in args and "--enable-lora" in args
    assert "--max-lora-rank=32" in args
    assert any(one.startswith("--lora-modules=") and one.endswith("=/mnt/models") for one in args)


@pytest.mark.parametrize("base", ["run:digits-1", "/models/qwen", "./qwen"])
def test_an_adapter_without_a_base_that_a_server_can_load_is_refused(base: str) -> None:
    content = adapter("model.pretrained.weights=Qwen/Qwen2.5-VL-3B-Instruct")
    content["model"]["pretrained"]["weights"] = base
    with pytest.raises(ConfigError, match="which no server can load"):
        arguments_of(content)


def test_fewer_replicas_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(ValueError, match="min_replicas 2 is more than max_replicas 1"):
        DeployConfig(endpoint="digits", min_replicas=2)
