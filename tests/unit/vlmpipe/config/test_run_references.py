"""`run:RUN_ID` stands for the export of an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pipelines.run_files import SMALL
from vlmpipe.config.run_config import RunConfig, parse_run_config
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.trainer.storage.export_manifest import MARKER

MODEL = {"pretrained": {"weights": "run:align-1"}, "tokenizer": "run:align-1", "image_size": 32}


def parsed(root: str, model: dict[str, Any] = MODEL, **more: Any) -> RunConfig:
    return parse_run_config({**SMALL, "model": model, "output": {"root_uri": root}, **more}, "run.yaml")


def test_a_run_is_where_its_export_is(tmp_path: Path) -> None:
    export = tmp_path / "runs/align-1/export"
    export.mkdir(parents=True)
    (export / MARKER).touch()
    config = parsed(str(tmp_path))
    assert config.model.pretrained is not None
    assert config.model.pretrained.weights == config.model.tokenizer == str(export)
    assert config.model.projector == config.model.tower == config.model.pretrained
    assert parse_run_config(config.to_dict(), "again") == config


def test_a_run_in_a_bucket_is_looked_for_when_it_is_read(tmp_path: Path) -> None:
    assert parsed("gs://bucket/root").model.tokenizer == "gs://bucket/root/runs/align-1/export"
    elsewhere = parsed(str(tmp_path), gcp={"pipeline_root": "gs://bucket/root"})
    assert elsewhere.model.tokenizer == "gs://bucket/root/runs/align-1/export"


@pytest.mark.parametrize(
    ("run_id", "sentence"),
    [
        ("align-2", "found run:align-2, but there is no such run in .*/runs; .*did you mean run:align-1"),
        ("align-1", "found run:align-1, but that run has no export in .*/runs/align-1/export"),
        ("../align-1", "expected run:RUN_ID with the whole id of a run"),
        ("", "expected run:RUN_ID with the whole id of a run"),
        ("@last", "whole id of a run, which a run file keeps: @last would be another run as soon as one starts"),
    ],
)
def test_a_run_without_an_export_is_refused_in_a_sentence(tmp_path: Path, run_id: str, sentence: str) -> None:
    (tmp_path / "runs/align-1").mkdir(parents=True)
    with pytest.raises(RunFileError, match=rf"(?s)model.projector.weights.*{sentence}"):
        parsed(str(tmp_path), {**SMALL["model"], "projector": {"weights": f"run:{run_id}"}})


@pytest.mark.parametrize(
    ("is_adapter", "field", "sentence"),
    [
        (True, "pretrained", "but that run exported an adapter; expected a whole model, and the adapter in "),
        (False, "lora", "but that run exported a whole model; expected one with model.lora.export adapter"),
    ],
)
def test_an_adapter_is_no_model_and_a_model_no_adapter(
    is_adapter: bool, field: str, sentence: str, tmp_path: Path
) -> None:
    export = tmp_path / "runs/align-1/export"
    export.mkdir(parents=True)
    (export / MARKER).touch()
    if is_adapter:
        (export / "adapter_config.json").touch()
    model = MODEL if field == "pretrained" else MODEL | {"pretrained": {"weights": "org/model"}}
    with pytest.raises(RunFileError, match=sentence):
        parsed(str(tmp_path), model | {"lora": {"pretrained": "run:align-1" if field == "lora" else ""}})
    swapped = {"pretrained": {"weights": "org/model"}, "lora": {"pretrained": "run:align-1"}} if is_adapter else {}
    assert parsed(str(tmp_path), MODEL | swapped)
