"""Files for CI have the services' own form, and each command in them exists."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

FOLDER = ROOT / "examples/ci"
SCHEMAS = {"github-actions.yaml": "vendor.github-workflows", "cloudbuild.yaml": "vendor.cloudbuild"}


def problems(name: str, text: str) -> str:
    """What the schema of the file's service finds; empty for a good file."""
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        SCHEMAS[name],
        "--default-filetype",
        "yaml",
        "-",
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode else ""


def scripts(name: str) -> list[str]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    if name == "cloudbuild.yaml":
        return [step["args"][-1].replace("$$", "$") for step in content["steps"]]
    return [step["run"] for job in content["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("github-actions.yaml", ("runs-on:", "run-on:")), ("cloudbuild.yaml", ("entrypoint:", "entry_point:"))],
)
def test_files_have_the_form_of_their_service(name: str, wrong: tuple[str, str]) -> None:
    text = (FOLDER / name).read_text()
    assert problems(name, text) == ""
    assert wrong[0] in text and problems(name, text.replace(*wrong, 1)) != ""


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_command_is_a_target_of_make(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        word
        for script in scripts(name)
        for line in re.findall(r"^\s*make (.+)$", script, re.MULTILINE)
        for word in line.split()
        if re.fullmatch(r"[a-z-]+", word)
    }
    assert {"lint", "test", "compile-pipeline", "publish", "schedule"} <= called <= targets
    for script in scripts(name):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_no_secret_and_no_key_is_in_them() -> None:
    for name in SCHEMAS:
        text = (FOLDER / name).read_text()
        assert "secrets." not in text and "credentials_json" not in text


def test_both_name_every_variable_that_make_reads_for_vertex() -> None:
    read = set(re.findall(r"\bVERTEX_\w+", (ROOT / "env.sh.example").read_text()))
    optional = {"VERTEX_NETWORK", "VERTEX_CMEK_IDENTIFIER", "VERTEX_SERVICE_ACCOUNT", "VERTEX_STAGING_BUCKET_NAME"}
    for name in SCHEMAS:
        assert set(re.findall(r"\bVERTEX_\w+", (FOLDER / name).read_text())) == read - optional
