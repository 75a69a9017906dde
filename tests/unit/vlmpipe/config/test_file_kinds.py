"""A file of another kind is named for what it is, with the command that takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.pipelines.example_project import load_shipped
from vlmpipe.config.file_kinds import KINDS, RUN_FILE, kind_of_content
from vlmpipe.config.yaml_loader import read_mapping, read_run_file
from vlmpipe.job_spec.build import job_spec, jobs_of
from vlmpipe.job_spec.file import read_spec_file
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.trainer.errors import ConfigError, UserError

DIGITS = ROOT / "configs/digits.yaml"


def pipeline(folder: Path) -> Path:
    return compile_pipeline(load_shipped(DIGITS), "vertex", folder / "pipeline.yaml").path


def spec(folder: Path) -> Path:
    config = load_shipped(DIGITS)
    return written(folder, "job.yaml", yaml.safe_dump(job_spec(config, jobs_of(config)[-1], "gs://b/r")))


def written(folder: Path, name: str, text: str) -> Path:
    (path := folder / name).write_text(text)
    return path


FILES = {
    "a compiled pipeline": pipeline,
    "a job spec": spec,
    "a DeepSpeed configuration": lambda folder: written(
        folder, "ds_config.json", json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"})
    ),
    "a model's config.json": lambda folder: written(
        folder, "config.json", json.dumps({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"})
    ),
    "a Kubernetes object": lambda folder: written(folder, "job.yaml", "apiVersion: v1\nkind: Job\n"),
    "a result of a run": lambda folder: written(folder, "evaluate.json", '{"exact_match": 0.5, "questions": 3}'),
    "a notebook": lambda folder: written(folder, "a.ipynb", '{"cells": [], "nbformat": 4, "nbformat_minor": 5}'),
    "a file of settings of another training program": lambda folder: written(
        folder, "sft.yaml", "model_name_or_path: x\nstage: sft\nfinetuning_type: lora\n"
    ),
    "a configuration of accelerate": lambda folder: written(
        folder, "a.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n"
    ),
    "a page for a browser": lambda folder: written(folder, "report.html", "\n<!DOCTYPE html>\n<html>: {</html>"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    path = FILES[name](tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_run_file(path)
    assert str(caught.value).startswith(f"{path} is {name}") and caught.value.fix
    if name == "a job spec":
        assert f"vlmpipe check --job-spec {path}" in caught.value.fix
        assert read_spec_file(path).form == "spec", "and the command takes it"


def test_a_name_that_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="file name too long"):
        read_run_file(tmp_path / ("x" * 5000))


def test_every_shipped_run_file_is_one() -> None:
    paths = sorted(ROOT.glob("configs/**/*.yaml"))
    assert paths and {kind_of_content(read_mapping(path, path.read_text(), "")) for path in paths} == {RUN_FILE}


def test_kinds_differ_in_their_keys() -> None:
    for kind in KINDS:
        assert kind_of_content(dict.fromkeys(kind.keys)) is kind
        assert kind.fix_for("x.yaml")
    assert kind_of_content({"a": 1, "model": 2}) is None
