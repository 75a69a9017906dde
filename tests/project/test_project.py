"""The project's own files agree with each other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.paths import ROOT, files_of_repository
from vlmpipe.config.sections.gcp import GcpConfig

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def _pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def _named(*extras: str) -> list[Requirement]:
    lines = [line for extra in extras for line in EXTRAS[extra]]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != "vlmpipe"]


@pytest.mark.parametrize("requirement", [*map(Requirement, PROJECT["dependencies"]), *_named(*EXTRAS)], ids=str)
def test_every_named_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    pin = _pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)


def test_no_pin_is_of_one_build_or_of_the_installer() -> None:
    pins = _pins()
    assert [name for name, version in pins.items() if version.local] == []
    assert pins.keys() & {"pip", "setuptools", "wheel"} == set()


def test_the_training_container_needs_no_kfp() -> None:
    names = {canonicalize_name(requirement.name) for requirement in _named("trainer", "data")}
    assert names & {"kfp", "google-cloud-pipeline-components", "google-cloud-aiplatform"} == set()


def test_the_all_extra_holds_every_other_but_four() -> None:
    """torchao logs warnings wherever peft is imported; servers and MLflow pull in much that nothing else uses;
    the kernel is for GPUs."""
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == EXTRAS.keys() - {"all", "float8", "linear-attention", "mlflow", "serving"}


def test_make_help_shows_every_target() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    plain = re.sub(r"\x1b\[\d*m", "", shown)
    assert set(re.findall(r"^  ([a-z-]+) +\S", plain, re.MULTILINE)) == targets


def test_data_files_of_the_packages_are_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    paths = files_of_repository("pipelines", "components", "trainer")
    missed = [path for path in paths if path.suffix != ".py" and not any(map(path.match, patterns))]
    assert missed == []


@pytest.mark.parametrize("recipe", sorted((ROOT / "container").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_an_image_recipe_copies_what_exists_and_is_sent_to_the_builder(recipe: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        name
        for line in re.findall(r"^COPY (.+)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists() or sent.isdisjoint((name, name.split("/")[0]))] == []


def gcp_fields(planned: str) -> dict[str, str]:
    """The fields of section gcp in a command that make would run."""
    words = [word.removeprefix("gcp.") for word in shlex.split(planned) if word.startswith("gcp.")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_a_run_files_name_is_one_word_for_every_command_of_make() -> None:
    name = "my own's/x y.yaml"
    for target in ("check", "plan", "run", "compile-pipeline", "publish", "submit", "schedule", "doctor", "rehearse"):
        command = ["make", "--no-print-directory", "--dry-run", target, f"config={name}", "VENV=/nowhere"]
        planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert name in shlex.split(planned.splitlines()[-1]), target


def test_env_sh_reaches_make_and_becomes_fields_of_the_run_file(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "env.sh").write_text(re.sub(r"^# export", "export", (ROOT / "env.sh.example").read_text(), flags=re.M))
    planned = subprocess.run(
        ["make", "--dry-run", "compile-pipeline"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    fields = gcp_fields(planned)
    in_shell = subprocess.run(
        ["bash", "-c", "source ./env.sh && echo $VERTEX_PROJECT_ID $VERTEX_CMEK_IDENTIFIER"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert [fields["project"], fields["encryption_spec_key_name"]] == in_shell
    assert fields.keys() <= GcpConfig.model_fields.keys()
    assert len(fields) == 7


def test_other_names_in_env_sh_become_the_same_fields_but_not_from_the_shell(tmp_path: Path) -> None:
    names = {
        "PROJECT_ID": "my-project",
        "GCP_REGION": "europe-west1",
        "VERTEX_SERVICE_ACCOUNT": "a@my-project.iam.gserviceaccount.com",
        "VERTEX_STAGING_BUCKET_NAME": "bucket",
    }
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())

    def fields(env: dict[str, str]) -> dict[str, str]:
        command = ["make", "--dry-run", "check"]
        planned = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
        return gcp_fields(planned)

    path = {"PATH": os.environ["PATH"]}
    assert fields(path | names) == {}
    (tmp_path / "env.sh").write_text("".join(f"export {name}={value}\n" for name, value in names.items()))
    assert fields(path) == {
        "project": "my-project",
        "location": "europe-west1",
        "service_account": "a@my-project.iam.gserviceaccount.com",
        "pipeline_root": "gs://bucket/vlmpipe",
    }
    assert fields(path | {"VERTEX_PROJECT_ID": "other"})["project"] == "other", "its own name comes first"


def test_every_program_of_the_makefile_exists() -> None:
    text = (ROOT / "Makefile").read_text()
    modules = re.findall(r"-m (benchmarks\.\w+)", text)
    scripts = re.findall(r"\bcontainer/\S+\.sh\b", text)
    assert modules
    assert scripts
    places = [(f"{name}.py", f"{name}/__main__.py") for name in (module.replace(".", "/") for module in modules)]
    places += [(script,) for script in scripts]
    assert [place for place in places if not any((ROOT / file).is_file() for file in place)] == []


@pytest.mark.parametrize("target", ["fuzz-data", "fuzz-config", "test-engines", "storage-conformance"])
def test_every_test_file_of_a_target_exists(target: str) -> None:
    printed = subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = re.findall(r"\btests/[\w/]+(?:\.py)?", printed)
    assert files and [file for file in files if not (ROOT / file).exists()] == []


def test_every_fuzzed_law_is_of_a_target() -> None:
    makefile = subprocess.run(
        ["make", "--dry-run", "fuzz-data", "fuzz-config"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    fuzzed = {
        path for path in (ROOT / "tests").rglob("test_*.py") if "\nfrom tests.support.fuzz import" in path.read_text()
    }
    assert fuzzed and [str(path) for path in fuzzed if str(path.relative_to(ROOT)) not in makefile] == []


def test_files_that_pages_name_are_there() -> None:
    """Pages of measurements name those of their day."""
    pages = files_of_repository("README.md", "docs/*.md")
    of_ours = re.compile(r"`((?:trainer|vlmpipe|pipelines|components|benchmarks|tests|docs|configs)/[\w./-]+\.\w+)`")
    named = {(str(page.relative_to(ROOT)), file) for page in pages for file in of_ours.findall(page.read_text("utf-8"))}
    assert len(named) > 50
    assert [each for each in sorted(named) if not (ROOT / each[1]).exists()] == []


def test_laws_read_only_pages_of_the_repository() -> None:
    """`make docs` copies pages of measurements under docs/: a law over all files there would fail after it."""
    walk = re.compile(r'docs"\)?\.(?:rglob|walk)\(|docs\.rglob\(|glob\("docs/\*\*')
    assert [path for path in files_of_repository("tests/*.py") if walk.search(path.read_text("utf-8"))] == []
