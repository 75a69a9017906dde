"""A compiled pipeline reads as it was meant, whatever texts its run file holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from tests.support.paths import ROOT
from vlmpipe.backends.vertex.pipeline_yaml import documents
from vlmpipe.config.overrides import apply_overrides, leaves
from vlmpipe.config.run_config import RunConfig, load_run_file, parse_run_config
from vlmpipe.config.target_requirements import require_kubeflow, require_vertex
from vlmpipe.job_spec.build import check_jobs
from vlmpipe.pipelines.compile import compile_pipeline
from vlmpipe.pipelines.targets import TargetName
from vlmpipe.trainer.errors import UserError

# What ends a line, or is no character, for readers of YAML; and what would be a key of the pipeline's own.
BREAKS = ["\u2028", "\u2029", "\u0085", "\r", "\n", "\x7f", "\x80", "\x9f", "\ufeff", "\u200e", "\x1b", "\ue000"]
NASTY = "".join(f"a{one}" for one in BREAKS) + "\ndeploymentSpec: {}\n# 'é\U0001f600\xa0\"\\u0041 "


def texts_of(config: RunConfig) -> list[str]:
    """Dotted paths of the run file's texts."""
    found = []
    for path, value in leaves(config.to_dict()):
        if isinstance(value, str):
            found.append(path)
        elif isinstance(value, dict):
            found += [f"{path}.{name}" for name, one in value.items() if isinstance(one, str)]
    return found


def accepted_with(content: dict[str, Any], path: str, text: str) -> dict[str, Any] | None:
    """The content with the text in that field; None where the run file, a target or a job's spec refuses it."""
    changed = apply_overrides(content, {path: text})
    try:
        config = parse_run_config(copy.deepcopy(changed), "x")
        require_vertex(config)
        require_kubeflow(config)
        check_jobs(config, "gs://bucket/runs/r")
    except UserError:
        return None
    return changed


@pytest.fixture(scope="module")
def nasty() -> RunConfig:
    """The quickstart's run file with such a text in every field that takes one."""
    config = load_run_file(ROOT / "configs/digits.yaml", ["output.root_uri=gs://bucket/root"])
    content = apply_overrides(config.to_dict(), {"cluster.env": {"NAME": "value"}})
    taken = list[str]()
    for path in texts_of(parse_run_config(content, "x")):
        if changed := accepted_with(content, path, NASTY):
            content = changed
            taken.append(path)
    assert len(taken) >= 3 and "data.caption_question" in taken and "cluster.env.NAME" in taken, taken
    return parse_run_config(content, "x")


@pytest.mark.parametrize("target", get_args(TargetName))
def test_every_text_of_a_run_file_is_read_back(nasty: RunConfig, target: TargetName, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    compile_pipeline(nasty, target, path)
    data = path.read_bytes()
    spec = documents(data)[0]
    assert spec == next(iter(yaml.safe_load_all(data))), "every reader of YAML reads the same"
    assert set(spec) == set(documents(clean(target, tmp_path))[0])
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert json.loads(parameters["run_file"]["defaultValue"]) == nasty.to_dict()
    assert all(line.startswith("#") for line in data.decode().partition("\ncomponents:")[0].split("\n"))


def clean(target: TargetName, folder: Path) -> bytes:
    path = folder / "clean.yaml"
    compile_pipeline(load_run_file(ROOT / "configs/digits.yaml"), target, path)
    return path.read_bytes()
