"""Shipped run files for a laptop are short, and have nothing that only Vertex AI or Kubeflow reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.data.photo_folders import as_llava
from tests.support.paths import ROOT
from tests.support.pipelines.example_project import FIELDS, load_for_vertex
from vlmpipe.cli.init import FILES, Template
from vlmpipe.config.run_config import load_run_file
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.config.yaml_loader import read_run_file
from vlmpipe.drafting.run_file import draft_run_file
from vlmpipe.platforms.table import platform_of

LAPTOP = [path for path in sorted(ROOT.glob("configs/**/*.yaml")) if not load_run_file(path).cluster.accelerator_count]
TEMPLATES = [ROOT / "configs" / FILES[template][0] for template in (Template.digits, Template.llava)]
EXAMPLES = [*LAPTOP, *sorted(ROOT.glob("examples/good_enough/*.yaml"))]
SCREEN, MAX_LINES, MAX_STAGED_LINES = 40, 50, 160  # lines of a template, of a training, of stages and sweeps
NOT_READ_HERE = {"gcp", "image_uri", "machine_type", "torch_build", "scheduling_strategy"}


def _keys(content: object) -> Iterator[str]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield key
            yield from _keys(value)


def test_the_files_for_a_laptop_are_those_that_the_guides_run_there() -> None:
    assert {path.stem for path in LAPTOP} == {
        "arr-coc", "digits", "digits-preferences", "digits-stages", "easy-vqa", "llava-local", "openmoji",
        "level_of_detail", "scorers", "texture_channels",
    }  # fmt: skip
    assert set(TEMPLATES) <= set(LAPTOP)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_laptops_file_names_no_project_no_image_and_no_machine(path: Path) -> None:
    assert not set(_keys(read_run_file(path))) & NOT_READ_HERE
    assert "sha256" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_laptops_file_is_short(path: Path) -> None:
    content, lines = read_run_file(path), path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (MAX_STAGED_LINES if {"stages", "sweep"} & content.keys() else MAX_LINES)
    if path in TEMPLATES:
        assert len([line for line in lines if not line.startswith("# yaml-language-server")]) <= SCREEN
        assert "vlmpipe docs first-run-on-vertex" in lines[-1]


def test_a_draft_for_data_takes_a_screen_besides_its_questions(tmp_path: Path) -> None:
    draft = draft_run_file(as_llava(tmp_path / "a"), tmp_path / "a.yaml")
    before, _, after = draft.text.partition("# What it cannot tell:\n")
    lines = [*before.splitlines(), *(line for line in after.splitlines() if not line.startswith("#   "))]
    assert draft.questions and len(lines) <= SCREEN


@pytest.mark.parametrize("path", LAPTOP, ids=lambda path: path.stem)
def test_vertex_ai_names_all_missing_fields_at_once_and_takes_the_file_with_them(path: Path) -> None:
    vertex = platform_of("vertex")
    with pytest.raises(RunFileError, match="vlmpipe docs first-run-on-vertex") as caught:
        vertex.check(load_run_file(path))
    assert {problem.field for problem in caught.value.problems} == FIELDS.keys()
    vertex.check(load_for_vertex(path))
