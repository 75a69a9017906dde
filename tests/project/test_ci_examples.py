"""Files for CI have the services' own form, and each command in them exists."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.support.paths import ROOT
from tests.support.pipelines.terraform_files import Module

FOLDER = ROOT / "examples/ci"
RELEASE = ROOT / ".github/workflows/release.yaml"
GUIDE = ROOT / "docs/how-to/publish-and-schedule.md"
SCHEMAS = {
    "github-actions.yaml": "vendor.github-workflows",
    "cloudbuild-test.yaml": "vendor.cloudbuild",
    "cloudbuild-publish.yaml": "vendor.cloudbuild",
}
TESTING = {"lint", "typecheck", "docs", "test", "compile-pipeline"}


def problems(name: str, text: str) -> str:
    """What the schema of the file's service finds; empty for a good file."""
    import check_jsonschema  # seconds, for grammars of addresses

    arguments = ["--builtin-schema", SCHEMAS[name], "--default-filetype", "yaml", "-"]
    done = CliRunner().invoke(check_jsonschema.main, arguments, input=text)
    assert done.exit_code in (0, 1), done.output
    return done.output if done.exit_code else ""


def scripts(name: str) -> list[str]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    if name.startswith("cloudbuild"):
        return [step["args"][-1].replace("$$", "$") for step in content["steps"]]
    return [step["run"] for job in content["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [(name, ("runs-on:", "run-on:") if "github" in name else ("entrypoint:", "entry_point:")) for name in SCHEMAS],
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
    assert TESTING <= called <= targets
    assert (called >= {"publish", "schedule"}) is (name != "cloudbuild-test.yaml")
    for script in scripts(name):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_no_secret_and_no_key_is_in_them() -> None:
    for name in SCHEMAS:
        text = (FOLDER / name).read_text()
        assert "secrets." not in text and "credentials_json" not in text


def test_code_of_pull_requests_runs_without_rights() -> None:
    actions = yaml.safe_load((FOLDER / "github-actions.yaml").read_text())
    assert actions["permissions"] == {"contents": "read"}
    for name, job in actions["jobs"].items():
        may_ask_for_a_token = job.get("permissions", {}).get("id-token") == "write"
        if may_ask_for_a_token:
            assert job["environment"] == _default("github_environment"), "the environment that Google asks for"
            assert job["if"] == "startsWith(github.ref, 'refs/tags/')"
        else:
            assert "environment" not in job and "permissions" not in job, name
    tests = yaml.safe_load((FOLDER / "cloudbuild-test.yaml").read_text())
    assert not {"substitutions", "secrets", "availableSecrets"} & tests.keys()
    assert all("env" not in step and "secretEnv" not in step for step in tests["steps"])


def test_cloud_builds_account_is_the_triggers() -> None:
    """An account in the file has no effect in a triggered build, so one would only mislead."""
    for name in SCHEMAS:
        assert "serviceAccount" not in (FOLDER / name).read_text()
    commands = re.findall(r"gcloud builds triggers create.*?gserviceaccount", GUIDE.read_text(), re.DOTALL)
    named = [(re.search(r"--build-config=(\S+)", one), re.search(r"/vlmpipe-(\w+)@", one)) for one in commands]
    pairs = {(file[1], account[1]) for file, account in named if file and account}
    assert pairs == {("cloudbuild-test.yaml", "tester"), ("cloudbuild-publish.yaml", "submitter")}


def _default(variable: str) -> str:
    module = Module(ROOT / "terraform/modules/vlmpipe")
    return str(module.variables[variable]["default"]).strip('"')


def test_a_release_is_built_checked_attested_and_published_without_a_token() -> None:
    text = RELEASE.read_text()
    assert problems("github-actions.yaml", text) == "" and "secrets." not in text
    jobs = yaml.safe_load(text)["jobs"]
    rights = {name: job.get("permissions", {}) for name, job in jobs.items()}
    token = {"id-token": "write"}
    assert rights == {"test": {}, "build": {"contents": "read", "attestations": "write", **token}, "publish": token}
    assert [name for name, job in jobs.items() if "environment" in job] == ["publish"]
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("test", "build")
    used = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]]
    assert used == ["actions/download-artifact", "pypa/gh-action-pypi-publish"], "no code of ours beside the token"
    made = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for step in (step for job in jobs.values() for step in job["steps"] if "run" in step):
        subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)
        called = re.findall(r"^make (.+)$", step["run"], re.MULTILINE)
        assert {word for line in called for word in line.split()} <= set(made)


def test_those_that_publish_name_every_variable_that_make_reads_for_vertex() -> None:
    read = set(re.findall(r"\bVERTEX_\w+", (ROOT / "env.sh.example").read_text()))
    optional = {"VERTEX_NETWORK", "VERTEX_CMEK_IDENTIFIER", "VERTEX_SERVICE_ACCOUNT", "VERTEX_STAGING_BUCKET_NAME"}
    for name in SCHEMAS.keys() - {"cloudbuild-test.yaml"}:
        assert set(re.findall(r"\bVERTEX_\w+", (FOLDER / name).read_text())) == read - optional
