"""Rules VP6xx: the images that containers run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import FieldPath, Violation

_CONTAINER_REGISTRY = re.compile(r"([a-z]+\.)?gcr\.io/(?P<path>.+)")
_ARTIFACT_REGISTRY = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev/(?P<path>[^/\s]+/[^/\s]+/\S+)")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
# Google's own repositories: on gcr.io they are served from Artifact Registry, and many are published by tag only.
_GOOGLE = (
    "ml-pipeline/", "cloud-aiplatform/", "deeplearning-platform-release/", "google-containers/", "google.com/",
    "vertex-ai/", "vertex-ai-restricted/", "cloud-builders/", "kaniko-project/",
)  # fmt: skip
EXAMPLE = "REGION-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE@sha256:..."


def check(job: Job) -> Iterator[Violation]:
    """Each pool's image. That it is missing altogether is found with the pools."""
    for pool in job.pools:
        if pool.image_uri:
            yield from _image(pool.at("container_spec", "image_uri"), pool.image_uri)
        yield from _package(pool)


def _image(path: FieldPath, image: str) -> Iterator[Violation]:
    old, new = _CONTAINER_REGISTRY.fullmatch(image), _ARTIFACT_REGISTRY.fullmatch(image)
    place = old or new
    if place and place["path"].startswith(_GOOGLE):
        return
    if old:
        fix = "push it to Artifact Registry; a gcr.io repository that was moved there has a pkg.dev name too"
        yield Violation("VP602", path, image, EXAMPLE, fix)
    elif not new:
        expected = f"{EXAMPLE}: a public registry may limit how often many nodes pull"
        yield Violation("VP604", path, image, expected, "push it to Artifact Registry")
    elif not _DIGEST.search(image):
        expected = "IMAGE@sha256:DIGEST: a tag may change between two runs"
        yield Violation(
            "VP603", path, image, expected, "gcloud artifacts docker images describe IMAGE prints the digest"
        )


def _package(pool: Pool) -> Iterator[Violation]:
    package = pool.get("python_package_spec")
    if package is None:
        return
    for name in ("executor_image_uri", "package_uris", "python_module"):
        if not package.get(name) and pool.knows("python_package_spec", name):
            path = pool.at("python_package_spec", name)
            yield Violation(
                "VP605", path, "nothing", "a prebuilt image, packages on Cloud Storage and the module to run"
            )
