"""What the doctor cannot see by asking for permissions or a machine type alone: it looks closer, or says so."""

from __future__ import annotations

import pytest

from tests.fakes.google_apis import FakeGoogle
from tests.support.vertex.doctor_project import BUCKETS, IMAGE, PROJECT, REGION, account, run_file
from vlmpipe.doctor.doctor import examine
from vlmpipe.doctor.google_api import CannotSee, GoogleApi
from vlmpipe.doctor.rows import Row

DATA = f"gs://{BUCKETS['data']}"
JOBS = f"serviceAccount:{account('trainer')}"
REVIEWER = "roles/iam.securityReviewer"


def not_ok(*overrides: str) -> list[Row]:
    return [row for row in examine(run_file(*overrides)) if row.state != "ok"]


@pytest.mark.parametrize(
    ("resource", "member", "title"),
    [(DATA, JOBS, "team folder"), ("project", JOBS, "by name"), (DATA, "group:jobs@example.com", "group")],
)
def test_a_grant_with_a_condition_may_be_what_the_run_needs(
    google: FakeGoogle, resource: str, member: str, title: str
) -> None:
    google.bind("project", REVIEWER, f"serviceAccount:{account('submitter')}")
    google.policies[DATA]["roles/storage.objectViewer"].remove(JOBS)
    google.bind_with_condition(resource, "roles/storage.objectViewer", member, title)
    (row,) = not_ok()
    assert (row.state, row.subject) == ("cannot see", "trainer")
    assert f"but for a grant with a condition ({title})" in row.text
    assert "add-iam-policy-binding" in row.fix.splitlines()[1]


@pytest.mark.parametrize("reads", [True, False])
def test_what_lacks_is_missing_where_no_condition_is_seen(google: FakeGoogle, reads: bool) -> None:
    if reads:
        google.bind("project", REVIEWER, f"serviceAccount:{account('submitter')}")
        google.bind_with_condition(DATA, "roles/storage.objectViewer", f"serviceAccount:{account('builder')}", "other")
    google.policies[DATA]["roles/storage.objectViewer"].remove(JOBS)
    (row,) = not_ok()
    assert row.state == "missing"
    assert ("your account may not read the policies" in row.text) is not reads


def test_a_role_on_the_project_with_a_condition_is_not_called_missing(google: FakeGoogle) -> None:
    google.bind("project", REVIEWER, f"serviceAccount:{account('submitter')}")
    pipeline = f"serviceAccount:{account('pipeline')}"
    google.policies["project"]["roles/aiplatform.user"].remove(pipeline)
    google.bind_with_condition("project", "roles/aiplatform.user", pipeline, "working hours")
    (row,) = not_ok()
    assert row.state == "cannot see" and "working hours" in row.text


T4 = ("cluster.accelerator_type=NVIDIA_TESLA_T4", "cluster.accelerator_count=1")


@pytest.mark.parametrize(
    ("zones", "state", "words"),
    [
        ([f"{REGION}-a", "europe-west4-b"], "ok", f"n1-standard-8 with NVIDIA_TESLA_T4 in {REGION}: in {REGION}-a of"),
        ([f"{REGION}-b"], "missing", "in no zone of Compute Engine; regions that have it: none"),
        ([], "cannot see", "Compute Engine names no zone of the GPU nvidia-tesla-t4"),
    ],
)
def test_an_attached_gpu_must_be_in_a_zone_of_its_machine(
    google: FakeGoogle, zones: list[str], state: str, words: str
) -> None:
    google.gpu_zones["nvidia-tesla-t4"] = zones
    google.limits["aiplatform.googleapis.com/custom_model_training_nvidia_t4_gpus", REGION] = 8
    (row,) = [row for row in examine(run_file(*T4)) if row.subject == "machine" and "TESLA_T4" in row.text]
    assert row.state == state and words in row.text


SERVED = (f"deploy={{endpoint: e, image_uri: '{IMAGE}'}}", "register.registry=vertex://digits")
FOLDERS = "/usr/local/nvidia/lib64:/usr/local/nvidia/lib"


@pytest.mark.parametrize("form", ["index", "manifest"])
def test_folders_of_an_endpoints_image_that_its_environment_would_drop_are_named(google: FakeGoogle, form: str) -> None:
    google.limits["aiplatform.googleapis.com/custom_model_serving_nvidia_l4_gpus", REGION] = 8
    google.images[IMAGE], google.form = ["amd64"], "index" if form == "index" else "manifest"
    google.library_path = "/usr/local/nvidia/lib:/opt/vllm/lib"
    (row,) = [row for row in not_ok(*SERVED) if row.subject == "image"]
    assert row.state == "missing" and "finds libraries in /opt/vllm/lib, which deploy.env" in row.text
    path = row.fix.removeprefix("set deploy.env.LD_LIBRARY_PATH: ")
    assert path == f"{FOLDERS}:/opt/vllm/lib"
    mended = f"deploy={{endpoint: e, image_uri: '{IMAGE}', env: {{LD_LIBRARY_PATH: '{path}'}}}}"
    assert not [row for row in not_ok(mended, SERVED[1]) if row.subject == "image"]


def test_the_stand_in_hides_conditions_from_who_asks_for_an_older_policy(google: FakeGoogle) -> None:
    """As GetPolicyOptions says of versions 0 and 1: the role's name gets a suffix, and no condition is shown."""
    google.bind("project", REVIEWER, f"serviceAccount:{account('submitter')}")
    google.bind_with_condition(DATA, "roles/storage.objectViewer", JOBS, "folder")
    own = GoogleApi.own(PROJECT)
    path = f"/storage/v1/b/{BUCKETS['data']}/iam"
    assert "_withcond_" in str(own.get("storage", path).content)
    assert "folder" in str(own.get("storage", path, optionsRequestedPolicyVersion=3).content)
    google.policies["project"][REVIEWER].clear()
    assert own.get("storage", path, optionsRequestedPolicyVersion=3).status == 403
    assert own.ask("POST", "cloudresourcemanager", f"/v1/projects/{PROJECT}:getIamPolicy", json={}).status == 403
    with pytest.raises(CannotSee, match="501"):
        own.get("compute", f"/compute/v1/projects/{PROJECT}/aggregated/disks", filter='name = "a"')
