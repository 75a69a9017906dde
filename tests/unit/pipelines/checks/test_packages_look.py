"""Packages of later steps are looked for before the first one."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vlmpipe import api
from vlmpipe.config.run_config import load_run_file
from vlmpipe.pipelines.checks.packages_look import NEEDS, extras_of_image, missing_here, needs_of
from vlmpipe.trainer.errors import ExitCode, UserError

LMMS_EVAL = "evaluate.lmms_eval={tasks: [pope], python: /usr/bin/python3}"
CASES = {
    "google.cloud.bigquery": ["data.source=bq://my-project.d.t"],
    "boto3": ["data.source=s3://b/set.json"],
    "deepspeed": ["train.strategy=zero2"],
    "peft": ["model.lora={rank: 4}"],
    "bitsandbytes": ["model.lora={rank: 4, quantize_base: nf4}"],
    "torchao": ["train.float8=tensorwise", "train.strategy=fsdp", "train.precision=bf16"],
    "wandb": ["train.wandb.project=mine"],
    "mlflow": ["train.mlflow.tracking_uri=sqlite:///x.db"],
    "compressed_tensors": ["evaluate.quantize={formats: [int4]}"],
    "fastapi": [LMMS_EVAL],
    "av": ["data.source=FOLDER"],
    "pypdfium2": ["data.source=FOLDER"],
}


def lack(monkeypatch: pytest.MonkeyPatch, lacked: str) -> None:
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == lacked else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_every_need_has_a_case() -> None:
    assert {need.modules[0] for need in NEEDS} == set(CASES)  # deploy has the server of evaluate.lmms_eval
    assert all(need.extra for need in NEEDS)


@pytest.mark.parametrize("module", CASES)
def test_a_package_that_a_later_step_needs_is_named_before_the_first(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(monkeypatch, module)
    (data := tmp_path / "data").mkdir()
    (data / "records.jsonl").write_text('{"image": "manual.pdf#page=2"}\n{"image": "film.mp4#t=3"}\n')
    case = [each.replace("FOLDER", str(data)) for each in CASES[module]]
    config = load_run_file(ROOT / "configs/digits.yaml", [f"output.root_uri={tmp_path / 'runs'}", *case])
    assert module in {name for need in needs_of(config) for name in need.modules}
    with pytest.raises(UserError, match=f"needs the Python package {module} in step") as refused:
        api.run(config)
    assert refused.value.code == ExitCode.UNAVAILABLE and "pip install 'vlmpipe[" in refused.value.fix
    assert not (tmp_path / "runs").exists()


def test_deploying_on_this_machine_needs_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch, "uvicorn")
    config = load_run_file(ROOT / "configs/digits.yaml", ["deploy.endpoint=digits"])
    missing = {need.field: need.step for need, _ in missing_here(config)}
    assert missing == {"deploy": "deploy-model"} and extras_of_image(config) == {}


def test_a_run_file_without_such_fields_needs_none_of_them() -> None:
    config = load_run_file(ROOT / "configs/digits.yaml", [])
    assert needs_of(config) == []


def test_the_extras_of_an_image_are_named() -> None:
    fields = ["train.wandb.project=mine", "train.strategy=zero2"]
    assert extras_of_image(load_run_file(ROOT / "configs/digits.yaml", fields)) == {"wandb": "train.wandb"}
