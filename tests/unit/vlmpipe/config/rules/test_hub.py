"""Repositories of the hub in run files: ids, adapters whose base nobody could load, and the token elsewhere."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from vlmpipe.config.run_config import RunConfig
from vlmpipe.platforms.kubeflow.requirements import require_kubeflow
from vlmpipe.platforms.vertex.requirements import require_vertex
from vlmpipe.trainer.errors import ConfigError

TOKEN = "register.hub.token_secret=projects/my-project/secrets/hub"


def config(*overrides: str, name: str = "digits", repo_id: str = "team/digits") -> RunConfig:
    return load_shipped(ROOT / f"configs/{name}.yaml", [f"register.hub.repo_id={repo_id}", *overrides])


@pytest.mark.parametrize("repo_id", ["digits", "team/digits/one", "team/di--gits", "te..am/digits", "team/digits.git"])
def test_an_id_that_the_hub_would_refuse_is_refused(repo_id: str) -> None:
    with pytest.raises(ConfigError, match=r"register\.hub\.repo_id.*\n?.*account/name"):
        config(repo_id=repo_id)


def test_an_adapter_is_uploaded_only_where_its_base_is_on_the_hub() -> None:
    adapter = ["model.lora.export=adapter", "model.pretrained.revision="]
    assert config(*adapter, name="qwen2-5-vl-3b-lora").register_.hub
    with pytest.raises(ConfigError, match=r"register\.hub.*no reader of the hub can load"):
        config(*adapter, "model.pretrained.weights=gs://bucket/base", name="qwen2-5-vl-3b-lora")


def test_steps_elsewhere_need_a_secret_for_the_token() -> None:
    for require in (require_vertex, require_kubeflow):
        with pytest.raises(ConfigError, match=r"register\.hub\.token_secret.*missing"):
            require(config())
        require(config(TOKEN))
