"""Rules VP6xx: the images that containers run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vlmpipe.job_spec.rules.base import Job, Pool
from vlmpipe.job_spec.violation import FieldPath, Violation
from vlmpipe.trainer.config.external_trainer import python_of_image
from vlmpipe.trainer.distributed.cuda_builds import CPU, cuda_builds

_CONTAINER_REGISTRY = re.compile(r"([a-z]+\.)?gcr\.io/(?P<path>.+)")
_ARTIFACT_REGISTRY = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev/(?P<path>[^/\s]+/[^/\s]+/\S+)")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
# Google's own repositories: on gcr.io they are served from Artifact Registry, and many are published by tag only.
_GOOGLE = (
    "ml-pipeline/", "cloud-aiplatform/", "deeplearning-platform-release/", "google-containers/", "google.com/",
    "vertex-ai/", "vertex-ai-restricted/", "cloud-builders/", "kaniko-project/",
)  # fmt: skip
# https://cloud.google.com/vertex-ai/docs/supported-frameworks-list: the first versions whose images are named by their
# Python, and the days on which images were withdrawn.
_PREBUILT = re.compile(
    r"-docker\.pkg\.dev/vertex-ai/training/(?P<framework>tf|pytorch)-[a-z]+\.(?P<major>\d+)-(?P<minor>\d+)(?![\d-])"
)
NAMED_BY_PYTHON = {"tf": (2, 12), "pytorch": (2, 0)}
ENDED = {("tf", (2, 12)): "2025-06-30", ("tf", (2, 13)): "2025-07-05", ("tf", (2, 14)): "2025-09-26"}
_WHEEL_PYTHON = re.compile(r"-cp3(\d+)-(cp3\d+t?|abi3|none)-[^-]+\.whl$")
OLDEST_PYTHON = (3, 11)  # requires-python of pyproject.toml
NEWER_PYTHON = (
    "Google's images for PyTorch and TensorFlow have 3.10; those for Ray, such as us-docker.pkg.dev/vertex-ai/training/"
    "ray-cpu.2-47.py311, have 3.11; or use a container with an image of your own"
)
EXAMPLE = "REGION-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE@sha256:..."


def check(job: Job) -> Iterator[Violation]:
    """Each pool's image. That it is missing altogether is found with the pools."""
    for pool in job.pools:
        if pool.image_uri:
            yield from _image(pool.at("container_spec", "image_uri"), pool.image_uri)
            yield from _gpu_code(job, pool)
        yield from _package(pool)
        yield from _package_python(pool)
        yield from _google_name(pool)


def _image(path: FieldPath, image: str) -> Iterator[Violation]:
    old, new = _CONTAINER_REGISTRY.fullmatch(image), _ARTIFACT_REGISTRY.fullmatch(image)
    place = old or new
    if place and place["path"].startswith(_GOOGLE):
        return
    if old:
        project = old["path"].partition("/")[0]
        fix = (
            "Container Registry was shut down; Artifact Registry serves gcr.io addresses of projects that were moved: "
            f"gcloud artifacts settings describe --project={project} shows legacyRedirectionState"
        )
        yield Violation("VP602", path, image, EXAMPLE, fix)
    elif not new:
        expected = f"{EXAMPLE}: a public registry may limit how often many nodes pull"
        yield Violation("VP604", path, image, expected, "push it to Artifact Registry")
    elif not _DIGEST.search(image):
        expected = "IMAGE@sha256:DIGEST: a tag may change between two runs"
        yield Violation(
            "VP603", path, image, expected, "gcloud artifacts docker images describe IMAGE prints the digest"
        )


def _gpu_code(job: Job, pool: Pool) -> Iterator[Violation]:
    """Machine code for the pool's GPUs, where the image's build of torch is known."""
    gpu = job.catalog.gpus.get(pool.accelerator_type)
    name = job.torch_builds.get(pool.image_uri, "")
    if gpu is None or not pool.accelerator_count or (name != CPU and name not in cuda_builds()):
        return
    able = [build for build in cuda_builds().values() if build.has_code_for(gpu.compute_capability)]
    if name in (build.name for build in able):
        return
    actual = f"torch's build {name} for {gpu.accelerator_type}, of compute capability {gpu.compute_capability:.1f}"
    fix = "use another GPU"
    if able:
        fix = f"build the trainer image with TORCH_BUILD={able[-1].name} and write cluster.torch_build: {able[-1].name}"
        if name != CPU:
            fix = f"{fix}, or use another GPU"
    yield Violation("VP606", pool.at("machine_spec", "accelerator_type"), actual, _capabilities(name), fix)


def _capabilities(name: str) -> str:
    if name == CPU:
        return "a build with CUDA: this one runs on CPUs only"
    return (
        f"compute capability {', '.join(f'{architecture:.1f}' for architecture in cuda_builds()[name].architectures)}"
    )


def _package(pool: Pool) -> Iterator[Violation]:
    if "python_package_spec" not in pool.spec:
        return
    package = pool.package
    for name in ("executor_image_uri", "package_uris", "python_module"):
        if not package.get(name) and pool.knows("python_package_spec", name):
            path = pool.at("python_package_spec", name)
            yield Violation(
                "VP605", path, "nothing", "a prebuilt image, packages on Cloud Storage and the module to run"
            )


def _package_python(pool: Pool) -> Iterator[Violation]:
    """Packages for another Python than that in the name of the image that installs them."""
    package = pool.package
    image = package.get("executor_image_uri", "")
    python = python_of_image(image)
    if python is None:
        return
    path, version = pool.at("python_package_spec", "executor_image_uri"), f"Python {python[0]}.{python[1]} ({image})"
    names = [uri.rpartition("/")[2] for uri in package.get("package_uris", ())]
    if python < OLDEST_PYTHON and any(
        name.startswith(("vlmpipe-", "vlmpipe.")) for name in (*names, package.get("python_module", ""))
    ):
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Violation("VP607", path, version, f"Python {oldest} or later, which vlmpipe needs", NEWER_PYTHON)
    for name in names:
        wheel = _WHEEL_PYTHON.search(name)
        tagged = (3, int(wheel[1])) if wheel else python
        if tagged > python or (wheel and wheel[2] != "abi3" and tagged != python):
            expected = f"Python {tagged[0]}.{tagged[1]}, for which {name} is built"
            yield Violation("VP607", path, version, expected, "build the wheel for the image's Python, or use an sdist")


def _google_name(pool: Pool) -> Iterator[Violation]:
    """Google's prebuilt images that have no such name, or are not offered any more."""
    executor = pool.package.get("executor_image_uri", "")
    for task, name, image in (
        ("container_spec", "image_uri", pool.image_uri),
        ("python_package_spec", "executor_image_uri", executor),
    ):
        match, path = _PREBUILT.search(image), pool.at(task, name)
        if match is None:
            continue
        framework, version = match["framework"], (int(match["major"]), int(match["minor"]))
        if ended := ENDED.get((framework, version)):
            expected = f"a version that is offered: this one was until {ended}"
            yield Violation("VP608", path, image, expected, "take a newer one, or push an image of your own")
        elif version >= NAMED_BY_PYTHON[framework] and not python_of_image(image):
            expected = "a name with the Python's version, such as .py310: there is no other"
            yield Violation("VP608", path, image, expected, f"write {match[0].rpartition('/')[2]}.py310")
