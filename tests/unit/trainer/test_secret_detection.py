"""Secrets are recognized by their names and forms, and ordinary values are not taken for them."""

from __future__ import annotations

import hashlib
import random
import string
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pipelines.job_specs import (
    HUB_TOKEN,
)
from vlmpipe.trainer.secret_detection import form_of_secret, is_secret_name, may_be_secret


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"), ("MAX_TOKENS", "4096"), ("EOS_TOKEN", "2"), ("PAD_TOKEN", "<pad>"),
        ("IMAGE_TOKEN", "<image>"), ("BOS_TOKEN", "[BOS]"), ("HF_TOKEN_PATH", "/secrets/hf"), ("KEY_COLUMN", "caption"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/gcs/bucket/key.json"), ("DB_PASSWORD", "$DB_PASSWORD"),
        ("WANDB_API_KEY", ""), ("WANDB_API_KEY", "projects/p/secrets/w/versions/1"), ("USE_AUTH_TOKEN", "true"),
        ("PRIMARY_KEY", "id"), ("SECRET_NAME", "wandb-api-key"), ("ADD_SPECIAL_TOKENS", "all"), ("NUM_SECRETS", "many"),
    ],
)  # fmt: skip
def test_an_ordinary_variable_name_is_not_taken_for_a_secret(name: str, value: str) -> None:
    assert not (is_secret_name(name) and may_be_secret(name, value))


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN", "wandb-api-key", "clientSecret", "SSH_PRIVATE_KEY", "COMET_APIKEY", "AZURE_CREDENTIALS",
    ],
)  # fmt: skip
def test_a_secret_is_recognized_by_its_name(name: str) -> None:
    assert is_secret_name(name) and may_be_secret(name, "0123456789abcdef")


ORDINARY_VALUES = [
    "us-central1-docker.pkg.dev/example-project/vlmpipe/trainer@sha256:" + "0a" * 32,
    "gs://bucket/LLaVA-1.5/Run2026-11-20T12/Checkpoint00001",
    "/gcs/bucket/Data/LLaVA/Images2014/Train2014/COCO_train2014_000000000009.jpg",
    "https://storage.googleapis.com/example-bucket/A1b2C3d4/E5f6G7h8.tar",
    "LlavaNextForConditionalGeneration2Point5VL72B", "Qwen2_5_VLForConditionalGeneration_72B_Instruct_AWQ",
    "expandable_segments:True,max_split_size_mb:512", "projects/123456/locations/us-central1/tensorboards/4567890123",
    "Meta-Llama-3-1-405B-Instruct-FP8-KV-Cache-v2", "HF_DATASETS_CACHE_DIR_2026_Release_Candidate_01",
    "openai/clip-vit-large-patch14-336", "ce19dc912ca5cd21c8a653c79e251e808ccabcd1", "2026-11-20T18:42:06.123456+00:00",
    "COCO2017Train118kVal5kTest41kLLaVAInstruct150kMix665k", "A100x8-H100x8-B200x8-L4x1-T4x4-V100x8-RTX6000",
    "trainer@example-project.iam.gserviceaccount.com", "--config=gs://bucket/run.json", "INFO", "sk-learn", "hf_home",
    "torch.distributed.elastic.multiprocessing.errors", "AKIAExample", "eyes.eyelashes.eyebrows", "redis://cache:6379/0",
]  # fmt: skip


@pytest.mark.parametrize("value", ORDINARY_VALUES)
def test_an_ordinary_value_is_not_taken_for_a_secret(value: str) -> None:
    assert form_of_secret(value) == ""


@given(st.binary(min_size=1, max_size=64), st.uuids(), st.sampled_from(["md5", "sha1", "sha256", "sha512"]))
def test_digests_and_uuids_are_not_taken_for_secrets(data: bytes, identifier: uuid.UUID, algorithm: str) -> None:
    digest = hashlib.new(algorithm, data).hexdigest()
    for value in (digest, digest.upper(), str(identifier), str(identifier).upper(), identifier.hex, f"sha256:{digest}"):
        assert form_of_secret(value) == ""


@pytest.mark.parametrize(
    "value",
    [
        HUB_TOKEN, "sk-proj-" + 40 * "a", "ghp_" + 36 * "a", "glpat-" + 20 * "a", "AIza" + 35 * "a", "ya29." + 30 * "a",
        "AKIA" + 16 * "A", "xoxb-1234567890-abc", "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", '{"private_key": "x"}',
        "-----BEGIN RSA PRIVATE KEY-----", "postgres://user:letmein@db/x", "GOCSPX-" + 28 * "a",
    ],
)  # fmt: skip
def test_a_well_known_form_of_secret_is_recognized(value: str) -> None:
    assert form_of_secret(value) not in ("", "random text")
    assert form_of_secret(f"--option={value}") != ""


def test_most_random_text_of_32_characters_or_more_is_recognized() -> None:
    source = random.Random(0)
    letters = string.ascii_letters + string.digits
    for length, least in ((32, 0.85), (40, 0.85), (64, 0.9)):
        texts = ["".join(source.choices(letters, k=length)) for _ in range(1000)]
        assert sum(form_of_secret(text) == "random text" for text in texts) >= least * len(texts)
