"""terraform/ hangs together, grants what the package needs and no more, and its outputs fit env.sh and the run file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from lark import UnexpectedInput

from tests.support.paths import ROOT
from tests.support.pipelines.terraform_files import Module, read_schema
from vlmpipe.config.sections.gcp import GcpConfig, PscInterfaceConfig

FOLDER = ROOT / "terraform"
SCHEMA = read_schema(ROOT / "tests/fixtures/terraform/google-7.45.0.json")
GUIDE = ROOT / "docs/how-to/first-run-on-vertex.md"

# Account, role, and what it is on. Who adds one says here, too, that it is meant.
GRANTS = {
    ("submitter", "roles/aiplatform.user", ""),
    ("submitter", "roles/iam.serviceAccountUser", "pipeline"),
    ("submitter", "roles/logging.viewer", ""),
    ("submitter", "roles/storage.objectViewer", "runs"),
    ("submitter", "roles/storage.legacyBucketReader", "runs"),
    ("submitter", "roles/storage.legacyBucketReader", "data"),
    ("submitter", "roles/storage.legacyBucketReader", "mirror"),
    ("pipeline", "roles/aiplatform.user", ""),
    ("pipeline", "roles/iam.serviceAccountUser", "trainer"),
    ("pipeline", "roles/logging.logWriter", ""),
    ("pipeline", "roles/storage.objectViewer", "data"),
    ("pipeline", "roles/storage.objectUser", "runs"),
    ("pipeline", "roles/storage.objectUser", "mirror"),
    ("trainer", "roles/logging.logWriter", ""),
    ("trainer", "roles/storage.objectUser", "runs"),
    ("trainer", "roles/storage.objectUser", "mirror"),
    ("builder", "roles/logging.logWriter", ""),
    ("builder", "roles/storage.objectViewer", "build"),
}
FIXED_ROLES = {
    "google_artifact_registry_repository_iam_member.builder": "roles/artifactregistry.writer",
    "google_artifact_registry_repository_iam_member.submitter": "roles/artifactregistry.writer",
    "google_artifact_registry_repository_iam_member.pipeline": "roles/artifactregistry.reader",
    "google_secret_manager_secret_iam_member.reader": "roles/secretmanager.secretAccessor",
    "google_service_account_iam_member.submitters": "roles/iam.serviceAccountTokenCreator",
    "google_kms_crypto_key_iam_member.service_agents": "roles/cloudkms.cryptoKeyEncrypterDecrypter",
    "google_project_iam_member.vertex_network": "roles/compute.networkAdmin",  # Google's agent, not an account of ours
}


@pytest.fixture(scope="module")
def module() -> Module:
    return Module(FOLDER)


def test_the_files_hang_together(module: Module) -> None:
    assert module.problems(SCHEMA) == []
    assert module.provider_version == SCHEMA["version"], "the arguments were read from another version of the provider"


BROKEN = {
    "a variable that is not there": (
        "outputs.tf",
        "project             = var.project",
        "project = var.projekt",
        "var.p",
    ),
    "a local that is not there": ("main.tf", "for_each = local.services", "for_each = local.service", "local.service"),
    "a key that a local has not": ("outputs.tf", "local.gcp.location", "local.gcp.region", "local.gcp.region"),
    "a resource that is not there": (
        "network.tf",
        "google_compute_network.jobs[0].id",
        "google_compute_network.x.id",
        ".x",
    ),
    "an attribute that is not there": ("outputs.tf", '["pipeline"].email', '["pipeline"].mail', "no attribute mail"),
    "an account that is not there": ("outputs.tf", '.all["trainer"]', '.all["runner"]', "runner"),
    "a bucket that is not there": ("accounts.tf", 'bucket = "mirror", role', 'bucket = "copy", role', "on copy"),
    "an unused variable": (
        "variables.tf",
        'variable "name" {',
        'variable "spare" {}\nvariable "name" {',
        "spare is not used",
    ),
    "an argument that is not there": ("buckets.tf", "public_access_prevention ", "public_access ", "no argument"),
    "an argument that is needed": ("main.tf", 'format        = "DOCKER"', "", "format is missing"),
    "a block that is not there": ("buckets.tf", "soft_delete_policy {", "soft_delete {", "soft_delete"),
    "an argument inside a block": (
        "buckets.tf",
        "retention_duration_seconds",
        "retention_seconds",
        "retention_seconds",
    ),
    "a dynamic block's argument": ("buckets.tf", "default_kms_key_name", "kms_key", "kms_key"),
    "a short description": (
        "outputs.tf",
        '"Where your data goes: data.source and data.image_folder lie under it."',
        '"Data."',
        "data_bucket has no",
    ),
}


@pytest.mark.parametrize(("file", "right", "wrong", "words"), BROKEN.values(), ids=BROKEN)
def test_a_mistake_in_the_files_is_found(file: str, right: str, wrong: str, words: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong))
    assert words in "\n".join(Module(tmp_path).problems(SCHEMA))


def test_a_file_that_is_no_hcl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "main.tf").write_text('resource "google_storage_bucket" "all" {\n  name = \n}\n')
    with pytest.raises(UnexpectedInput):
        Module(tmp_path)


def test_every_role_is_on_the_list_and_has_a_reason(module: Module) -> None:
    grants = module.grants.values()
    assert {(grant.account, grant.role, grant.on) for grant in grants} == GRANTS
    assert [grant for grant in grants if len(grant.why.split()) < 5] == []
    assert module.fixed_roles == FIXED_ROLES
    for address in FIXED_ROLES:
        head = 'resource "{}" "{}"'.format(*address.split("."))
        (above,) = (text.split(head)[0].splitlines()[-1] for text in module.texts.values() if head in text)
        assert above.startswith("# "), f"{address} does not say why"


def test_nothing_but_the_pipeline_deletes_checkpoints_and_deleted_ones_are_not_billed(module: Module) -> None:
    for bucket in ("runs", "mirror"):
        (settings,) = re.findall(rf"\b{bucket} = \{{([^{{}}]*)\}}", module.locals["buckets"])
        assert "soft_delete_days = 0" in settings
        assert "delete_after_days = 0" in settings


def test_buckets_are_private_and_are_not_destroyed_with_content_unasked(module: Module) -> None:
    bucket = module.resources["google_storage_bucket.all"]
    assert bucket["uniform_bucket_level_access"] is True
    assert bucket["public_access_prevention"] == '"enforced"'
    assert module.variables["delete_buckets_with_content"]["default"] is False


def test_alerts_look_for_what_training_prints(module: Module) -> None:
    texts = dict(re.findall(r'([\w-]+) = \{text = "([^"]+)"', module.locals["alerts"]))
    assert texts.keys() == module.keys_of("alerts") - {"text", "title"} and len(texts) > 5
    for pattern, text in texts.items():
        assert text in (ROOT / f"tests/fixtures/failures/{pattern}.log").read_text()


def test_no_secret_has_a_value_in_terraform(module: Module) -> None:
    assert [address for address in module.resources if "secret_version" in address or "account_key" in address] == []


def test_outputs_are_fields_of_the_run_file_and_names_of_env_sh(module: Module) -> None:
    fields = module.keys_of("gcp")
    assert fields - GcpConfig.model_fields.keys() == {"network_attachment"} <= PscInterfaceConfig.model_fields.keys()
    assert {"project", "location", "service_account", "job_service_account", "pipeline_root"} <= fields
    named = set(re.findall(r"^(?:# )?export (\w+)=", (ROOT / "env.sh.example").read_text(), re.MULTILINE))
    assert module.keys_of("env") <= named
    assert {"VERTEX_PROJECT_ID", "CONTAINER_IMAGE_REGISTRY"} <= module.keys_of("env")


def test_the_guide_names_only_what_is_there(module: Module) -> None:
    guide = GUIDE.read_text()
    options = re.findall(r"-var='?(\w+)=", guide) + re.findall(r"^\| `(\w+) = ", guide, re.MULTILINE)
    assert len(options) > 5
    assert set(options) <= module.variables.keys()
    printed = re.findall(r"output (?:-raw )?(\w+)", guide) + re.findall(r"the output `(\w+)`", guide)
    assert set(printed) == module.outputs.keys()
    accounts = set(re.findall(r"^\| account `vlmpipe-(\w+)`", guide, re.MULTILINE))
    assert accounts == module.keys_of("accounts")
    buckets = set(re.findall(r"^\| bucket `…-(\w+)`", guide, re.MULTILINE))
    assert buckets == module.keys_of("buckets") - {"mirror", "location", "soft_delete_days", "delete_after_days"}
    assert f"version {module.provider_version}" in guide
