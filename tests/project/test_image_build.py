"""`make build`: container/build.sh against strict stand-ins of docker and gcloud, and what becomes of the digests."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.images.builder import require_tools
from tests.images.pip_settings import pip_settings
from tests.support.paths import ROOT
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.pipelines.pin_images import IMAGES as FIELDS
from vlmpipe.pipelines.pin_images import by_digest, pin
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError

(BASE,) = re.findall("^ARG BASE_IMAGE=(.+)$", (ROOT / "container/trainer.Dockerfile").read_text(), re.M)
REGISTRY, TAG, INDEX = "host/p/r", "t", "https://index.example/cpu"
DIGESTS = {"trainer": "sha256:" + "a" * 64, "pipeline": "sha256:" + "b" * 64}
IMAGES = {name: f"{REGISTRY}/{name}@{digest}" for name, digest in DIGESTS.items()}
OF_DOCKER: list[dict[str, Any]] = [
    {
        "RepoTags": ["elsewhere/trainer:t", f"{REGISTRY}/{name}:{TAG}"],
        "RepoDigests": [f"elsewhere/trainer@sha256:{'c' * 64}", f"{REGISTRY}/{name}@{digest}"],
    }
    for name, digest in DIGESTS.items()
]
OF_CLOUD_BUILD: dict[str, Any] = {
    "status": "SUCCESS",
    "results": {"images": [{"name": f"{REGISTRY}/{name}:{TAG}", "digest": DIGESTS[name]} for name in DIGESTS]},
}
RUN_FILE = """\
name: mine # of a run
cluster:
  # two nodes
  replica_count: 2
  image_uri: "old" # by hand

gcp:   # where
  project: p
"""


IMAGES_NEED_BYTES = 30_000_000_000  # both images, the layers before them, and pip's downloads


class Desk:
    """A copy of what build.sh reads, and stand-ins for builders that know only the calls that are given to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "container").mkdir()
        for name in ("build.sh", "trainer.Dockerfile"):
            shutil.copy(ROOT / "container" / name, folder / "container")
        shutil.copytree(ROOT / "container/torch_builds", folder / "container/torch_builds")
        (folder / "bin").mkdir()
        for tool in (
            "bash",
            "cat",
            "dirname",
            "mkdir",
            "sed",
            "sh",
            "sleep",
        ):  # no docker and no gcloud of this machine's
            (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
        (folder / "run.yaml").write_text(RUN_FILE)

    def stand_in(self, program: str, answers: dict[str, str]) -> None:
        """`answers`: from a shell pattern of all arguments to the shell command that answers."""
        cases = "".join(f"  {pattern}) {answer} ;;\n" for pattern, answer in answers.items())
        script = f'''#!/bin/sh
printf '%s\\n' "{program} $*" >> {shlex.quote(str(self.folder / "calls"))}
case "$*" in
{cases}  *) echo "{program} does not know: $*" >&2; exit 2 ;;
esac
'''
        path = self.folder / "bin" / program
        path.write_text(script)
        path.chmod(0o755)

    def build(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        known = {
            "PATH": f"{self.folder}/bin",
            "PYTHONPATH": str(ROOT),
            "VLMPIPE_PYTHON": sys.executable,
            "CONTAINER_IMAGE_REGISTRY": REGISTRY,
            "TAG": TAG,
            "BUILD_POLL_S": "0",
            "TORCH_CPU_INDEX_URL": INDEX,
        }
        command = ["container/build.sh", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=known | environment, capture_output=True, text=True, check=False
        )

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def images(self) -> dict[str, str]:
        return dict(json.loads((self.folder / "build/images.json").read_text()))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


EXPECTED = {
    "tag": TAG,
    "cluster.image_uri": IMAGES["trainer"],
    "gcp.pipeline_image": IMAGES["pipeline"],
    "cluster.torch_build": "cu130",
}
# Of the trainer image, as build arguments of docker and substitutions of Cloud Build.
NEEDS = {"TORCH_BUILD": "cu130", "MIN_DRIVER": "580", "MIN_COMPUTE_CAPABILITY": "7.5"}


def test_docker_pushes_and_its_digests_reach_the_run_file(desk: Desk) -> None:
    build = '[ "$DOCKER_BUILDKIT" = 1 ] || exit 3'
    desk.stand_in(
        "docker",
        {
            "info": "exit 0",
            '"build --file container/"*"Dockerfile --platform linux/amd64 "*" --tag host/p/r/"*":t ."': build,
            '"push host/p/r/trainer:t"|"push host/p/r/pipeline:t"': "echo pushed",
            '"run --rm --network none host/p/r/"*":t cat /app/sbom.cdx.json"': "echo {}",
            '"image inspect host/p/r/trainer:t host/p/r/pipeline:t"': f"echo {shlex.quote(json.dumps(OF_DOCKER))}",
        },
    )
    options = {"REDUCTION_SERVER": "1", "HOROVOD": "1", "EXTRAS": "wandb"}
    done = desk.build("docker", "run.yaml", **options, PIP_CONFIG_FILE="/etc/pip.conf")
    assert done.returncode == 0, done.stderr
    assert desk.images() == EXPECTED
    assert f"cluster.image_uri={IMAGES['trainer']}" in done.stdout
    assert (desk.folder / "run.yaml").read_text() == RUN_FILE.replace('"old"', IMAGES["trainer"]).replace(
        "  project", f"  pipeline_image: {IMAGES['pipeline']}\n  project"
    ).replace("  replica_count", "  torch_build: cu130\n  replica_count")
    assert [(desk.folder / f"build/{name}.cdx.json").read_text() for name in DIGESTS] == ["{}\n", "{}\n"]
    trainer, pipeline = [call for call in desk.calls() if call.startswith("docker build")]
    told = " ".join(f"--build-arg {name}={value}" for name, value in {**options, **NEEDS}.items())
    assert f"{told} --secret id=pip,src=/etc/pip.conf" in trainer
    assert "REDUCTION_SERVER" not in pipeline
    needs = "--build-arg TORCH_BUILD=cpu --build-arg MIN_DRIVER= --build-arg MIN_COMPUTE_CAPABILITY="
    assert f"{needs} --secret id=torch_index,env=TORCH_CPU_INDEX_URL" in pipeline
    assert INDEX not in trainer + pipeline, "an address may hold credentials"


SUBMIT = '"builds submit --async --format value(id) --config container/cloudbuild.yaml --substitutions "*" ."'


def test_cloud_build_is_waited_for_and_its_results_are_read(desk: Desk) -> None:
    once_each = "if [ -e seen-2 ]; then echo SUCCESS; elif [ -e seen-1 ]; then : > seen-2; echo WORKING; "
    once_each += "else : > seen-1; echo QUEUED; fi"
    desk.stand_in(
        "gcloud",
        {
            SUBMIT: '[ "$CLOUDSDK_CORE_PROJECT" = my-project ] && echo build-1',
            '"builds describe build-1 --format value(status)"': once_each,
            '"builds describe build-1 --format json"': f"echo {shlex.quote(json.dumps(OF_CLOUD_BUILD))}",
        },
    )
    account = {"CLOUD_BUILD_SA_EMAIL": "builder@x", "CLOUD_BUILD_SOURCES": "gs://bucket/source"}
    done = desk.build("gcloud", VERTEX_PROJECT_ID="my-project", **account)
    assert done.returncode == 0, done.stderr
    assert desk.images() == EXPECTED
    assert (desk.folder / "run.yaml").read_text() == RUN_FILE, "no run file was named"
    submit, *described = desk.calls()
    assert len(described) == 4
    values = f"_REGISTRY=host/p/r,_TAG=t,_BASE_IMAGE={BASE},_REDUCTION_SERVER=0,_HOROVOD=0"
    values += "".join(f",_{name}={value}" for name, value in NEEDS.items())
    values += ",_PIPELINE_TORCH_BUILD=cpu,_PIPELINE_MIN_DRIVER=,_PIPELINE_MIN_COMPUTE_CAPABILITY="
    values += f",_TORCH_CPU_INDEX_URL={INDEX}"
    assert submit.endswith(
        f"--substitutions {values} --service-account projects/my-project/serviceAccounts/builder@x "
        "--gcs-source-staging-dir gs://bucket/source ."
    )


def test_extras_reach_cloud_build(desk: Desk) -> None:
    desk.stand_in(
        "gcloud", {SUBMIT: "echo build-1", '"builds describe build-1 --format value(status)"': "echo FAILURE"}
    )
    desk.build("gcloud", EXTRAS="wandb")
    assert "_REDUCTION_SERVER=0,_HOROVOD=0,_EXTRAS=wandb," in desk.calls()[0]


def test_a_failed_build_names_its_log_and_leaves_the_run_file(desk: Desk) -> None:
    desk.stand_in(
        "gcloud", {SUBMIT: "echo build-1", '"builds describe build-1 --format value(status)"': "echo FAILURE"}
    )
    done = desk.build("gcloud", "run.yaml")
    assert done.returncode == 69
    assert "the build ended as FAILURE" in done.stderr
    assert "gcloud builds log build-1" in done.stderr
    assert (desk.folder / "run.yaml").read_text() == RUN_FILE
    assert not (desk.folder / "build/images.json").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["docker"], {"CONTAINER_IMAGE_REGISTRY": ""}, "CONTAINER_IMAGE_REGISTRY is not set"),
        (["docker"], {"VLMPIPE_PYTHON": "no-python"}, "make install"),
        (["docker", "no.yaml"], {}, "there is no run file no.yaml"),
        (["docker"], {}, "no Docker daemon answers"),
        (["gcloud"], {}, "gcloud is not installed"),
        (["podman"], {}, "unknown builder 'podman'"),
        (["docker"], {"TORCH_CPU_INDEX_URL": ""}, "TORCH_CPU_INDEX_URL is not set, and PyPI has no build cpu of torch"),
        (["gcloud"], {"TORCH_CPU_INDEX_URL": "", "PIP_CONFIG_FILE": "/p"}, "TORCH_CPU_INDEX_URL is not set"),
        (["docker"], {"TORCH_BUILD": "cpu"}, "TORCH_INDEX_URL is not set"),
        (["docker"], {"BASE_IMAGE": "mine:1"}, "BASE_IMAGE is mine:1, and a tag can be moved"),
        (["docker"], {"TORCH_BUILD": "cu126"}, "pin_torch.py cu126 --index-url INDEX writes it"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_built(
    desk: Desk, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    desk.stand_in("docker", {})
    done = desk.build(*arguments, **environment)
    assert done.returncode == 69
    assert said in done.stderr
    assert not (desk.folder / "build/images.json").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCH_CPU_INDEX_URL": "", "PIPELINE_TORCH_BUILD": "cu130"},
        {"TORCH_CPU_INDEX_URL": "", "PIP_CONFIG_FILE": "/p"},
        {"TORCH_BUILD": "cpu", "TORCH_INDEX_URL": INDEX},
        {"BASE_IMAGE": f"mine@sha256:{'a' * 64}"},
    ],
)
def test_the_remedies_let_the_build_go_on(desk: Desk, environment: dict[str, str]) -> None:
    done = desk.build("docker", **environment)
    assert "no Docker daemon answers" in done.stderr  # the next check


def test_a_build_of_torch_that_is_not_described_is_refused(desk: Desk) -> None:
    (desk.folder / "container/torch_builds/cu199.txt").write_text("torch==2.13.0+cu199\n")
    done = desk.build("docker", TORCH_BUILD="cu199", TORCH_INDEX_URL=INDEX)
    assert done.returncode == ExitCode.CONFIG
    assert "nothing is known of torch's build cu199" in done.stderr


def test_make_hands_over_a_run_file_only_when_one_is_named(tmp_path: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if name not in ("config", "MAKEFLAGS")}
    command = ["make", "--no-print-directory", "--dry-run", "build"]
    planned = [
        shlex.split(
            subprocess.run(command + more, cwd=ROOT, env=outside, capture_output=True, text=True, check=True).stdout
        )
        for more in ([], ["config=a.yaml"], ["config=my own's/$$a b.yaml"])
    ]
    assert [words[words.index("docker") + 1 :] for words in planned] == [[], ["a.yaml"], ["my own's/$a b.yaml"]]
    said = subprocess.run(
        ["make", "build", "CONTAINER_IMAGE_REGISTRY="], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert said.returncode != 0
    assert "set it in env.sh" in said.stderr


@pytest.mark.parametrize("answer", [OF_DOCKER, OF_CLOUD_BUILD])
def test_digests_are_those_of_the_registry_asked_for(answer: Any) -> None:
    assert by_digest(answer, REGISTRY, TAG) == IMAGES
    with pytest.raises(UserError, match="0 digests of host/p/r/trainer:other"):
        by_digest(answer, REGISTRY, "other")


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"status": "SUCCESS"},
        [{"RepoTags": ["host/p/r/trainer:t"], "RepoDigests": None}],
        {"results": {"images": [{"name": "host/p/r/trainer:t", "digest": "sha256:short"}]}},
    ],
)
def test_an_image_without_a_digest_is_an_error(answer: Any) -> None:
    with pytest.raises(UserError) as caught:
        by_digest(answer, REGISTRY, TAG)
    assert caught.value.code == 69


LINES = st.sampled_from(["", "# why", "  # why", "  # a: b"])


@settings(max_examples=40)
@given(
    before=LINES,
    between=LINES,
    after=LINES,
    has=st.lists(st.booleans(), min_size=2, max_size=2),
    quote=st.sampled_from(["", "'", '"']),
)
def test_pinning_changes_two_fields_and_no_comment(
    before: str, between: str, after: str, has: list[bool], quote: str
) -> None:
    lines = [before, "cluster:  # nodes"]
    lines += [f"  image_uri:   {quote}old{quote}   # by hand"] * has[0]
    lines += [between, "  env: {a: [1, 2]}", "gcp:", after, "  project: p"]
    lines += ["  pipeline_image:"] * has[1]
    text = "\r\n".join(lines) if quote else "\n".join(lines)
    pinned = pin(text, IMAGES, "run.yaml")
    expected = parse_yaml(text, "")
    for name, (section, field) in FIELDS.items():
        expected[section][field] = IMAGES[name]
    assert parse_yaml(pinned, "") == expected
    assert [line.partition("#")[2] for line in pinned.splitlines() if "#" in line] == [
        line.partition("#")[2] for line in text.splitlines() if "#" in line
    ]
    assert pin(pinned, IMAGES, "run.yaml") == pinned


@pytest.mark.parametrize(
    ("text", "pinned"),
    [
        ("cluster: {env: {a: b}} # c\ngcp: {project: b}", "cluster: {%i, env: {a: b}} # c\ngcp: {%p, project: b}"),
        ("name: x # c\n", "name: x # c\n\ncluster:\n  %i\n\ngcp:\n  %p\n"),
    ],
)
def test_sections_of_one_line_are_extended_and_those_of_a_laptops_file_added(text: str, pinned: str) -> None:
    for mark, name in (("%i", "trainer"), ("%p", "pipeline")):
        pinned = pinned.replace(mark, f"{FIELDS[name][1]}: {IMAGES[name]}")
    assert pin(text, IMAGES, "run.yaml") == pinned


@pytest.mark.parametrize("text", ["{name: x}\n", "[]\n", "cluster:\ngcp: 1\n"])
def test_a_run_file_of_another_form_is_left_alone_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match="write it by hand"):
        pin(text, IMAGES, "run.yaml")


def test_the_shipped_run_files_can_be_pinned() -> None:
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        assert all(image in pin(path.read_text(), IMAGES, str(path)) for image in IMAGES.values())


def test_pip_settings_for_a_build_name_their_folders_and_what_no_image_may_mention(tmp_path: Path) -> None:
    (tmp_path / "simple").mkdir()
    listed = f"""\
:env:.timeout='9'
global.cert='{tmp_path}/ca.crt'
global.extra-index-url='https://user:secret@host/simple\\nfile://{tmp_path}/simple'
global.timeout='1'
install.find-links='{tmp_path}'
"""
    (tmp_path / "ca.crt").touch()
    found = pip_settings(listed)
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read_string(found.text)
    assert parsed["global"]["timeout"] == "9"
    assert parsed["install"]["find-links"] == str(tmp_path)
    assert found.mounts == (tmp_path, tmp_path / "ca.crt")
    assert set(found.traces) == {"https://user:secret@host/simple", f"file://{tmp_path}/simple", str(tmp_path)}


def test_image_test_names_all_packages_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shutil, "which", lambda program: None if program in ("buildah", "ip") else f"/usr/bin/{program}"
    )
    with pytest.raises(UserError, match="buildah, iproute2 not installed") as caught:
        require_tools()
    assert caught.value.fix == "apt-get install --no-install-recommends buildah iproute2"
    assert caught.value.code == ExitCode.UNAVAILABLE


@pytest.mark.slow
def test_both_images_are_built_as_they_ship_and_run(tmp_path: Path) -> None:
    try:
        require_tools()
    except UserError as error:
        pytest.skip(error.found)
    if shutil.disk_usage(tmp_path).free < IMAGES_NEED_BYTES:
        pytest.skip(f"less than {IMAGES_NEED_BYTES / 1e9:.0f} GB free in {tmp_path}")
    cpu_torch = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    cpu_torch += ["--requirement", str(ROOT / "container/torch_builds/cpu.txt")]
    if not os.environ.get("TORCH_CPU_INDEX_URL") and subprocess.run(cpu_torch, capture_output=True).returncode:
        pytest.skip("pip finds no torch for CPUs, and TORCH_CPU_INDEX_URL is not set")
    command = [sys.executable, "-m", "tests.images", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
