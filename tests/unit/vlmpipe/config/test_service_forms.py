"""What Vertex AI refuses, the run file and the rehearsal's server refuse by the same forms."""

from __future__ import annotations

import inspect

import pytest
from google.cloud.aiplatform_v1.types import CustomJob, CustomJobSpec

from tests.support.paths import ROOT
from vlmpipe.config import service_forms
from vlmpipe.config.run_config import RunConfig, load_run_file
from vlmpipe.config.service_forms import Form
from vlmpipe.config.validation_errors import RunFileError
from vlmpipe.platforms.vertex.requirements import require_vertex
from vlmpipe.rehearsal.http_server import ApiError
from vlmpipe.rehearsal.vertex.rules import check_custom_job_spec, check_encryption_key, check_labels

LORA = ROOT / "configs/llava-7b-lora.yaml"
KEY = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
BOARD = "projects/12/locations/us-central1/tensorboards/34"
GOOD = {
    "PROJECT": ["my-project", "example.com:my-project"],
    "REGION": ["us-central1", "europe-west12", "northamerica-northeast1", "me-central2", "africa-south1"],
    "SERVICE_ACCOUNT": ["a@my-project.iam.gserviceaccount.com", "1-compute@developer.gserviceaccount.com"],
    "NETWORK": ["projects/12/global/networks/default"],
    "TENSORBOARD": [BOARD],
    "ENCRYPTION_KEY": [KEY],
    "PERSISTENT_RESOURCE": ["mine-1"],
    "BUCKET_PREFIX": ["gs://bucket", "gs://bucket/a/b"],
    "IMAGE": ["us-docker.pkg.dev/p/r/i:v1", f"us-docker.pkg.dev/p/r/i@sha256:{'0' * 64}"],
    "PULLABLE_IMAGE": ["localhost:5000/i", "us-docker.pkg.dev/p/r/i:v1"],
    "LABEL_KEY": ["team", "a-_1", "a" * 63],
    "LABEL_VALUE": ["", "ml-ops", "1" * 63],
}
FORMS = dict(inspect.getmembers(service_forms, lambda value: isinstance(value, Form)))


def test_every_form_has_examples() -> None:
    assert FORMS.keys() == GOOD.keys()


@pytest.mark.parametrize("name", GOOD)
def test_a_form_is_of_the_whole_text(name: str) -> None:
    """A dollar in a pattern would let a final newline through."""
    for text in GOOD[name]:
        assert FORMS[name].fits(text)
        for wrong in (f"{text}\n", f" {text}", f"{text} ", f"{text}\u2028", f"{text}\x7f", f"x\n{text}"):
            if name == "BUCKET_PREFIX" and "/" in text.removeprefix("gs://") and "\n" not in wrong:
                continue  # names of objects may hold these; addresses of the run file may not, by storage_uri
            assert not FORMS[name].fits(wrong), repr(wrong)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('gcp.labels={Team: "ML Ops"}', "gcp.labels"),
        ("gcp.labels={team: ML}", "gcp.labels.team"),
        (f"gcp.labels={{{'a' * 64}: b}}", "gcp.labels"),
        ("gcp.labels={goog-managed: a}", "Google Cloud keeps names that begin with goog-"),
        ("gcp.labels={team: a@b}", "gcp.labels.team"),
        ("gcp.tensorboard='123'", 'gcp.tensorboard: found "123": expected projects/NUMBER/locations'),
        ("gcp.tensorboard=projects/1/locations/europe-west4/tensorboards/2", "gcp.tensorboard: is in europe-west4"),
        ("gcp.encryption_spec_key_name=mykey", "expected projects/PROJECT/locations/REGION/keyRings"),
        (f"gcp.encryption_spec_key_name={KEY.replace('us-central1', 'global')}", "is in global, expected one in"),
        (f'gcp.encryption_spec_key_name="{KEY}\\n"', "gcp.encryption_spec_key_name"),
        ("gcp.location=mars-north1", 'gcp.location: found "mars-north1": expected a region such as'),
        ("gcp.location=us-centrall1", "gcp.location"),
        ("gcp.location=", "gcp.location"),
        ('gcp.location="us-central1\\n"', "gcp.location"),
        ('gcp.pipeline_root="gs://bucket/x\\n"', "gcp.pipeline_root"),
    ],
)
def test_a_run_file_with_a_name_that_the_service_refuses_is_refused(override: str, words: str) -> None:
    with pytest.raises(RunFileError) as caught:
        load_run_file(LORA, ["gcp.location=us-central1", override] if "location" not in override else [override])
    assert words in str(caught.value)


@pytest.mark.parametrize("field", ["gcp.project", "gcp.service_account", "gcp.pipeline_image", "cluster.image_uri"])
def test_a_final_newline_is_not_sent(field: str) -> None:
    config = load_run_file(LORA)
    section, _, name = field.partition(".")
    value = str(getattr(getattr(config, section), name))
    with pytest.raises(RunFileError, match=field.replace(".", r"\.")):
        require_vertex(with_value(config, section, name, f"{value}\n"))


def with_value(config: RunConfig, section: str, name: str, value: str) -> RunConfig:
    changed = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed})


def test_the_rehearsal_refuses_by_the_same_forms() -> None:
    for labels in ({"goog-a": "b"}, {"Team": "a"}, {"team": "a b"}, {"a" * 64: "b"}):
        with pytest.raises(ApiError):
            check_labels(labels)
    for key, place in ((f"{KEY}\n", "us-central1"), (KEY, "us-east1"), ("mykey", "us-central1")):
        with pytest.raises(ApiError):
            check_encryption_key(CustomJob(encryption_spec={"kms_key_name": key}), place)
    check_encryption_key(CustomJob(encryption_spec={"kms_key_name": KEY}), "us-central1")
    pool = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1, "container_spec": {"image_uri": "i"}}
    for board, place in ((f"{BOARD}\n", "us-central1"), (BOARD, "us-east1")):
        spec = CustomJobSpec(worker_pool_specs=[pool], tensorboard=board, service_account=GOOD["SERVICE_ACCOUNT"][0])
        with pytest.raises(ApiError, match="tensorboard"):
            check_custom_job_spec(spec, place)
