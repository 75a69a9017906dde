"""Whether the run's images are in their registry, for machines with amd64 processors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vlmpipe.access.needs import Named, named
from vlmpipe.doctor import remedies
from vlmpipe.doctor.google_api import CannotSee, GoogleApi
from vlmpipe.doctor.rows import Row, missing, ok, unseen

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

NEEDED = "amd64"
REGISTRY = re.compile(r"(?P<host>(?P<location>[a-z0-9-]+)-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)/(?P<name>[^@:]+)")
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")


def image_rows(config: RunConfig, api: GoogleApi) -> Iterator[Row]:
    """A row for each image: one request for its manifest, and one for its settings where the manifest lists none."""
    fields: dict[str, list[Named]] = {}
    for one in named(config):
        if one.kind == "image":
            fields.setdefault(one.resource, []).append(one)
    for image, of_image in fields.items():
        field = ", ".join(one.field for one in of_image)
        try:
            yield _row(field, image, api)
        except CannotSee as error:
            yield unseen("image", f"{field}: {image}: {error.why}", error.fix)


def _row(field: str, image: str, api: GoogleApi) -> Row:
    parts = REGISTRY.match(image)
    if not parts:
        return unseen("image", f"{field}: {image} is in no registry of Google's")
    host, name = parts["host"], parts["name"]
    rest = image[parts.end() :]
    reference = rest.removeprefix("@") if rest.startswith("@") else rest.removeprefix(":").partition("@")[0] or "latest"
    accept = {"Accept": ", ".join((*INDEXES, *MANIFESTS))}
    answer = api.ask("GET", "images", f"/v2/{name}/manifests/{reference}", host=host, headers=accept)
    if answer.status == 404:
        text = "build and push it: make build builder=gcloud config=CONFIG"
        return missing("image", f"{field}: there is no {image}", text)
    if answer.status != 200:
        return unseen("image", f"{field}: {image}: {answer.status} {answer.message}".strip(), _let_read(parts, api))
    found = _architectures(api, host, name, answer.content)
    if not found:
        return unseen("image", f"{field}: {image} is there; its manifest names no architecture")
    if NEEDED in found:
        return ok("image", f"{field}: {image} is there, for {NEEDED}")
    text = f"{field}: {image} is for {', '.join(sorted(found))}, and Vertex AI's machines are {NEEDED}"
    return missing(
        "image", text, "build it for them: docker buildx build --platform=linux/amd64, or make build builder=gcloud"
    )


def _architectures(api: GoogleApi, host: str, name: str, manifest: dict[str, Any]) -> set[str]:
    """The architectures for which the image has Linux files."""
    if "manifests" in manifest:
        platforms = [one.get("platform", {}) for one in manifest["manifests"]]
        return {str(one.get("architecture")) for one in platforms if one.get("os") == "linux"}
    digest = manifest.get("config", {}).get("digest", "")
    if not digest:
        return set()
    settings = api.ask("GET", "images", f"/v2/{name}/blobs/{digest}", host=host).content
    return {str(settings["architecture"])} if settings.get("architecture") else set()


def _let_read(parts: re.Match[str], api: GoogleApi) -> str:
    project, _, rest = parts["name"].partition("/")
    repository = rest.partition("/")[0]
    if not (parts["location"] and repository):
        return ""
    return remedies.grant_on_repository(parts["location"], project, repository, api.member)
